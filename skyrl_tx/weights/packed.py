"""Tensors that checkpoints store packed in two or more tensors each: FP8 blocks, INT4 groups and MXFP4.

They are read by their plain names, part by part. FP8 and INT4 have the methods of a slice of safetensors and
return float32, in which every product is exact, except that a product of FP8 is rounded once.

MXFP4 (OCP Microscaling Formats 1.0) is the type of the experts of gpt-oss: four bits a number and one scale
for 32 numbers. A tensor X [..., I, O] is stored as `X_blocks`, bytes [..., O, I / 32, 16] of two numbers each
with the lower half first, and `X_scales`, bytes [..., O, I / 32] with the exponents of powers of two. Each
number is exact in bfloat16.

Legend: I inputs and O outputs of a linear map.
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
_PER_WORD = 8  # numbers of four bits
# The two numbers of each byte, the lower half first.
_INT4_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.float32) - 8


class Fp8Tensor:
    """Numbers in FP8 [..., O, I], with a scale for each block of 128 x 128; blocks at the edges are smaller.

    As DeepSeek-V3 stores them: arXiv:2412.19437, section 3.3.
    """

    def __init__(self, numbers: Any, scales: Any) -> None:
        self._numbers = numbers
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the plain tensor."""
        return tuple(self._numbers.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part, float32; each slice has its start and its end."""
        *stack, outputs, inputs = part
        first = [each.start // FP8_BLOCK for each in (outputs, inputs)]
        last = [-(-each.stop // FP8_BLOCK) for each in (outputs, inputs)]
        scales = self._scales[(*stack, slice(first[0], last[0]), slice(first[1], last[1]))].astype(np.float32)
        found = self._numbers[part].astype(np.float32)
        for dim, each, begin in ((-2, outputs, first[0]), (-1, inputs, first[1])):
            within = np.arange(each.start, each.stop) // FP8_BLOCK - begin
            scales = scales.take(within, axis=dim)
        found *= scales
        return found


class Int4Tensor:
    """Numbers of four bits [O, I], eight in each word, the lowest first, with a scale for each 32 of a row.

    They are stored 8 too large, not in two's complement: "pack-quantized" in neuralmagic/compressed-tensors,
    src/compressed_tensors/compressors/quantized_compressors/pack_quantized.py, `pack_to_int32`. vLLM reads them so too
    (`uint4b8`).
    """

    def __init__(self, words: Any, scales: Any, _: Any = None) -> None:
        self._words = words
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the plain tensor."""
        outputs, num_words = self._words.get_shape()
        return outputs, num_words * _PER_WORD

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part, float32; each slice has its start and its end."""
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


MXFP4_BLOCK = 32  # numbers that share a scale
_MXFP4_EXPONENT_BIAS = 127  # of a scale's exponent


def _make_mxfp4_table() -> np.ndarray:
    """Return the two numbers of each scale and byte, bfloat16, as one uint32 at 256 * scale + byte."""
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    values, byte = np.concatenate([half, -half]), np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):  # the highest scales give infinity
        numbers = np.ldexp(pairs, np.arange(256)[:, None, None] - _MXFP4_EXPONENT_BIAS)
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)


_MXFP4_PAIRS = _make_mxfp4_table()


class Mxfp4Tensor:
    """A tensor of which parts are read and unpacked, with the methods of a slice of safetensors."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the plain tensor."""
        *stack, outputs, num_blocks, _ = self._blocks.get_shape()
        return *stack, num_blocks * MXFP4_BLOCK, outputs

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part, bfloat16; each slice has its start and its end."""
        *stack, inputs, outputs = part
        first, last = inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK)
        index = (*stack, outputs, slice(first, last))
        values = unpack_mxfp4(self._blocks[(*index, slice(0, MXFP4_BLOCK // 2))], self._scales[index])
        return values[..., inputs.start - first * MXFP4_BLOCK : inputs.stop - first * MXFP4_BLOCK, :]


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return numbers [..., I, O], bfloat16, of blocks [..., O, I / 32, 16] and scales [..., O, I / 32]."""
    *stack, outputs, num_blocks, _ = blocks.shape
    found = np.empty((*stack, num_blocks * MXFP4_BLOCK, outputs), np.uint16)

    def write(index: tuple[int, ...]) -> None:
        place = scales[index].astype(np.uint16)[..., None] * np.uint16(256) + blocks[index]
        found[index] = _MXFP4_PAIRS[place].view(np.uint16).reshape(outputs, -1).T

    with ThreadPoolExecutor() as pool:  # an expert each: numpy works in parallel here
        for _ in pool.map(write, np.ndindex(*stack)):
            pass
    return found.view(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Packing:
    """A way to store a tensor: what the names of its parts end in, of which the first has the numbers."""

    suffixes: tuple[str, ...]
    unpack: Callable[..., Any]
    """Returns a slice of the plain tensor, given those of the parts."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the parts of a tensor."""
        return tuple(name + suffix for suffix in self.suffixes)


PACKINGS = (
    Packing(("_blocks", "_scales"), Mxfp4Tensor),  # MXFP4
    Packing(("", "_scale_inv"), Fp8Tensor),
    Packing(("_packed", "_scale", "_shape"), Int4Tensor),
)


def find_packing(name: str, stored: Collection[str]) -> Packing | None:
    """Return how a tensor is packed, by its plain name and the names of all stored tensors; None if it is not."""
    return next((each for each in PACKINGS if all(part in stored for part in each.parts(name))), None)


def find_plain_names(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the file of each tensor by its plain name; that of a packed one has its numbers."""
    plain = dict(files)
    for packing in PACKINGS:
        own = packing.suffixes[1]
        for name in [each.removesuffix(own) for each in files if each.endswith(own)]:
            if find_packing(name, files) is packing:
                for part in packing.parts(name):
                    plain.pop(part)
                plain[name] = files[packing.parts(name)[0]]
    return plain


Factors = tuple[np.ndarray, np.ndarray]
"""A [R, I] and B [O, R] of one module; of a stack [E, R, I] and [E, O, R], where E is 1 of a factor that all share."""

_OUTER = {"w1": 0, "w3": 0, "w2": 1}
"""Which factor, A or B, lies next to the hidden size, by the last part of the stack's name."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_OUTER)})")


def find_stack(module: str) -> tuple[str, int | None]:
    """Return the stack that holds the module of an expert, and its index; other modules are returned with None."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    prefix, index, leaf = match.groups()
    stacked = get_stack_names(prefix).get(leaf)
    return (module, None) if stacked is None else (f"{prefix}.{stacked}", int(index))


def is_stack(module: str) -> bool:
    """Return whether a module is named as a stack of experts."""
    match = _STACK.fullmatch(module)
    return match is not None and match[2] in get_stack_names(match[1]).values()


def unstack(stack: str, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """Return the factors of each expert by its module, views of those of a stack."""
    match = _STACK.fullmatch(stack)
    assert match is not None, stack
    prefix, leaf = match.groups()
    leaf_of = {stacked: name for name, stacked in get_stack_names(prefix).items()}
    num_experts = max(len(a), len(b))
    each_a, each_b = (np.broadcast_to(array, (num_experts, *array.shape[1:])) for array in (a, b))
    return {f"{prefix}.{index}.{leaf_of[leaf]}": (each_a[index], each_b[index]) for index in range(num_experts)}


def stack_experts(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Return the factors with the experts of each layer stacked in order.

    A factor that all share is there once, and an expert without an update gets zeros.
    """
    found = {module: pair for module, pair in factors.items() if find_stack(module)[1] is None}
    for module, pairs in group_by_stack(factors).items():
        a, b = next(iter(pairs.values()))
        empty = np.zeros_like(a), np.zeros_like(b)
        all_pairs = [pairs.get(index, empty) for index in range(max(pairs) + 1)]
        stacks = [np.stack([pair[factor] for pair in all_pairs]) for factor in (0, 1)]
        outer = _OUTER[module.rpartition(".")[2]]
        if 1 < len(pairs) == len(all_pairs) and is_shared(module, pairs):
            stacks[outer] = stacks[outer][:1]
        found[module] = stacks[0], stacks[1]
    return found


def group_by_stack(factors: Mapping[str, Factors]) -> dict[str, dict[int, Factors]]:
    """Return the factors of experts by their stacks and by their number."""
    found: dict[str, dict[int, Factors]] = {}
    for module, pair in factors.items():
        stack, index = find_stack(module)
        if index is not None:
            found.setdefault(stack, {})[index] = pair
    return found


def is_shared(stack: str, pairs: Mapping[int, Factors]) -> bool:
    """Return whether all experts of a stack have the same factor next to the hidden size."""
    outer = _OUTER[stack.rpartition(".")[2]]
    first = next(iter(pairs.values()))[outer]
    return all(np.array_equal(pair[outer], first) for pair in pairs.values())


def convert_form(found: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
    """Return factors of experts as one for all, or as one each, as wanted and where that changes no number."""
    if found.ndim == 3 and (1, *found.shape[1:]) == wanted and (found == found[:1]).all():
        return found[:1]
    return np.broadcast_to(found, wanted) if found.ndim == 3 and found.shape == (1, *wanted[1:]) else found


def suggest_expert_lora(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return which server takes factors of experts that are of the other form."""
    if len(found) != 3 or found[1:] != wanted[1:] or 1 not in (found[0], wanted[0]):
        return ""
    theirs = "shared" if found[0] == 1 else "own"
    return f": load it on a server with --backend-config.expert-lora {theirs}"
