"""A checkpoint's tensors, packed into one arena that the kernels read.

What is packed how (the ``weights`` setting):

* ``auto``: every matrix in its file's own format, losslessly.
* ``f32``: every matrix unpacked to float32, the reference path.
* ``q8``, ``q4``: matrices stored as floats are quantised, to Q8_0 or Q4_1; the embedding and the head to Q8_0 with
  both. What the file holds quantised stays as it is, and so does a matrix whose rows are no multiple of 32.

Norms and biases are float32 always.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tlserve.errors import ModelError
from tlserve.kernels import pack
from tlserve.kernels.attention import attention_addresses, attention_leaves
from tlserve.kernels.jit import compile_all
from tlserve.kernels.layout import LAYOUTS, ROWS, Layout
from tlserve.kernels.leaves import addresses, leaves
from tlserve.kernels.state import ABSENT, Matrix, Norm, Weights
from tlserve.model.checkpoint import Checkpoint
from tlserve.model.config import ModelConfig, inverse_frequencies
from tlserve.model.layout import EMBEDDING, FINAL_NORM, HEAD
from tlserve.model.memory import check_fits
from tlserve.model.quants import dequantise, dequantise_rows
from tlserve.model.tensors import Tensor

Precision = Literal["auto", "f32", "q8", "q4"]
Progress = Callable[[str, int, int], None]  # what, done, in all

_ALIGNMENT = 64
# Stored bytes that a thread packs at once. Threads take the stretches of a file in order, so that together they still
# read it from its beginning to its end.
_STRETCH = 2 << 20
# Stretches that the system is asked to read before a thread gets to them, so that disks work while threads pack. Left
# to itself it reads ahead by 128 KiB, and a thread waits as long as it packs.
_AHEAD = 8
_MATRIX_NAMES = {
    Matrix.Q: "self_attn.q_proj",
    Matrix.K: "self_attn.k_proj",
    Matrix.V: "self_attn.v_proj",
    Matrix.OUTPUT: "self_attn.o_proj",
    Matrix.GATE: "mlp.gate_proj",
    Matrix.UP: "mlp.up_proj",
    Matrix.DOWN: "mlp.down_proj",
}
_NORM_NAMES = {
    Norm.INPUT: "input_layernorm",
    Norm.POST_ATTENTION: "post_attention_layernorm",
    Norm.Q: "self_attn.q_norm",
    Norm.K: "self_attn.k_norm",
}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor, and where and how the arena holds it; a vector has no layout."""

    tensor: Tensor
    at: int
    size: int
    layout: Layout | None

    def fields(self, bias: int) -> list[int]:
        """The values of ``state.Field`` for a matrix."""
        assert self.layout is not None
        rows, columns = self.tensor.shape
        return [self.layout.code, self.at, rows, columns, bias]


