"""The gated delta rule of linear attention: Yang et al. 2024, arXiv:2412.06464.

A head keeps a state S [D, E], which decays, forgets what it returned for a key, and learns that key's value:

    S_t = exp(g_t) S_{t-1},   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,   o_t = S_t^T q_t

Whole rows are computed in chunks, within which all positions are matrix products; only the chunks follow one another.
What does not depend on the state is computed for many chunks together, or chunk by chunk with the rest.

Legend: B batch, T tokens, S slots, K key heads, G value heads of each key head, H value heads, D key dim, E value dim,
N chunks, C positions of a chunk (i of the reading one, j of the one that is read).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from skyrl_tx.layers.recurrence import ChunkMasks, get_chunk_masks, split_chunks
from skyrl_tx.layers.stable_bits import apply_batch_invariant


def delta_rule(
    q_BTKD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKGE: jax.Array,
    beta_BTKG: jax.Array,
    decay_BTKG: jax.Array,
    state_BKGDE: jax.Array,
    masks: ChunkMasks | None = None,
    *,
    together: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, K, G, E] and the state after the last position; all are float32.

    `decay` is g <= 0. `state` is that before the first position. `masks` begin each sequence of a row with an empty
    state; None continues from `state`. A position with beta = 0 and decay = 0 leaves the state as it is. `together` has
    the same numbers up to rounding, takes more memory, and leaves two products for each chunk that follow one another.
    """
    length, (*_, G, E) = q_BTKD.shape[1], v_BTKGE.shape
    q, k = (jnp.repeat(each, G, axis=2) for each in (q_BTKD, k_BTKD))
    heads = (each.reshape(*each.shape[:2], -1, *each.shape[4:]) for each in (v_BTKGE, beta_BTKG, decay_BTKG))
    q, k, v, beta, decay = (jnp.moveaxis(split_chunks(each), 2, 3) for each in (q, k, *heads))
    state_BHDE = state_BKGDE.reshape(state_BKGDE.shape[0], -1, *state_BKGDE.shape[3:])
    chunks = q, k, v, beta, jnp.cumsum(decay, axis=-1), masks
    # The backward pass computes chunks again: what it would keep of them is larger than all other activations.
    if together:
        state_BHDE, o = jax.lax.scan(
            jax.checkpoint(_run_chunk_group, prevent_cse=False), state_BHDE, _group_chunks(chunks)
        )
        o_NBHCE = o.reshape(-1, *o.shape[2:])
    else:
        state_BHDE, o_NBHCE = jax.lax.scan(jax.checkpoint(_run_chunk, prevent_cse=False), state_BHDE, chunks)
    o = jnp.moveaxis(o_NBHCE, (0, 3), (1, 2))
    o = o.reshape(o.shape[0], -1, o.shape[3] // G, G, E)[:, :length]
    return o, state_BHDE.reshape(state_BKGDE.shape)


CHUNKS_PER_GROUP = 32
"""Chunks that are computed together, at most: bounds the memory of what they have at the same time."""

_Chunks = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, ChunkMasks | None]
"""Queries, keys, values, betas, sums of decays from the begin of the chunk on, and masks, of all chunks or of one."""


