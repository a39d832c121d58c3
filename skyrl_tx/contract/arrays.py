"""Array types of the contract, and the maximum size of a matrix of targets.

All arrays are contiguous numpy arrays in little-endian byte order. Arrays that the engine passes to
a backend are read-only, because they are views of the bytes of stored requests. `torch.from_numpy`
needs a copy of such an array.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Uint16Array = NDArray[np.uint16]
Uint32Array = NDArray[np.uint32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
NumberArray = NDArray[Any]
"""An array of a number type that the protocol transmits: int32, int64 or float32.

The API widens bfloat16.
"""

MAX_CELLS = 2**24
"""Maximum number of cells of a matrix of targets [T, K].

It is also the maximum number of target cells that a backend computes at once.

A float32 array of this size takes 64 MiB. The API and the engine refuse larger matrices before they
allocate memory.
"""
_MIN_POSITIONS = 32
"""Backends pad shorter sequences to this length, so they count as long as this."""


def max_targets(num_positions: int) -> int:
    """Return the maximum number of targets per position for a sequence of `num_positions` tokens.

    The result is a power of two, because backends pad the number of targets to a power of two.
    """
    limit = max(MAX_CELLS // max(num_positions, _MIN_POSITIONS), 1)
    return 1 << limit.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Selected cells of a matrix, as compressed sparse rows.

    Row i has the columns `columns[crow[i]:crow[i + 1]]`. For example, crow [0, 2, 2, 3] and columns
    [4, 7, 1] select the cells (0, 4), (0, 7) and (2, 1).
    """

    crow: Int64Array
    columns: Int64Array

    def of(self, matrix: NumberArray) -> NumberArray:
        """Return the values of the selected cells of `matrix`, row by row: [number of cells]."""
        return matrix[np.repeat(np.arange(len(self.crow) - 1), np.diff(self.crow)), self.columns]
