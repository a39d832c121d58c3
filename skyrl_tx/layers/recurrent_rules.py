"""The rules of recurrent layers, computed chunk by chunk: the gated delta rule and Mamba-2's state space.

With the gated delta rule (linear attention, Yang et al. 2024, arXiv:2412.06464), a head keeps a
state S [D, E], which decays, forgets what it returned for a key, and learns the key's value:

    S_t = exp(g_t) S_{t-1},   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,   o_t = S_t^T q_t

In the state space (Dao and Gu 2024, arXiv:2405.21060), a head keeps a state S [N, P], which decays,
and each position adds its input:

    S_t = exp(a_t) S_{t-1} + b_t x_t^T,   y_t = S_t^T c_t

Legend: B batch, T tokens, S slots (one decoding sequence each), N chunks, C positions of a chunk (i
reads, j is read). Delta rule: K key heads, G value heads of each key head, H value heads, D key
dim, E value dim. State space: G groups of heads, H heads of a group, N dims of `b` and `c`, P dims
of a head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.recurrence import ChunkMasks, DecaySums, get_chunk_masks, split_chunks
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

    `decay` is g <= 0, and `state` is the state before the first position. Without `masks`, a row is
    one sequence that continues from `state`. With `masks`, each sequence of a row starts with an
    empty state, or with the state after its shared prefix. A position with beta = 0 and decay = 0
    leaves the state unchanged.

    With `together`, the parts that do not depend on the state are computed for many chunks at once,
    so that only two products per chunk are sequential. This takes more memory; the numbers are the
    same up to rounding.
    """
    length, (*_, G, E) = q_BTKD.shape[1], v_BTKGE.shape

    # Give every value head its own queries and keys, and split all inputs into chunks.
    q, k = (jnp.repeat(x_BTKD, G, axis=2) for x_BTKD in (q_BTKD, k_BTKD))
    heads = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in (v_BTKGE, beta_BTKG, decay_BTKG))
    q, k, v, beta, decay = (jnp.moveaxis(split_chunks(x), 2, 3) for x in (q, k, *heads))
    state_BHDE = state_BKGDE.reshape(state_BKGDE.shape[0], -1, *state_BKGDE.shape[3:])
    chunks = q, k, v, beta, DecaySums.from_decays(decay), masks

    # The backward pass recomputes chunks: their intermediate results exceed all other activations.
    if masks is not None and masks.prefix is not None:
        assert not together, "chunks are computed one after another where prefixes are shared"
        states = state_BHDE, jnp.zeros_like(state_BHDE)
        skipped = masks.prefix.sum_skipped(decay)
        (state_BHDE, _), o = _scan_groups(_run_prefix_chunks, states, (chunks, skipped), PREFIX_CHUNKS_PER_GROUP)
        o_NBHCE = o.reshape(-1, *o.shape[2:])
    elif together:
        state_BHDE, o = _scan_groups(_run_chunk_group, state_BHDE, chunks, CHUNKS_PER_GROUP)
        o_NBHCE = o.reshape(-1, *o.shape[2:])
    else:
        state_BHDE, o_NBHCE = jax.lax.scan(jax.checkpoint(_run_delta_chunk, prevent_cse=False), state_BHDE, chunks)

    o = jnp.moveaxis(o_NBHCE, (0, 3), (1, 2))
    o = o.reshape(o.shape[0], -1, o.shape[3] // G, G, E)[:, :length]
    return o, state_BHDE.reshape(state_BKGDE.shape)


CHUNKS_PER_GROUP = 32
"""The maximum number of chunks computed together. Bounds the memory of their intermediate results."""
PREFIX_CHUNKS_PER_GROUP = 4
"""The same for rows with shared prefixes. The backward pass keeps two states per group, instead of one per chunk."""

_Chunks = tuple[jax.Array, jax.Array, jax.Array, jax.Array, DecaySums, ChunkMasks | None]
"""Queries, keys, values, betas, sums of decays, and masks of chunks."""


def _scan_groups(run: Callable[..., Any], state: Any, chunks: Any, maximum: int) -> tuple[Any, jax.Array]:
    """Run groups of up to `maximum` chunks one after another. The backward pass recomputes each group.

    The last group may be padded with chunks that change no state.
    """
    num_chunks = jax.tree.leaves(chunks)[0].shape[0]
    number = -(-num_chunks // maximum)
    size = -(-num_chunks // number)

    def group_leaf(leaf: jax.Array) -> jax.Array:
        padding = [(0, number * size - num_chunks)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding, constant_values=leaf.dtype == bool).reshape(number, size, *leaf.shape[1:])

    return jax.lax.scan(jax.checkpoint(run, prevent_cse=False), state, jax.tree.map(group_leaf, chunks))


def _run_chunk_group(state_BHDE: jax.Array, chunks: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after some chunks, and their outputs [N, B, H, C, E].

    The values that a chunk adds to the state are linear in the state before it: `fresh - erased @
    state`. `fresh` and `erased` solve the same triangular system and do not depend on the state, so
    only two products per chunk remain sequential.
    """
    q, k, v, beta, sums, masks = chunks
    reads_NBij, continues_NBC = get_chunk_masks(masks, q.shape[3])
    if masks is None:
        reads_NBij, continues_NBC = reads_NBij[None], continues_NBC[None]

    # Mask before exp, so that no gradient is infinite.
    between = jnp.exp(jnp.where(reads_NBij[:, :, None], sums.subtract(sums), -jnp.inf))
    before = jnp.exp(jnp.where(continues_NBC[:, :, None], sums.total, -jnp.inf))[..., None]
    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)

    # Solve the triangular systems.
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

    # Outputs: from the state before the chunk, and from earlier positions of the chunk.
    reads = multiply("nbhid,nbhjd->nbhij", q, k) * between
    o_NBHCE = multiply("nbhid,nbhde->nbhie", before * q, states) + multiply("nbhij,nbhje->nbhie", reads, learned)
    return state_BHDE, o_NBHCE


def _run_delta_chunk(state_BHDE: jax.Array, inputs: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, H, C, E]."""
    q_BHCD, k_BHCD, v_BHCE, beta_BHC, sums_BHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, q_BHCD.shape[2])

    # Mask before exp, so that no gradient is infinite.
    between_BHij = jnp.exp(jnp.where(reads_Bij[:, None], sums_BHC.subtract(sums_BHC), -jnp.inf))
    before_BHC1 = jnp.exp(jnp.where(continues_BC[:, None], sums_BHC.total, -jnp.inf))[..., None]

    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # What position i adds depends on what earlier positions j of the chunk have added. So the added values
    # solve the triangular system (I + forgets) learned = beta (v - S^T k).
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


_States = tuple[jax.Array, jax.Array]
"""The current state, and the state after the newest shared prefix, [B, H, D, E]."""


def _run_prefix_chunks(states: _States, chunks: tuple[_Chunks, DecaySums]) -> tuple[_States, jax.Array]:
    """Return the states after some chunks of a row with shared prefixes, and their outputs [N, B, H, C, E]."""
    return jax.lax.scan(_run_prefix_chunk, states, chunks)


def _run_prefix_chunk(states: _States, inputs: tuple[_Chunks, DecaySums]) -> tuple[_States, jax.Array]:
    """Return the states after a chunk of a row with shared prefixes, and its outputs [B, H, C, E].

    The inputs have the sums of the decays that each position skips.
    """
    (state_BHDE, saved_BHDE), ((q, k, v, beta, sums, masks), skipped) = states, inputs
    assert masks is not None and masks.prefix is not None
    prefix, (reads_Bij, continues_BC) = masks.prefix, get_chunk_masks(masks, q.shape[2])
    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)

    # Decays since earlier positions of the chunk, and since both states
    read_BHij = jax.tree.map(jnp.subtract, sums, skipped)
    between = jnp.where(prefix.reads_NBij[:, None], read_BHij.subtract(sums), sums.subtract(sums))
    between_BHij = jnp.exp(jnp.where((reads_Bij | prefix.reads_NBij)[:, None], between, -jnp.inf))
    since_BHC = read_BHij.total
    before_BHC1, resumed_BHC1 = (
        jnp.exp(jnp.where(mask_BC[:, None], since_BHC, -jnp.inf))[..., None]
        for mask_BC in (continues_BC, prefix.resumes_NBC)
    )

    def read_states(x_BHCD: jax.Array) -> jax.Array:
        current, saved = (multiply("bhid,bhde->bhie", x_BHCD, state) for state in (state_BHDE, saved_BHDE))
        return before_BHC1 * current + resumed_BHC1 * saved

    # What the positions learn, and the outputs
    forgets_BHij = jnp.tril(beta[..., None] * multiply("bhid,bhjd->bhij", k, k) * between_BHij, -1)
    learned_BHCE = _solve(forgets_BHij, beta[..., None] * (v - read_states(k)))
    qk_BHij = multiply("bhid,bhjd->bhij", q, k)
    o_BHCE = read_states(q) + multiply("bhij,bhje->bhie", qk_BHij * between_BHij, learned_BHCE)

    def compute_state(between_BHj: jax.Array, before_BH11: jax.Array, resumed_BH11: jax.Array) -> jax.Array:
        added_BHDE = multiply("bhjd,bhje->bhde", k * between_BHj[..., None], learned_BHCE)
        return state_BHDE * before_BH11 + saved_BHDE * resumed_BH11 + added_BHDE

    # The states after the last position, and after the newest prefix
    last_BHDE = compute_state(between_BHij[..., -1, :], before_BHC1[..., -1:, :], resumed_BHC1[..., -1:, :])
    is_end_BC = (prefix.last_NB[:, None] == jnp.arange(q.shape[2])).astype(jnp.float32)
    ended_BHDE = compute_state(
        multiply("bi,bhij->bhj", is_end_BC, between_BHij),
        *(multiply("bi,bhik->bhk", is_end_BC, x)[..., None] for x in (before_BHC1, resumed_BHC1)),
    )
    saved_BHDE = jnp.where((prefix.last_NB >= 0)[:, None, None, None], ended_BHDE, saved_BHDE)
    return (last_BHDE, saved_BHDE), o_BHCE


@jax.custom_vjp
def _solve(below_ij: jax.Array, known_jE: jax.Array) -> jax.Array:
    """Return the solution X of (I + `below`) X = `known`. For `below` see `_invert`."""
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
    """Return the inverse of I + `below` [..., C, C].

    `below` is strictly lower triangular, and C is a power of two.

    Blocks of the inverse are merged, starting at the diagonal: with F' and G' the inverses of F and
    G, [[F, 0], [X, G]] has the inverse [[F', 0], [-G' X F', G']]. No intermediate result exceeds
    the inverse itself. The series I - L + L^2 - ... of L = `below` would lose precision instead:
    its powers are large if keys are nearly equal. All blocks of one size are merged by two products
    of whole matrices, in a loop. This multiplies zeros too, but the program has one loop body
    instead of one per size.
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
    """Return the output [S, K, G, E] of one token of each slot, and the state after it, float32."""

    def run_step(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_SKD, k_SKD, v_SKGE, beta_SKG, decay_SKG, state_SKGDE = inputs
        state_SKGDE = state_SKGDE * jnp.exp(decay_SKG)[..., None, None]
        read_SKGE = jnp.sum(state_SKGDE * k_SKD[:, :, None, :, None], axis=-2)
        learned_SKGE = beta_SKG[..., None] * (v_SKGE - read_SKGE)
        state_SKGDE = state_SKGDE + k_SKD[:, :, None, :, None] * learned_SKGE[..., None, :]
        return jnp.sum(state_SKGDE * q_SKD[:, :, None, :, None], axis=-2), state_SKGDE

    inputs = q_SKD, k_SKD, v_SKGE, beta_SKG, decay_SKG, state_SKGDE
    return apply_batch_invariant(run_step, *inputs, width=math.prod(v_SKGE.shape[1:]))


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

    def run_step(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        c_SGN, b_SGN, x_SGHP, decay_SGH, state_SGHNP = inputs
        state_SGHNP = state_SGHNP * jnp.exp(decay_SGH)[..., None, None]
        state_SGHNP = state_SGHNP + b_SGN[:, :, None, :, None] * x_SGHP[..., None, :]
        return jnp.sum(state_SGHNP * c_SGN[:, :, None, :, None], axis=-2), state_SGHNP

    inputs = c_SGN, b_SGN, x_SGHP, decay_SGH, state_SGHNP
    return apply_batch_invariant(run_step, *inputs, width=math.prod(x_SGHP.shape[1:]))