def _group_chunks(chunks: _Chunks) -> _Chunks:
    """Return chunks in groups of up to TOGETHER, with a leading dim; the last may have some that change no state."""
    num_chunks = chunks[0].shape[0]
    number = -(-num_chunks // CHUNKS_PER_GROUP)
    size = -(-num_chunks // number)

    def group_leaf(leaf: jax.Array) -> jax.Array:
        padding = [(0, number * size - num_chunks)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding, constant_values=leaf.dtype == bool).reshape(number, size, *leaf.shape[1:])

    return jax.tree.map(group_leaf, chunks)


def _run_chunk_group(state_BHDE: jax.Array, chunks: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after some chunks, and their outputs [N, B, H, C, E].

    What a chunk teaches is linear in the state before it: `fresh` less `erased` times the state. Both are solutions of
    the same triangular system, so only two products are left to do in the order of chunks.
    """
    q, k, v, beta, total, masks = chunks
    reads_NBij, continues_NBC = get_chunk_masks(masks, q.shape[3])
    if masks is None:
        reads_NBij, continues_NBC = reads_NBij[None], continues_NBC[None]
    # Masked before exp, so that no gradient is infinite.
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(reads_NBij[:, :, None], between, -jnp.inf))
    before = jnp.exp(jnp.where(continues_NBC[:, :, None], total, -jnp.inf))[..., None]
    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    kk = multiply("nbhid,nbhjd->nbhij", k, k)
    forgets = jnp.tril(beta[..., None] * kk * between, -1)
    solved = _solve(forgets, beta[..., None] * jnp.concatenate([v, before * k], axis=-1))
    fresh, erased = jnp.split(solved, [v.shape[-1]], axis=-1)

    def advance_state(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        fresh, erased, last_k, kept = chunk
        learned = fresh - multiply("bhid,bhde->bhie", erased, state)
        return state * kept + multiply("bhjd,bhje->bhde", last_k, learned), (learned, state)

    last_k = k * between[..., -1, :, None]
    state_BHDE, (learned, states) = jax.lax.scan(
        advance_state, state_BHDE, (fresh, erased, last_k, before[..., -1:, :])
    )
    reads = multiply("nbhid,nbhjd->nbhij", q, k) * between
    o_NBHCE = multiply("nbhid,nbhde->nbhie", before * q, states) + multiply("nbhij,nbhje->nbhie", reads, learned)
    return state_BHDE, o_NBHCE


def _run_chunk(state_BHDE: jax.Array, inputs: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, H, C, E]."""
    q_BHCD, k_BHCD, v_BHCE, beta_BHC, total_BHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, q_BHCD.shape[2])

    # Masked before exp, so that no gradient is infinite.
    between = total_BHC[..., :, None] - total_BHC[..., None, :]
    between_BHij = jnp.exp(jnp.where(reads_Bij[:, None], between, -jnp.inf))
    before_BHC1 = jnp.exp(jnp.where(continues_BC[:, None], total_BHC, -jnp.inf))[..., None]

    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # What a position learns is less what earlier positions of the chunk have taught of its key: a triangular system.
    kk_BHij = multiply("bhid,bhjd->bhij", k_BHCD, k_BHCD)
    forgets_BHij = jnp.tril(beta_BHC[..., None] * kk_BHij * between_BHij, -1)
    known_BHCE = v_BHCE - before_BHC1 * multiply("bhid,bhde->bhie", k_BHCD, state_BHDE)
    learned_BHCE = _solve(forgets_BHij, beta_BHC[..., None] * known_BHCE)

    o_BHCE = before_BHC1 * multiply("bhid,bhde->bhie", q_BHCD, state_BHDE)
    qk_BHij = multiply("bhid,bhjd->bhij", q_BHCD, k_BHCD)
    o_BHCE = o_BHCE + multiply("bhij,bhje->bhie", qk_BHij * between_BHij, learned_BHCE)
    last_BHCD = k_BHCD * between_BHij[..., -1, :, None]
    state_BHDE = state_BHDE * before_BHC1[..., -1:, :]
    return state_BHDE + multiply("bhjd,bhje->bhde", last_BHCD, learned_BHCE), o_BHCE


@jax.custom_vjp
def _solve(below_ij: jax.Array, known_jE: jax.Array) -> jax.Array:
    """Return X of (I + `below`) X = `known`; `below` is as in `_invert`."""
    return _invert(below_ij) @ known_jE


def _solve_forward(below_ij: jax.Array, known_jE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _invert(below_ij)
    solved = inverse @ known_jE
    return solved, (inverse, solved)


def _solve_backward(kept: tuple[jax.Array, jax.Array], d_solved: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solved = kept
    d_known = jnp.swapaxes(inverse, -1, -2) @ d_solved
    return -jnp.tril(d_known @ jnp.swapaxes(solved, -1, -2), -1), d_known


_solve.defvjp(_solve_forward, _solve_backward)


def _invert(below_ij: jax.Array) -> jax.Array:
    """Return the inverse of I + `below` [..., C, C], which is strictly lower triangular; C is a power of two.

    Blocks of the inverse are merged from the diagonal on: [[F, 0], [X, G]] has the inverse [[F', 0], [-G' X F', G']].
    Unlike the series of powers, no intermediate result exceeds what the inverse has, as equal keys would make it do.
    All blocks of a size are merged by two products of whole matrices, in a loop: zeros are multiplied too, but the
    program has one step instead of one for each size.
    """
    index = jnp.arange(below_ij.shape[-1])

    def select_corners(level: jax.Array | int) -> jax.Array:
        block = index >> level
        return jnp.where((block[:, None] != block) & (block[:, None] >> 1 == block >> 1), below_ij, 0.0)

    def merge_blocks(level: jax.Array, inverse: jax.Array) -> jax.Array:
        return inverse - inverse @ select_corners(level) @ inverse

    first = jnp.eye(index.size, dtype=below_ij.dtype) - select_corners(0)
    return jax.lax.fori_loop(1, index.size.bit_length() - 1, merge_blocks, first)


def delta_step(
    q_SKD: jax.Array,
    k_SKD: jax.Array,
    v_SKGE: jax.Array,
    beta_SKG: jax.Array,
    decay_SKG: jax.Array,
    state_SKGDE: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the output of one token of each slot [S, K, G, E], and the state after it; all are float32."""
    inputs = q_SKD, k_SKD, v_SKGE, beta_SKG, decay_SKG, state_SKGDE
    return apply_batch_invariant(_delta_step, *inputs, width=math.prod(v_SKGE.shape[1:]))


def _delta_step(
    q_SKD: jax.Array,
    k_SKD: jax.Array,
    v_SKGE: jax.Array,
    beta_SKG: jax.Array,
    decay_SKG: jax.Array,
    state_SKGDE: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    state_SKGDE = state_SKGDE * jnp.exp(decay_SKG)[..., None, None]
    read_SKGE = jnp.sum(state_SKGDE * k_SKD[:, :, None, :, None], axis=-2)
    learned_SKGE = beta_SKG[..., None] * (v_SKGE - read_SKGE)
    state_SKGDE = state_SKGDE + k_SKD[:, :, None, :, None] * learned_SKGE[..., None, :]
    return jnp.sum(state_SKGDE * q_SKD[:, :, None, :, None], axis=-2), state_SKGDE
