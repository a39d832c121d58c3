"""Packs arrays into MXFP4, the reverse of `skyrl_tx.weights.tensor_file`."""

import numpy as np

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def draw(generator: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers [..., I, O] that MXFP4 can hold, float32, with their blocks and scales."""
    *stack, inputs, outputs = shape
    code = generator.integers(0, 16, (*stack, outputs, inputs // 32, 32), np.uint8)
    scales = generator.integers(118, 126, (*stack, outputs, inputs // 32), np.uint8)
    numbers = np.ldexp(VALUES[code], scales[..., None].astype(np.int32) - 127)
    blocks = code[..., 0::2] | code[..., 1::2] << 4
    return numbers.reshape(*stack, outputs, inputs).swapaxes(-1, -2), blocks, scales
