"""Linear maps that checkpoints store as small numbers with scales: FP8 in blocks, INT4 in groups.

Both have the methods of a slice of safetensors and return float32, in which every product is exact but FP8's is rounded
once.

Legend: I inputs and O outputs of a linear map.
"""

from typing import Any

import numpy as np

FP8_BLOCK = 128
INT4_GROUP = 32
_PER_WORD = 8  # numbers of four bits
# The two numbers of each byte, the lower half first.
_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.float32) - 8


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
        numbers = _PAIRS[words.astype("<i4", copy=False).view(np.uint8)].reshape(len(words), last - first, INT4_GROUP)
        numbers *= self._scales[outputs, first:last].astype(np.float32)[..., None]
        rows = numbers.reshape(len(words), -1)
        return rows[:, inputs.start - first * INT4_GROUP : inputs.stop - first * INT4_GROUP]
