"""Root mean square norm: Zhang and Sennrich 2019, arXiv:1910.07467."""

import jax
import jax.numpy as jnp

from skyrl_tx.layers.stable_bits import apply_batch_invariant


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Return `x` scaled to unit mean square over its last dim, times `weight`, in float32."""
    x = x.astype(jnp.float32)
    mean = apply_batch_invariant(lambda x: jnp.mean(jnp.square(x), axis=-1, keepdims=True), x)
    scale = jax.lax.rsqrt(mean + epsilon)
    return x * scale * weight.astype(jnp.float32)
