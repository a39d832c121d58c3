"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the two-halves layout of Hugging Face checkpoints.

Legend: B batch, T tokens, N heads, H head dim.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a model, as its config names them.

    `linear` divides all frequencies by `factor`. `llama3` (the scaling of Llama 3.1) divides the low ones only: with
    wavelengths above original / low_freq_factor, interpolating smoothly down to original / high_freq_factor.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of each pair of dims, float32 [H / 2]."""
        plain = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
        if self.kind == "linear":
            return (plain / self.factor).astype(np.float32)
        if self.kind == "llama3":
            turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            return (kept * plain + (1.0 - kept) * plain / self.factor).astype(np.float32)
        return plain.astype(np.float32)

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Return cosine and sine for each position, float32 `positions.shape + [H / 2]`."""
        angle = positions[..., None].astype(jnp.float32) * self.frequencies(head_dim)
        return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Return `x` [..., N, H] rotated by angles [..., H / 2] that its heads share."""
    first, second = jnp.split(x, 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
