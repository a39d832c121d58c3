"""The gated delta rule of linear attention: Yang et al. 2024, arXiv:2412.06464.

A head keeps a state S [D, E], which decays, forgets what it returned for a key, and learns that key's value:

    S_t = exp(g_t) S_{t-1},   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,   o_t = S_t^T q_t

Whole rows are computed in chunks, within which all positions are matrix products; only the chunks follow one another.

Legend: B batch, T tokens, S slots, K key heads, G value heads of each key head, D key dim, E value dim, N chunks, C
positions of a chunk (i of the reading one, j of the one that is read).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

CHUNK = 64
"""Positions of a chunk. It divides every end of a chunk of prompts, so prompts are cut where whole rows are."""


@struct.dataclass
class ChunkMasks:
    """Masks of rows that hold several sequences, chunk by chunk."""

    reads_NBij: jax.Array  # whether position j is an earlier one of the sequence of i, or i itself
    continues_NBC: jax.Array  # whether the sequence of a position began in an earlier chunk

    @classmethod
    def of(cls, start_BT: jax.Array) -> "ChunkMasks":
        """Return the masks, given the start in the row of the sequence of each position."""
        start_NBC = _chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        return cls(reads_NBij=same_NBij & (index[:, None] >= index), continues_NBC=start_NBC < first_N11)


def delta_rule(
    q_BTKD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKGE: jax.Array,
    beta_BTKG: jax.Array,
    decay_BTKG: jax.Array,
    state_BKGDE: jax.Array,
    masks: ChunkMasks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, K, G, E] and the state after the last position; all are float32.

    `decay` is g <= 0. `state` is that before the first position. `masks` begin each sequence of a row with an empty
    state; None continues from `state`. A position with beta = 0 and decay = 0 leaves the state as it is.
    """
    length = q_BTKD.shape[1]
    inputs = jax.tree.map(_chunks, (q_BTKD, k_BTKD, v_BTKGE, beta_BTKG, decay_BTKG))
    # The backward pass computes a chunk again: what it would keep of all chunks is larger than all other activations.
    one = jax.checkpoint(_one_chunk, prevent_cse=False)
    state_BKGDE, o_NBCKGE = jax.lax.scan(one, state_BKGDE, (*inputs, masks))
    o = jnp.moveaxis(o_NBCKGE, 0, 1)
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :length], state_BKGDE


def _chunks(leaf: jax.Array) -> jax.Array:
    """Return [B, T, ...] as [N, B, C, ...], padded with zeros."""
    length = leaf.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    num_chunks = -(-length // size)
    padding = [(0, 0)] * leaf.ndim
    padding[1] = (0, num_chunks * size - length)
    leaf = jnp.pad(leaf, padding)
    return jnp.moveaxis(leaf.reshape(leaf.shape[0], num_chunks, size, *leaf.shape[2:]), 1, 0)


def _one_chunk(
    state_BKGDE: jax.Array,
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, ChunkMasks | None],
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, C, K, G, E]."""
    q_BCKD, k_BCKD, v_BCKGE, beta_BCKG, decay_BCKG, masks = inputs
    if masks is None:
        index = jnp.arange(q_BCKD.shape[1])
        reads_Bij, continues_BC = (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    else:
        reads_Bij, continues_BC = masks.reads_NBij, masks.continues_NBC  # of this chunk, without N

    total_BKGC = jnp.moveaxis(jnp.cumsum(decay_BCKG, axis=1), 1, -1)
    beta_BKGC = jnp.moveaxis(beta_BCKG, 1, -1)
    # Masked before exp, so that no gradient is infinite.
    between = total_BKGC[..., :, None] - total_BKGC[..., None, :]
    between_BKGij = jnp.exp(jnp.where(reads_Bij[:, None, None], between, -jnp.inf))
    before_BKGC = jnp.exp(jnp.where(continues_BC[:, None, None], total_BKGC, -jnp.inf))

    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    kk_BKij = multiply("bikd,bjkd->bkij", k_BCKD, k_BCKD)
    qk_BKij = multiply("bikd,bjkd->bkij", q_BCKD, k_BCKD)
    # What a position learns is less what earlier positions of the chunk have taught of its key: a triangular system.
    forgets_BKGij = jnp.tril(beta_BKGC[..., None] * kk_BKij[:, :, None] * between_BKGij, -1)
    v_BKGCE = jnp.moveaxis(v_BCKGE, 1, 3) * beta_BKGC[..., None]
    k_BKGCD = jnp.moveaxis(k_BCKD, 1, 2)[:, :, None] * (beta_BKGC * before_BKGC)[..., None]
    known = jnp.concatenate([v_BKGCE, k_BKGCD], axis=-1)
    solved = multiply("bkgij,bkgje->bkgie", _inverse(forgets_BKGij), known)
    new_BKGCE, read_BKGCD = jnp.split(solved, [v_BKGCE.shape[-1]], axis=-1)

    learned_BKGCE = new_BKGCE - multiply("bkgid,bkgde->bkgie", read_BKGCD, state_BKGDE)
    q_BKGCD = jnp.moveaxis(q_BCKD, 1, 2)[:, :, None] * before_BKGC[..., None]
    o_BKGCE = multiply("bkgid,bkgde->bkgie", q_BKGCD, state_BKGDE)
    o_BKGCE = o_BKGCE + multiply("bkgij,bkgje->bkgie", qk_BKij[:, :, None] * between_BKGij, learned_BKGCE)
    last_BKGCD = jnp.moveaxis(k_BCKD, 1, 2)[:, :, None] * between_BKGij[..., -1, :, None]
    state_BKGDE = state_BKGDE * before_BKGC[..., -1, None, None]
    state_BKGDE = state_BKGDE + multiply("bkgjd,bkgje->bkgde", last_BKGCD, learned_BKGCE)
    return state_BKGDE, jnp.moveaxis(o_BKGCE, 3, 1)


@jax.custom_vjp
def _inverse(below_ij: jax.Array) -> jax.Array:
    """Return the inverse of I + `below` [..., C, C], which is strictly lower triangular; C is a power of two.

    Blocks of the inverse are merged from the diagonal on: [[F, 0], [X, G]] has the inverse [[F', 0], [-G' X F', G']].
    Unlike the series of powers, no intermediate result exceeds what the inverse has, as equal keys would make it do.
    """
    *leading, length, _ = below_ij.shape
    inverse = jnp.ones((*leading, length, 1, 1), below_ij.dtype)
    size = 1
    while size < length:
        pairs = length // (2 * size)
        blocks = below_ij.reshape(*leading, pairs, 2, size, pairs, 2, size)[..., :, 1, :, :, 0, :]
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ corner @ first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _inverse_forward(below_ij: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(below_ij)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-(transposed @ d_inverse @ transposed), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def delta_step(
    q_SKD: jax.Array,
    k_SKD: jax.Array,
    v_SKGE: jax.Array,
    beta_SKG: jax.Array,
    decay_SKG: jax.Array,
    state_SKGDE: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the output of one token of each slot [S, K, G, E], and the state after it; all are float32."""
    state_SKGDE = state_SKGDE * jnp.exp(decay_SKG)[..., None, None]
    read_SKGE = jnp.sum(state_SKGDE * k_SKD[:, :, None, :, None], axis=-2)
    learned_SKGE = beta_SKG[..., None] * (v_SKGE - read_SKGE)
    state_SKGDE = state_SKGDE + k_SKD[:, :, None, :, None] * learned_SKGE[..., None, :]
    return jnp.sum(state_SKGDE * q_SKD[:, :, None, :, None], axis=-2), state_SKGDE
