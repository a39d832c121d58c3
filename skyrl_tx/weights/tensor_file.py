"""Files of safetensors, of which parts of tensors are read."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

FP8 = "F8_E4M3"
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class TensorFile:
    """An open file. Raises SafetensorError if it is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = safe_open(path, framework="np")

    def __enter__(self) -> "TensorFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        """Return a tensor, of which parts are read. Raises SafetensorError if the file lacks it."""
        found = self._file.get_slice(name)
        return Fp8Numbers(self._bytes(name)) if found.get_dtype() == FP8 else found

    def _bytes(self, name: str) -> np.ndarray:
        """Return a mapped tensor of bytes, because safetensors reads no float8 for numpy."""
        start, header = self._header
        offset, shape = start + header[name]["data_offsets"][0], tuple(header[name]["shape"])
        return np.memmap(self._path, np.uint8, "r", offset, shape)

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """The place of the first tensor, and what the file says of each."""
        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return 8 + size, json.loads(file.read(size))


class Fp8Numbers:
    """A tensor in E4M3 (OCP 8-bit floating point), with the methods of a slice of safetensors."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part, float32."""
        return _FP8_VALUES[self._array[part]]