def load_weights(
    checkpoint: Checkpoint,
    precision: Precision,
    max_model_len: int,
    kv_number_bytes: int,
    num_threads: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Weights:
    """Compile the kernels that a model needs, and pack its tensors with so many threads.

    The files' pages are given back to the system as they have been read. ``progress`` is told kernels, then bytes,
    in the caller's thread; what it raises ends the packing. Raises ConfigError when the weights do not fit in memory,
    ModelError naming the tensor when one cannot be quantised.
    """
    placed = _place(checkpoint, precision)
    codes = sorted({item.layout.code for item in placed.values() if item.layout})
    group = checkpoint.config.num_heads // checkpoint.config.num_kv_heads
    compile_all(
        [*leaves(codes), *attention_leaves(group, kv_number_bytes)],
        lambda done, total, name: progress("kernels", done, total),
    )
    total = _size(placed)
    check_fits("the weights", total)
    arena = pack.allocate(total)
    _fill(arena, placed.values(), num_threads, lambda done: progress("weights", done, total))
    config = checkpoint.config
    cosines, sines = _rotations(config, max_model_len)
    return Weights(
        kernels=addresses(codes),
        arena=arena,
        matrices=np.array([_layer_matrices(placed, layer) for layer in range(config.num_layers)], np.int64),
        norms=np.array([_layer_norms(placed, layer) for layer in range(config.num_layers)], np.int64),
        embedding=np.array(placed[EMBEDDING].fields(ABSENT), np.int64),
        head=np.array(placed[HEAD if HEAD in placed else EMBEDDING].fields(ABSENT), np.int64),
        final_norm=np.array([placed[FINAL_NORM].at], np.int64),
        constants=np.array([config.rms_norm_eps], np.float32),
        attention=attention_addresses(group, kv_number_bytes),
        cosines=cosines,
        sines=sines,
    )


def packed_bytes(checkpoint: Checkpoint, precision: Precision) -> int:
    """The size of the arena that ``load_weights`` fills."""
    return _size(_place(checkpoint, precision))


def _size(placed: dict[str, _Placed]) -> int:
    return max(item.at + item.size for item in placed.values())


def _place(checkpoint: Checkpoint, precision: Precision) -> dict[str, _Placed]:
    """An aligned place for each tensor, in the order in which a forward pass reads them."""
    placed: dict[str, _Placed] = {}
    at = 0
    for name in _reading_order(checkpoint):
        tensor = checkpoint.tensors[name]
        layout = _layout(tensor, precision) if len(tensor.shape) == 2 else None
        size = layout.packed_bytes(*tensor.shape) if layout else -(-4 * tensor.shape[0] // _ALIGNMENT) * _ALIGNMENT
        placed[name] = _Placed(tensor, at, size, layout)
        at += size
    return placed


def _reading_order(checkpoint: Checkpoint) -> Iterator[str]:
    last = [name for name in (FINAL_NORM, HEAD) if name in checkpoint.tensors]
    yield EMBEDDING
    yield from (name for name in checkpoint.tensors if name != EMBEDDING and name not in last)
    yield from last


def _layout(tensor: Tensor, precision: Precision) -> Layout:
    if precision == "f32":
        return LAYOUTS["F32"]
    if precision == "auto" or tensor.format.is_quantised or tensor.shape[1] % 32:
        return LAYOUTS[tensor.format.name]
    return LAYOUTS["Q8_0" if precision == "q8" or tensor.name in (EMBEDDING, HEAD) else "Q4_1"]


def _fill(arena: NDArray[np.uint8], items: Iterable[_Placed], num_threads: int, report: Callable[[int], None]) -> None:
    """Both packing and the first touch of an arena's pages, which the system clears, go faster with more threads."""
    stretches = [(item, rows) for item in items for rows in _stretches(item)]
    stored = [item.tensor.stored[rows] for item, rows in stretches]

    def fill(number: int) -> int:
        for array in stored[number + _AHEAD : number + _AHEAD + 1]:
            _advise(array, "MADV_WILLNEED")
        size = _fill_rows(arena, *stretches[number])
        _advise(stored[number], "MADV_DONTNEED")  # the file still has them, so what is read once more comes back
        return size

    for array in stored[:_AHEAD]:
        _advise(array, "MADV_WILLNEED")
    done = 0
    with ThreadPoolExecutor(num_threads, "pack") as executor:
        sizes = [executor.submit(fill, number) for number in range(len(stretches))]
        try:
            for size in as_completed(sizes):
                done += size.result()
                report(done)
        finally:
            executor.shutdown(cancel_futures=True)


def _stretches(item: _Placed) -> Iterator[slice]:
    """The rows of a tensor in parts of whole tiles, so that each has an aligned place."""
    num_rows, row_bytes = item.tensor.stored.shape
    step = max(1, _STRETCH // (row_bytes * ROWS)) * ROWS
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _fill_rows(arena: NDArray[np.uint8], item: _Placed, rows: slice) -> int:
    """Gives the number of bytes filled."""
    tensor, layout = item.tensor, item.layout
    if layout is None:
        values = dequantise(tensor)
        arena[item.at : item.at + values.nbytes] = values.view(np.uint8)
        size = item.size
    else:
        columns = tensor.shape[1]
        at, size = (layout.packed_bytes(count, columns) for count in (rows.start, rows.stop - rows.start))
        stored = tensor.stored[rows] if tensor.row_order is None else tensor.stored[tensor.row_order[rows]]
        pack.pack(layout, _converted(tensor, stored, layout), columns, arena, item.at + at)
    return size


def _converted(tensor: Tensor, stored: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """Some of a tensor's rows as rows of the layout's own format. Raises ModelError for what it cannot hold."""
    if layout is LAYOUTS[tensor.format.name]:
        return stored
    values = dequantise_rows(stored, tensor.format)
    if layout is LAYOUTS["F32"]:
        return values.view(np.uint8)
    if not np.isfinite(values).all():  # one such number would become the scale of its block
        raise ModelError(f"{tensor.name}: has numbers that are not finite, which cannot be quantised")
    return pack.quantise_rows(values, layout)


def _advise(array: NDArray[np.uint8], advice: str) -> None:
    """Tell the system, where it knows such advice, what is to come of an array's pages, if a mapped file has them."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, advice):
        return
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # pages that the process has locked, for one, are not given back
        base.madvise(getattr(mmap, advice), first, start + array.nbytes - first)


def _layer_matrices(placed: dict[str, _Placed], layer: int) -> list[list[int]]:
    def fields(name: str) -> list[int]:
        bias = placed.get(f"model.layers.{layer}.{name}.bias")
        return placed[f"model.layers.{layer}.{name}.weight"].fields(bias.at if bias else ABSENT)

    return [fields(_MATRIX_NAMES[matrix]) for matrix in Matrix]


def _layer_norms(placed: dict[str, _Placed], layer: int) -> list[int]:
    names = [f"model.layers.{layer}.{_NORM_NAMES[norm]}.weight" for norm in Norm]
    return [placed[name].at if name in placed else ABSENT for name in names]


def _rotations(config: ModelConfig, max_model_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of every position and pair, flat."""
    frequencies, factor = inverse_frequencies(config)
    angles = (np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies).ravel()
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)
