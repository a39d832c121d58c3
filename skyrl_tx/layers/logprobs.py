"""Log-probabilities of given tokens, without ever holding the logits of all positions.

Legend: B batch, T tokens, D embed, V vocab, K targets per position, P positions (B * T), C positions of a chunk.
"""

import jax
import jax.numpy as jnp

from skyrl_tx.layers.lora import RowAdapter

CHUNK = 256  # positions whose logits exist at once; measured as fast as any larger, see the memory of [C, V] float32


def logits(hidden: jax.Array, unembed_VD: jax.Array, adapter: RowAdapter | None) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D]."""
    x = hidden.astype(unembed_VD.dtype)
    y = jnp.einsum("...d,vd->...v", x, unembed_VD, preferred_element_type=jnp.float32)
    return y if adapter is None else y + adapter.delta(hidden, unembed_VD.dtype)


def target_logprobs(
    hidden_BTD: jax.Array,
    unembed_VD: jax.Array,
    targets: jax.Array,
    adapter: RowAdapter | None,
    *,
    chunk: int = CHUNK,
) -> jax.Array:
    """Return log p(target) at each position, float32 in the shape of `targets` ([B, T] or [B, T, K]).

    Cut into chunks along T (all rows together), each chunk's logits recomputed in the backward pass. Differentiable
    with respect to the hidden states and the adapter.
    """
    B, T, _ = hidden_BTD.shape
    targets_BTK = targets.reshape(B, T, -1)
    step = max(1, min(T, chunk // B))
    padded = -T % step

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padded), (0, 0)))
        return jnp.swapaxes(x.reshape(B, (T + padded) // step, step, x.shape[-1]), 0, 1)

    @jax.checkpoint
    def one_chunk(x: jax.Array, unembed: jax.Array, adapter: RowAdapter | None, targets: jax.Array) -> jax.Array:
        y = logits(x, unembed, adapter)
        return jnp.take_along_axis(y, targets, axis=-1) - jax.nn.logsumexp(y, axis=-1, keepdims=True)

    chunks = jax.lax.map(
        lambda pair: one_chunk(pair[0], unembed_VD, adapter, pair[1]), (split(hidden_BTD), split(targets_BTK))
    )
    logprobs_BTK = jnp.swapaxes(chunks, 0, 1).reshape(B, T + padded, -1)[:, :T]
    return logprobs_BTK.reshape(targets.shape)
