"""Array types of the contract: numpy, contiguous, in the machine's (little-endian) byte order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
NumberArray = NDArray[Any]
"""Any dtype of the wire: int32, int64, float32 (bfloat16 is widened on arrival)."""
