"""Tensors that checkpoints store in packed formats, and LoRA factors that are stacked over experts.

A packed tensor is stored as two or more tensors: numbers with few bits, and scales. The classes
here read and unpack only the region that is indexed. They have the methods of a safetensors slice
(`get_shape` and indexing). An index is a tuple of Python slices with a start and an end.

FP8 and INT4 are returned as float32. A number times its scale is exact for INT4, and rounded once
for FP8. MXFP4 is returned as bfloat16 and exact.

MXFP4 (OCP Microscaling Formats 1.0) is the format of gpt-oss experts: four bits per number and one
scale per 32 numbers. A tensor X [..., I, O] is stored as `X_blocks`, bytes [..., O, I / 32, 16]
with two numbers each (low nibble first), and `X_scales`, bytes [..., O, I / 32] with exponents of
two.

Legend: E experts, I inputs and O outputs of a linear map, R rank.
"""

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from skyrl_tx.weights.weight_map import get_stack_names

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


Factors = tuple[np.ndarray, np.ndarray]
"""The factors A [R, I] and B [O, R] of one module.

For a stack of experts they are [E, R, I] and [E, O, R]. If all experts share a factor, its E is 1.
"""

_OUTER = {"w1": 0, "w3": 0, "w2": 1}
"""Which factor has the hidden size as a dim, A (0) or B (1), by the last part of the stack's name."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_OUTER)})")


def find_stack(module: str) -> tuple[str, int | None]:
    """Return the stack and the index of an expert's module.

    For any other module, return the name of the module and None.
    """
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    prefix, index, leaf = match.groups()
    stacked = get_stack_names(prefix).get(leaf)
    return (module, None) if stacked is None else (f"{prefix}.{stacked}", int(index))


def is_stack(module: str) -> bool:
    """Return whether a module has the name of a stack of experts."""
    match = _STACK.fullmatch(module)
    return match is not None and match[2] in get_stack_names(match[1]).values()


def unstack(stack: str, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """Return the factors of each expert by module name, as views of the factors of a stack."""
    match = _STACK.fullmatch(stack)
    assert match is not None, stack
    prefix, stacked_leaf = match.groups()
    leaves = {stacked: leaf for leaf, stacked in get_stack_names(prefix).items()}
    num_experts = max(len(a), len(b))
    all_a, all_b = (np.broadcast_to(array, (num_experts, *array.shape[1:])) for array in (a, b))
    return {f"{prefix}.{index}.{leaves[stacked_leaf]}": (all_a[index], all_b[index]) for index in range(num_experts)}


def stack_experts(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Return the factors with the experts of each layer stacked in order.

    A factor that all experts share is stored once. An expert without an adapter gets zeros.
    """
    stacked = {module: pair for module, pair in factors.items() if find_stack(module)[1] is None}
    for module, pairs in group_by_stack(factors).items():
        a, b = next(iter(pairs.values()))
        empty = np.zeros_like(a), np.zeros_like(b)
        all_pairs = [pairs.get(index, empty) for index in range(max(pairs) + 1)]
        stacks = [np.stack([pair[factor] for pair in all_pairs]) for factor in (0, 1)]
        outer = _OUTER[module.rpartition(".")[2]]
        if 1 < len(pairs) == len(all_pairs) and is_shared(module, pairs):
            stacks[outer] = stacks[outer][:1]
        stacked[module] = stacks[0], stacks[1]
    return stacked


def group_by_stack(factors: Mapping[str, Factors]) -> dict[str, dict[int, Factors]]:
    """Return the factors of experts, grouped by stack and by the index of the expert."""
    grouped: dict[str, dict[int, Factors]] = {}
    for module, pair in factors.items():
        stack, index = find_stack(module)
        if index is not None:
            grouped.setdefault(stack, {})[index] = pair
    return grouped


def is_shared(stack: str, pairs: Mapping[int, Factors]) -> bool:
    """Return whether all experts of a stack have the same factor with the hidden size."""
    outer = _OUTER[stack.rpartition(".")[2]]
    first = next(iter(pairs.values()))[outer]
    return all(np.array_equal(pair[outer], first) for pair in pairs.values())


def convert_form(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a factor of experts between one per expert and one for all, if `shape` asks for it.

    The array is returned unchanged if the conversion would change a number, or if the shapes differ
    in another way.
    """
    if array.ndim == 3 and (1, *array.shape[1:]) == shape and (array == array[:1]).all():
        return array[:1]
    return np.broadcast_to(array, shape) if array.ndim == 3 and array.shape == (1, *shape[1:]) else array


def suggest_expert_lora(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return a hint for error messages, or "".

    It names the setting for factors that all experts share, or for factors of each expert.
    """
    if len(shape) != 3 or shape[1:] != expected[1:] or 1 not in (shape[0], expected[0]):
        return ""
    theirs = "shared" if shape[0] == 1 else "own"
    return f": load it on a server with --backend-config.expert-lora {theirs}"
