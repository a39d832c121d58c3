"""Packs arrays into FP8 blocks and INT4 groups, the reverse of `skyrl_tx.weights.tensor_file`."""

import ml_dtypes
import numpy as np

BLOCK, GROUP = 128, 32


def pack_fp8(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers [O, I] and scales [O / 128, I / 128], rounded up, that hold nearly `array`."""
    rows, columns = (-(-size // BLOCK) for size in array.shape)
    scales = np.empty((rows, columns), np.float32)
    numbers = np.empty(array.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(rows, columns):
        own = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = np.abs(array[own]).max() / 448
        numbers[own] = (array[own] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return numbers, scales


def unpack_fp8(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float32 numbers [O, I], one by one."""
    found = np.empty(numbers.shape, np.float32)
    for o, i in np.ndindex(numbers.shape):
        found[o, i] = np.float32(numbers[o, i]) * scales[o // BLOCK, i // BLOCK]
    return found


def pack_int4(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers from -8 to 7 that hold nearly `array` [O, I], their words [O, I / 8], and scales [O, I / 32]."""
    groups = array.reshape(len(array), -1, GROUP)
    scales = (np.abs(groups).max(-1) / 7).astype(ml_dtypes.bfloat16)
    numbers = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]), -8, 7).astype(np.int64)
    by_word = numbers.reshape(len(array), -1, 8) + 8
    words = (by_word << (4 * np.arange(8))).sum(-1).astype(np.uint32).view(np.int32)
    return numbers.reshape(array.shape), words, scales
