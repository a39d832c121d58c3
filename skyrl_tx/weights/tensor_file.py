"""Read tensors of safetensors files as views of the mapped file, and copy them fast.

Linear maps are [out, in] in files and [in, out] in memory. A transposed copy in strips that stay in
the processor's cache is two to five times as fast as numpy's copy of the whole array. Copies release
the interpreter's lock, so threads can copy multiple tensors at the same time.
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

FP8 = "F8_E4M3"
_DTYPES: dict[str, Any] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, FP8: np.uint8},
}
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

_STRIP_ROWS, _STRIP_COLUMNS = 1024, 16
"""The strips of a transposed copy, measured with maps of 1024 x 3072 to 12288 x 4096 numbers."""
_ALIGNMENT = 64
"""JAX on CPU uses an array of the host without a copy if its address is a multiple of this."""


class TensorFile:
    """A mapped safetensors file. Raises SafetensorError for any other file."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np") as checked:  # compares the header with the size of the file
            self._names = list(checked.keys())
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._start, self._header = 8 + size, json.loads(file.read(size))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return self._names

    def get_slice(self, name: str) -> "StoredTensor":
        """Return an object to read parts of a tensor.

        Raises SafetensorError if the file lacks it, or for a type that numpy lacks.
        """
        if name not in self._names:
            raise SafetensorError("the file does not contain this tensor")
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise SafetensorError(f"its type {entry['dtype']} is not one of {', '.join(_DTYPES)}")
        first, last = entry["data_offsets"]
        stored = np.frombuffer(self._map, np.uint8, last - first, self._start + first)
        array = stored.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return Fp8Numbers(array) if entry["dtype"] == FP8 else StoredTensor(array)

    def release_memory(self) -> None:
        """Let the system take back the memory of tensors that were read. They can be read again."""
        self._map.madvise(mmap.MADV_DONTNEED)


class StoredTensor:
    """A tensor with the methods of a safetensors slice. Its parts are views of the file."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part."""
        return self._array[part]


class Fp8Numbers(StoredTensor):
    """A tensor in E4M3 (OCP 8-bit floating point)."""

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part as float32."""
        return _FP8_VALUES[self._array[part]]


def make_aligned(shape: list[int], dtype: Any) -> np.ndarray:
    """Return an array without values that JAX on CPU can use without a copy."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)


def copy_array(source: np.ndarray, into: np.ndarray) -> None:
    """Copy all values, and convert their type. `source` may be the transposed view of an array."""
    # As integers: numpy holds the interpreter's lock while it copies bfloat16.
    is_widened = source.dtype == ml_dtypes.bfloat16 and into.dtype == np.float32
    if is_widened:
        source, into = source.view(np.uint16), into.view(np.uint32)
    elif source.dtype == into.dtype:
        source, into = source.view(f"u{source.itemsize}"), into.view(f"u{into.itemsize}")

    for part in _iterate_strips(source):
        if is_widened:  # a bfloat16 is the upper half of a float32
            np.left_shift(source[part], 16, out=into[part], dtype=np.uint32, casting="unsafe")
        else:
            into[part] = source[part]


def _iterate_strips(array: np.ndarray) -> Iterator[Any]:
    """Yield the parts in which an array is copied: strips if its last dims are transposed, else rows."""
    if array.ndim < 2 or array.strides[-1] <= array.strides[-2]:
        yield from (slice(row, row + _STRIP_ROWS) for row in range(0, len(array), _STRIP_ROWS))
        return
    num_rows, num_columns = array.shape[-2:]
    for index in np.ndindex(array.shape[:-2]):
        for row in range(0, num_rows, _STRIP_ROWS):
            for column in range(0, num_columns, _STRIP_COLUMNS):
                yield *index, slice(row, row + _STRIP_ROWS), slice(column, column + _STRIP_COLUMNS)
