"""The state-space duality of Mamba-2: Dao and Gu 2024, arXiv:2405.21060.

A head keeps a state S [N, P], which decays, and to which each position adds its input:

    S_t = exp(a_t) S_{t-1} + b_t x_t^T,   y_t = S_t^T c_t

Whole rows are computed in chunks, within which all positions are matrix products; only the chunks follow one another.

Legend: B batch, T tokens, S slots, G groups of heads, H heads of a group, N dims of what is written and read (`b` and
`c`), P dims of a head, C positions of a chunk (i of the reading one, j of the one that is read).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from skyrl_tx.layers.recurrence import ChunkMasks, get_chunk_masks, split_chunks
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

    `decay` is a <= 0. `state` is that before the first position. `masks` begin each sequence of a row with an empty
    state; None continues from `state`. A position with x = 0 and decay = 0 leaves the state as it is.
    """
    length = x_BTGHP.shape[1]
    c, b = (jnp.moveaxis(split_chunks(each), 2, 3) for each in (c_BTGN, b_BTGN))
    x, decay = (jnp.moveaxis(split_chunks(each), 2, 4) for each in (x_BTGHP, decay_BTGH))
    # The backward pass computes a chunk again: what it would keep of all chunks is larger than all other activations.
    one = jax.checkpoint(_run_chunk, prevent_cse=False)
    # The first dim is of chunks.
    state_BGHNP, y = jax.lax.scan(one, state_BGHNP, (c, b, x, jnp.cumsum(decay, axis=-1), masks))
    y = jnp.moveaxis(y, (0, 4), (1, 2))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state_BGHNP


def _run_chunk(
    state_BGHNP: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, ChunkMasks | None]
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, G, H, C, P]."""
    c_BGCN, b_BGCN, x_BGHCP, total_BGHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, c_BGCN.shape[2])

    # Masked before exp, so that no gradient is infinite.
    between = total_BGHC[..., :, None] - total_BGHC[..., None, :]
    between_BGHij = jnp.exp(jnp.where(reads_Bij[:, None, None], between, -jnp.inf))
    before_BGHC1 = jnp.exp(jnp.where(continues_BC[:, None, None], total_BGHC, -jnp.inf))[..., None]

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
    """Return the output of one token of each slot [S, G, H, P], and the state after it; all are float32."""
    inputs = c_SGN, b_SGN, x_SGHP, decay_SGH, state_SGHNP
    return apply_batch_invariant(_state_space_step, *inputs, width=math.prod(x_SGHP.shape[1:]))


def _state_space_step(
    c_SGN: jax.Array, b_SGN: jax.Array, x_SGHP: jax.Array, decay_SGH: jax.Array, state_SGHNP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    state_SGHNP = state_SGHNP * jnp.exp(decay_SGH)[..., None, None]
    state_SGHNP = state_SGHNP + b_SGN[:, :, None, :, None] * x_SGHP[..., None, :]
    return jnp.sum(state_SGHNP * c_SGN[:, :, None, :, None], axis=-2), state_SGHNP
