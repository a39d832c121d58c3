"""MXFP4 (OCP Microscaling Formats 1.0), the type of gpt-oss's experts: four bits a number, a scale for 32 of them.

A tensor X [..., I, O] is stored as two: `X_blocks`, bytes [..., O, I / 32, 16] of two numbers each, the lower half
first, and `X_scales`, bytes [..., O, I / 32] with the exponents of powers of two. Each number is exact in bfloat16.

Legend: I inputs and O outputs of a linear map.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 32  # numbers that share a scale
_BIAS = 127  # of a scale's exponent


def _table() -> np.ndarray:
    """Return the two numbers of each scale and byte, bfloat16, as one uint32 at 256 * scale + byte."""
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    values, byte = np.concatenate([half, -half]), np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):  # the highest scales give infinity
        numbers = np.ldexp(pairs, np.arange(256)[:, None, None] - _BIAS)
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)


_PAIRS = _table()


class PackedTensor:
    """A tensor of which parts are read and unpacked, with the methods of a slice of safetensors."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the plain tensor."""
        *stack, outputs, num_blocks, _ = self._blocks.get_shape()
        return *stack, num_blocks * BLOCK, outputs

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a part, bfloat16; each slice has its start and its end."""
        *stack, inputs, outputs = part
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        index = (*stack, outputs, slice(first, last))
        values = unpack(self._blocks[(*index, slice(0, BLOCK // 2))], self._scales[index])
        return values[..., inputs.start - first * BLOCK : inputs.stop - first * BLOCK, :]


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return numbers [..., I, O], bfloat16, of blocks [..., O, I / 32, 16] and scales [..., O, I / 32]."""
    *stack, outputs, num_blocks, _ = blocks.shape
    found = np.empty((*stack, num_blocks * BLOCK, outputs), np.uint16)

    def write(index: tuple[int, ...]) -> None:
        place = scales[index].astype(np.uint16)[..., None] * np.uint16(256) + blocks[index]
        found[index] = _PAIRS[place].view(np.uint16).reshape(outputs, -1).T

    with ThreadPoolExecutor() as pool:  # an expert each: numpy works in parallel here
        for _ in pool.map(write, np.ndindex(*stack)):
            pass
    return found.view(ml_dtypes.bfloat16)
