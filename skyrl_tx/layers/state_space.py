"""Mamba-2's state space, computed chunk by chunk (Dao and Gu 2024, arXiv:2405.21060).

A head keeps a state S [N, P], which decays, and each position adds its input:

    S_t = exp(a_t) S_{t-1} + b_t x_t^T,   y_t = S_t^T c_t

Legend: B batch, T tokens, S slots, C positions of a chunk (i reads, j is read), G groups of heads, H
heads of a group, N dims of `b` and `c`, P dims of a head.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from skyrl_tx.layers.recurrence import ChunkMasks, DecaySums, get_chunk_masks, split_chunks
from skyrl_tx.layers.stable_bits import apply_batch_invariant


def state_space(
    c_BTGN: jax.Array,
    b_BTGN: jax.Array,
    x_BTGHP: jax.Array,
    decay_BTGH: jax.Array,
    state_BGHNP: jax.Array,
    masks: ChunkMasks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, G, H, P] and the state after the last position; all are float32.

    `decay` is a <= 0, and `state` is the state before the first position. With `masks`, each
    sequence of a row starts with an empty state; None continues from `state`. A position with x = 0
    and decay = 0 leaves the state unchanged.
    """
    length = x_BTGHP.shape[1]
    c, b = (jnp.moveaxis(split_chunks(x_BTGN), 2, 3) for x_BTGN in (c_BTGN, b_BTGN))
    x, decay = (jnp.moveaxis(split_chunks(leaf), 2, 4) for leaf in (x_BTGHP, decay_BTGH))
    # The backward pass recomputes chunks: their intermediate results exceed all other activations.
    run_chunk = jax.checkpoint(_run_state_space_chunk, prevent_cse=False)
    state_BGHNP, y = jax.lax.scan(run_chunk, state_BGHNP, (c, b, x, DecaySums.from_decays(decay), masks))
    y = jnp.moveaxis(y, (0, 4), (1, 2))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state_BGHNP


def _run_state_space_chunk(
    state_BGHNP: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array, DecaySums, ChunkMasks | None]
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, G, H, C, P]."""
    c_BGCN, b_BGCN, x_BGHCP, sums_BGHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, c_BGCN.shape[2])

    # Mask before exp, so that no gradient is infinite.
    between_BGHij = jnp.exp(jnp.where(reads_Bij[:, None, None], sums_BGHC.subtract(sums_BGHC), -jnp.inf))
    before_BGHC1 = jnp.exp(jnp.where(continues_BC[:, None, None], sums_BGHC.total, -jnp.inf))[..., None]

    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    cb_BGij = multiply("bgin,bgjn->bgij", c_BGCN, b_BGCN)
    y_BGHCP = before_BGHC1 * multiply("bgin,bghnp->bghip", c_BGCN, state_BGHNP)
    y_BGHCP = y_BGHCP + multiply("bghij,bghjp->bghip", cb_BGij[:, :, None] * between_BGHij, x_BGHCP)
    last_BGHCP = x_BGHCP * between_BGHij[..., -1, :, None]
    state_BGHNP = state_BGHNP * before_BGHC1[..., -1:, :]
    return state_BGHNP + multiply("bgjn,bghjp->bghnp", b_BGCN, last_BGHCP), y_BGHCP


def state_space_step(
    c_SGN: jax.Array, b_SGN: jax.Array, x_SGHP: jax.Array, decay_SGH: jax.Array, state_SGHNP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output [S, G, H, P] of one token of each slot, and the state after it, float32."""
    inputs = c_SGN, b_SGN, x_SGHP, decay_SGH, state_SGHNP
    return apply_batch_invariant(_state_space_step, *inputs, width=math.prod(x_SGHP.shape[1:]))


def _state_space_step(
    c_SGN: jax.Array, b_SGN: jax.Array, x_SGHP: jax.Array, decay_SGH: jax.Array, state_SGHNP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    state_SGHNP = state_SGHNP * jnp.exp(decay_SGH)[..., None, None]
    state_SGHNP = state_SGHNP + b_SGN[:, :, None, :, None] * x_SGHP[..., None, :]
    return jnp.sum(state_SGHNP * c_SGN[:, :, None, :, None], axis=-2), state_SGHNP
