"""Stored numbers back to float32, as the formats define them, bit for bit.

This is the plain reference: the packed weights that kernels compute with are tested against it.
Each decoder takes blocks, uint8 [num_blocks, block_bytes], and gives float32 [num_blocks, block_size].
Within a block the order of operations is part of the format: (scale * quant) first, then the offset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tlserve.model.tensors import Format, Tensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantise(tensor: Tensor) -> Floats:
    """The values of a tensor as float32 in its shape."""
    return dequantise_rows(tensor.data, tensor.format).reshape(tensor.shape)


def dequantise_rows(rows: Bytes, format: Format) -> Floats:
    """Rows of stored bytes, [rows, row_bytes], as float32 [rows, columns]."""
    blocks = np.ascontiguousarray(rows).reshape(-1, format.block_bytes)
    with np.errstate(all="ignore"):  # an infinite scale is the file's business, as in every other reader
        values = _DECODERS[format](blocks)
    return values.reshape(rows.shape[0], -1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2n] values of 4 bits: all the low halves, then all the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start` of each block as 0 or 16, [num_blocks, 32]; bit i belongs to value i."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 6-bit scales and minimums of 8 groups, each [num_blocks, 8], from their 12 bytes.

    Bytes 0-3 hold the scales of groups 0-3 and bytes 4-7 their minimums, in the low six bits. Groups 4-7 have
    their low four bits in bytes 8-11 (scale in the low half) and their top two bits above those of group - 4.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _k_affine(blocks: Bytes, quants: Bytes) -> Floats:
    """Values of the Q4_K and Q5_K family from their quants, [num_blocks, 8, 32]."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    scales = (_half(blocks, 0) * scales)[:, :, np.newaxis]
    minimums = (_half(blocks, 2) * minimums)[:, :, np.newaxis]
    return scales * quants.astype(np.float32) - minimums


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes -> [num_blocks, 8, 32]: each run of 32 bytes holds two groups, the first in its low halves."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    groups = np.arange(8, dtype=np.uint8)[:, np.newaxis]
    fifth = blocks[:, np.newaxis, 16:48] >> groups & np.uint8(1)  # bit g of byte i belongs to value i of group g
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | fifth * np.uint8(16))


def _q6_k(blocks: Bytes) -> Floats:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis]
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)
    quants = (low | high << 4).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales[:, :, np.newaxis] * quants


_DECODERS: dict[Format, Callable[[Bytes], Floats]] = {
    Format.F32: _f32,
    Format.F16: _f16,
    Format.BF16: _bf16,
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
    Format.Q5_0: _q5_0,
    Format.Q5_1: _q5_1,
    Format.Q8_0: _q8_0,
    Format.Q4_K: _q4_k,
    Format.Q5_K: _q5_k,
    Format.Q6_K: _q6_k,
}
