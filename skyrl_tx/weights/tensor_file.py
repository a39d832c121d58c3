"""Read tensors of safetensors files as views of the mapped file, copy them fast, and unpack them.

Linear maps are [out, in] in files and [in, out] in memory. A transposed copy in strips that stay in
the processor's cache is two to five times as fast as numpy's copy of the whole array. Copies release
the interpreter's lock, so threads can copy multiple tensors at the same time.

A packed tensor is stored as two or more tensors: numbers with few bits, and scales. Its class reads
and unpacks only the region that is indexed, and has the methods of a safetensors slice (`get_shape`
and indexing). An index is a tuple of Python slices with a start and an end.

FP8 and INT4 are returned as float32. A number times its scale is exact for INT4, and rounded once
for FP8. MXFP4 is returned as bfloat16 and exact.

MXFP4 (OCP Microscaling Formats 1.0) is the format of gpt-oss experts: four bits per number and one
scale per 32 numbers. A tensor X [..., I, O] is stored as `X_blocks`, bytes [..., O, I / 32, 16]
with two numbers each (low nibble first), and `X_scales`, bytes [..., O, I / 32] with exponents of
two.

Legend: I inputs and O outputs of a linear map.
"""

import json
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


FP8_BLOCK = 128
INT4_GROUP = 32
_PER_WORD = 8  # four-bit numbers in a word of 32 bits
# The two numbers of each byte value, low nibble first.
_INT4_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.float32) - 8


class Fp8Tensor:
    """Numbers in FP8 [..., O, I] with one scale per block of 128 x 128.

    Blocks at the edges are smaller.

    This is the format of DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """

    def __init__(self, numbers: Any, scales: Any) -> None:
        self._numbers = numbers
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked tensor."""
        return tuple(self._numbers.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the unpacked tensor, float32."""
        # Read the scales of all blocks that the part overlaps.
        *stack, outputs, inputs = part
        first = [dim.start // FP8_BLOCK for dim in (outputs, inputs)]
        last = [-(-dim.stop // FP8_BLOCK) for dim in (outputs, inputs)]
        scales = self._scales[(*stack, slice(first[0], last[0]), slice(first[1], last[1]))].astype(np.float32)

        # Repeat each scale for the numbers of its block.
        numbers = self._numbers[part].astype(np.float32)
        for axis, dim, first_block in ((-2, outputs, first[0]), (-1, inputs, first[1])):
            blocks = np.arange(dim.start, dim.stop) // FP8_BLOCK - first_block
            scales = scales.take(blocks, axis=axis)
        numbers *= scales
        return numbers


class Int4Tensor:
    """Four-bit numbers [O, I] with one scale per 32 numbers of a row.

    A word has eight numbers, the lowest bits first. A number n is stored as n + 8, not in two's
    complement. This is the format "pack-quantized" of neuralmagic/compressed-tensors
    (`pack_to_int32` in src/compressed_tensors/compressors/quantized_compressors/pack_quantized.py),
    which vLLM calls `uint4b8`.
    """

    def __init__(self, words: Any, scales: Any, _: Any = None) -> None:
        self._words = words
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked tensor."""
        outputs, num_words = self._words.get_shape()
        return outputs, num_words * _PER_WORD

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the unpacked tensor, float32."""
        outputs, inputs = part
        first, last = inputs.start // INT4_GROUP, -(-inputs.stop // INT4_GROUP)
        per_group = INT4_GROUP // _PER_WORD
        words = np.ascontiguousarray(self._words[outputs, first * per_group : last * per_group])
        numbers = _INT4_PAIRS[words.astype("<i4", copy=False).view(np.uint8)].reshape(
            len(words), last - first, INT4_GROUP
        )
        numbers *= self._scales[outputs, first:last].astype(np.float32)[..., None]
        rows = numbers.reshape(len(words), -1)
        return rows[:, inputs.start - first * INT4_GROUP : inputs.stop - first * INT4_GROUP]


MXFP4_BLOCK = 32  # numbers per scale
_MXFP4_EXPONENT_BIAS = 127


def _make_mxfp4_table() -> np.ndarray:
    """Return the two bfloat16 numbers of each scale and byte as one uint32.

    Entry 256 * scale + byte has the two numbers.
    """
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    values, byte = np.concatenate([half, -half]), np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):  # the highest scales give infinity
        numbers = np.ldexp(pairs, np.arange(256)[:, None, None] - _MXFP4_EXPONENT_BIAS)
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)


_MXFP4_PAIRS = _make_mxfp4_table()


class Mxfp4Tensor:
    """An MXFP4 tensor [..., I, O], see the module's description."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked tensor."""
        *stack, outputs, num_blocks, _ = self._blocks.get_shape()
        return *stack, num_blocks * MXFP4_BLOCK, outputs

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the unpacked tensor, bfloat16."""
        *stack, inputs, outputs = part
        first, last = inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK)
        index = (*stack, outputs, slice(first, last))
        values = unpack_mxfp4(self._blocks[(*index, slice(0, MXFP4_BLOCK // 2))], self._scales[index])
        return values[..., inputs.start - first * MXFP4_BLOCK : inputs.stop - first * MXFP4_BLOCK, :]


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpack blocks [..., O, I / 32, 16] and scales [..., O, I / 32] to bfloat16 [..., I, O]."""
    *stack, outputs, num_blocks, _ = blocks.shape
    unpacked = np.empty((*stack, num_blocks * MXFP4_BLOCK, outputs), np.uint16)

    def write(index: tuple[int, ...]) -> None:
        entry = scales[index].astype(np.uint16)[..., None] * np.uint16(256) + blocks[index]
        unpacked[index] = _MXFP4_PAIRS[entry].view(np.uint16).reshape(outputs, -1).T

    with ThreadPoolExecutor() as pool:  # one task per expert; numpy releases the GIL
        for _ in pool.map(write, np.ndindex(*stack)):
            pass
    return unpacked.view(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Packing:
    """A packed format: the suffixes of its stored tensors, and its class.

    The first tensor has the numbers.
    """

    suffixes: tuple[str, ...]
    unpack: Callable[..., Any]
    """Makes the unpacked tensor, given safetensors slices of the stored tensors. Nothing is read yet."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors of a tensor."""
        return tuple(name + suffix for suffix in self.suffixes)


PACKINGS = (
    Packing(("_blocks", "_scales"), Mxfp4Tensor),  # MXFP4
    Packing(("", "_scale_inv"), Fp8Tensor),
    Packing(("_packed", "_scale", "_shape"), Int4Tensor),
)


def find_packing(name: str, stored: Collection[str]) -> Packing | None:
    """Return the format of a tensor.

    `name` has no suffix, and `stored` has the names of all stored tensors. None means that the
    tensor is not packed.
    """
    return next((packing for packing in PACKINGS if all(part in stored for part in packing.parts(name))), None)


def find_plain_names(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the file of each tensor by its name without the suffix of a packed format.

    For a packed tensor it is the file of the numbers.
    """
    plain = dict(files)
    for packing in PACKINGS:
        scale_suffix = packing.suffixes[1]
        for name in [stored.removesuffix(scale_suffix) for stored in files if stored.endswith(scale_suffix)]:
            if find_packing(name, files) is packing:
                for part in packing.parts(name):
                    plain.pop(part)
                plain[name] = files[packing.parts(name)[0]]
    return plain
