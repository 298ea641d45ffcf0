"""How weights lie in the arena, by format; every layout keeps all the information of the file.

A matrix [rows, k] is cut into tiles of 16 rows, the last one padded with zero weights. A tile of a quantised format is
a run of groups of 32 k, in blocks of ``block_groups``. A group is

    nibbles  [256]  byte 64 j + 4 r + i: row r at k = 8 j + i in the low half, at 8 j + 4 + i in the high half; i < 4
    fifths   [64]   five-bit formats: bit v of byte 4 r + i belongs to row r, k = 4 v + i, and stands for 16
    sixths   [128]  six-bit formats: two such runs of bit pairs, for v = 0..3 and v = 4..7
    bytes    [512]  eight-bit formats, instead of all those: byte 64 v + 4 r + i is row r, k = 4 v + i
    scales          f16 [16]; of K formats the small factors as u8 [16]; of Q6_K s8 [16] for k < 16, then for the rest
    minimums        like the scales; absent where values have a constant offset

and the block of a K format begins with its super scales, f16 [16], and those of the minimums where it has any.
A tile of a float format is its numbers, [k][16].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROWS = 16  # rows of a tile
GROUP = 32  # k of a group
K_BLOCK = 8  # groups of a block of a K format


@dataclass(frozen=True)
class Layout:
    """One format. A value is scale * (q - offset), or scale * q + minimum, with q unsigned of ``bits`` bits."""

    name: str  # of the file's format
    code: int  # what stands for it in tables of matrices
    bits: int  # of a stored q; of a number in float formats
    file_block: int = 1  # values of a block in the file
    file_bytes: int = 0  # bytes of a block in the file
    offset: int = 0  # 0 = affine, with a minimum for each group
    is_quantised: int = 1
    is_k: int = 0  # scales are products of a super scale and a small integer
    halves: int = 0  # a scale for each 16 k

    @property
    def block_groups(self) -> int:
        return K_BLOCK if self.is_k else 1

    @property
    def values_bytes(self) -> int:
        """Bytes of the q of a group."""
        return 64 * self.bits

    @property
    def header_bytes(self) -> int:
        """Bytes of super scales and super minimums."""
        return (32 if self.halves else 64) if self.is_k else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale for each row; with halves there are two, else a minimum follows if there is any."""
        return 16 if self.is_k else 32

    @property
    def group_bytes(self) -> int:
        return self.values_bytes + self.scale_bytes * (2 if self.halves or not self.offset else 1)

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + self.block_groups * self.group_bytes

    @property
    def k_bytes(self) -> int:
        """Bytes of one k of a tile of floats."""
        return ROWS * self.bits // 8

    def tile_bytes(self, k: int) -> int:
        """Bytes of 16 rows of k values."""
        if not self.is_quantised:
            return ROWS * k * self.bits // 8
        return k // (GROUP * self.block_groups) * self.block_bytes

    def packed_bytes(self, rows: int, k: int) -> int:
        """Bytes of a whole matrix in the arena, a multiple of 64."""
        return (-(-rows // ROWS) * self.tile_bytes(k) + 63) // 64 * 64

    def file_row_bytes(self, k: int) -> int:
        return k // self.file_block * self.file_bytes


F32 = Layout("F32", 0, 32, 1, 4, is_quantised=0)
F16 = Layout("F16", 1, 16, 1, 2, is_quantised=0)
BF16 = Layout("BF16", 2, 16, 1, 2, is_quantised=0)
Q4_0 = Layout("Q4_0", 3, 4, 32, 18, offset=8)
Q4_1 = Layout("Q4_1", 4, 4, 32, 20)
Q5_0 = Layout("Q5_0", 5, 5, 32, 22, offset=16)
Q5_1 = Layout("Q5_1", 6, 5, 32, 24)
Q8_0 = Layout("Q8_0", 7, 8, 32, 34, offset=128)
Q4_K = Layout("Q4_K", 8, 4, 256, 144, is_k=1)
Q5_K = Layout("Q5_K", 9, 5, 256, 176, is_k=1)
Q6_K = Layout("Q6_K", 10, 6, 256, 210, offset=32, is_k=1, halves=1)

BY_CODE = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
LAYOUTS = {layout.name: layout for layout in BY_CODE}
FIRST_QUANTISED = Q4_0.code

# What kernels read about a layout at run time: TABLE[code, FIELD].
FIELDS = (
    "bits", "offset", "is_k", "halves", "file_bytes", "block_groups", "block_bytes", "header_bytes", "values_bytes",
    "scale_bytes", "group_bytes", "k_bytes",
)  # fmt: skip
(
    BITS, OFFSET, IS_K, HALVES, FILE_BYTES, BLOCK_GROUPS, BLOCK_BYTES, HEADER, VALUES, SCALE, GROUP_BYTES, K_BYTES,

) = range(len(FIELDS))  # fmt: skip
TABLE = np.array([[getattr(layout, field) for field in FIELDS] for layout in BY_CODE], np.int64)
