"""How the numbers of a tensor are stored in a model file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Format(Enum):
    """Storage formats that can be computed with; the value is the type's number in a GGUF file.

    A row is a sequence of blocks; each block holds `block_size` numbers in `block_bytes` bytes.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_size(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def is_quantised(self) -> bool:
        return self.block_size > 1


_BLOCKS = {
    Format.F32: (1, 4),
    Format.F16: (1, 2),
    Format.BF16: (1, 2),
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One named tensor of a model; its bytes stay in the mapped file.

    `shape` is (rows, columns) or (n,), outermost first; `columns` is the axis a matrix product sums over.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    stored: NDArray[np.uint8]  # [rows, row_bytes] as in the file, a view of the mapping; a vector is one row
    row_order: NDArray[np.intp] | None = None  # [rows]: row r of the tensor is stored[row_order[r]]

    @property
    def data(self) -> NDArray[np.uint8]:
        """The rows in the tensor's own order, [rows, row_bytes], rows contiguous.

        A view of the file, except where the file keeps its rows in another order (`row_order`): then every
        access gathers a copy, so take it once, use it and let it go.
        """
        return self.stored if self.row_order is None else self.stored[self.row_order]
