"""Array types of the contract: numpy, contiguous, in the machine's (little-endian) byte order."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
NumberArray = NDArray[Any]
"""Any dtype of the wire: int32, int64, float32 (bfloat16 is widened on arrival)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Some cells of a matrix in their order, as compressed sparse rows: row i has columns[crow[i]:crow[i + 1]]."""

    crow: Int64Array
    columns: Int64Array

    def of(self, matrix: NumberArray) -> NumberArray:
        """Return what stands in these cells."""
        return matrix[np.repeat(np.arange(len(self.crow) - 1), np.diff(self.crow)), self.columns]
