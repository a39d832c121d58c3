"""Array types of the contract, and the largest matrix of targets that a request may hold.

All arrays are numpy arrays, contiguous, in the machine's (little-endian) byte order. Those that the engine hands to a
backend are read-only: they are views of the bytes of stored requests, and `torch.from_numpy` needs a copy of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
NumberArray = NDArray[Any]
"""An array of any number type of the wire: int32, int64 or float32 (the API widens bfloat16)."""

MAX_CELLS = 2**24
"""The most cells of one matrix of targets [T, K], or of those that a backend computes at once.

A float32 array of this size takes 64 MiB. API and engine refuse larger ones before they allocate memory.
"""
_MIN_POSITIONS = 32
"""Backends pad shorter sequences to this length, so that they take the memory of it."""


def max_targets(num_positions: int) -> int:
    """Return the most targets per position of a sequence: a power of two, because backends pad to powers of two."""
    limit = max(MAX_CELLS // max(num_positions, _MIN_POSITIONS), 1)
    return 1 << limit.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Selected cells of a matrix as compressed sparse rows: row i has `columns[crow[i]:crow[i + 1]]`."""

    crow: Int64Array
    columns: Int64Array

    def of(self, matrix: NumberArray) -> NumberArray:
        """Return the values of these cells, row by row, [number of cells]."""
        return matrix[np.repeat(np.arange(len(self.crow) - 1), np.diff(self.crow)), self.columns]
