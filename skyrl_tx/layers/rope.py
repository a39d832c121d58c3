"""Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864).

Unless noted otherwise, heads have the two-halves layout of Hugging Face: dim i and dim i + H / 2
form a pair, which is rotated by one angle.

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
    """The RoPE frequencies of a model. Fields are named as in its Hugging Face config.

    - `linear` divides all frequencies by `factor`.
    - `dynamic` changes the frequencies only of sequences that are longer than the context of the
      config. The server refuses such sequences, so here the frequencies never change.
    - `longrope` (Ding et al. 2024, arXiv:2402.13753) divides each frequency by its `short_factor`.
      For sequences that are longer than the original context it has other factors, which are not
      used: the server refuses such sequences.
    - `llama3` (the scaling of Llama 3.1) divides low frequencies only: those with wavelengths above
      original / low_freq_factor, where original is `original_max_position_embeddings`. Frequencies
      with wavelengths below original / high_freq_factor are kept. Between the two bounds, it
      interpolates.
    - `yarn` (Peng et al. 2023, arXiv:2309.00071) divides the frequency of a pair that turns less
      than `beta_slow` times within the original context, and keeps the frequency of a pair that
      turns more than `beta_fast` times. Between these pairs, it interpolates linearly. YaRN also
      multiplies cosine and sine by `amplitude`.
    """

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the first and the last pair between which YaRN interpolates are rounded to whole numbers."""
    attention_factor: float | None = None
    """The amplitude of YaRN or LongRoPE. None means that `amplitude` computes it."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()

    def extend_context(self, length: int) -> int:
        """Return the maximum length of a sequence, given `max_position_embeddings` of the config.

        Configs of some kinds state the length before the scaling. For example, a length of 4096
        with `linear` and a factor of 4 means 16384.
        """
        if self.kind == "linear":
            return int(length * max(self.factor, 1.0))
        if self.kind == "longrope":
            return min(length, int(self.original_max_position_embeddings))
        is_scaled = self.kind in ("yarn", "llama3")
        return max(length, int(self.factor * self.original_max_position_embeddings)) if is_scaled else length

    def compute_frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of each pair of dims, float32 [H / 2]."""
        plain = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
        if self.kind == "linear":
            return (plain / self.factor).astype(np.float32)
        if self.kind == "longrope":
            return (plain / np.array(self.short_factor, np.float32)).astype(np.float32)
        if self.kind == "llama3":
            turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            return (kept * plain + (1.0 - kept) * plain / self.factor).astype(np.float32)
        if self.kind == "yarn":
            divided = self._compute_ramp(head_dim)
            return (plain / self.factor * divided + plain * (1.0 - divided)).astype(np.float32)
        return plain.astype(np.float32)

    def _compute_ramp(self, head_dim: int) -> np.ndarray:
        """Return how much YaRN divides the frequency of each pair: from 0 (not at all) to 1."""

        def find_pair(times: float) -> float:
            wavelength = self.original_max_position_embeddings / times
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        low, high = find_pair(self.beta_fast), find_pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 0.001
        return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0.0, 1.0).astype(np.float32)

    @property
    def amplitude(self) -> float:
        """The factor of cosine and sine."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            original = self.original_max_position_embeddings
            return math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return self._compute_mscale(self.mscale) / self._compute_mscale(self.mscale_all_dim)
        return self._compute_mscale(1.0)

    @property
    def score_factor(self) -> float:
        """The factor of attention scores in DeepSeek's models: the square of the scale for `mscale_all_dim`."""
        return self._compute_mscale(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    def _compute_mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def compute_angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Return cosine and sine for each position, times the amplitude: float32 [..., H / 2]."""
        angle = positions[..., None].astype(jnp.float32) * self.compute_frequencies(head_dim)
        if self.amplitude == 1.0:
            return jnp.cos(angle), jnp.sin(angle)
        return jnp.cos(angle) * self.amplitude, jnp.sin(angle) * self.amplitude


def rotate_pairs(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate `x` [..., N, H], in which dims 2 i and 2 i + 1 form a pair, by H / 2 angles.

    All heads share the angles. The result has the two-halves layout: the first dims of all pairs,
    then the second dims. The order of dims does not change attention scores, because queries and
    keys have the same order.
    """
    return rotate(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), cosine, sine)


@jax.custom_vjp
def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate `x` [..., N, H] by angles that all heads share.

    There are H / 2 angles, or fewer if only the first dims of each head are rotated. The backward
    pass rotates the gradient back by the same angles. The angles themselves get no gradient.
    """
    return _rotate(x, cosine, sine, is_back=False)


def _rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array, *, is_back: bool) -> jax.Array:
    num_pairs = cosine.shape[-1]
    first, second, rest = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs], x[..., 2 * num_pairs :]
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    if is_back:
        rotated = first * cosine + second * sine, second * cosine - first * sine
    else:
        rotated = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate([*rotated, rest] if rest.shape[-1] else rotated, axis=-1)


def _rotate_forward(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rotate(x, cosine, sine), (cosine, sine)


def _rotate_backward(angles: tuple[jax.Array, jax.Array], d_rotated: jax.Array) -> tuple[jax.Array, None, None]:
    return _rotate(d_rotated, *angles, is_back=True), None, None


rotate.defvjp(_rotate_forward, _rotate_backward)
