"""Recurrences over tokens, computed chunk by chunk: the gated delta rule and Mamba-2's state space.

**Gated delta rule** (linear attention, Yang et al. 2024, arXiv:2412.06464). A head keeps a state S
[D, E], which decays, forgets what it returned for a key, and learns the key's value:

    S_t = exp(g_t) S_{t-1},   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,   o_t = S_t^T q_t

**State-space duality** (Mamba-2, Dao and Gu 2024, arXiv:2405.21060). A head keeps a state S [N, P],
which decays, and each position adds its input:

    S_t = exp(a_t) S_{t-1} + b_t x_t^T,   y_t = S_t^T c_t

Whole rows are cut into chunks. Within a chunk, all positions are computed by matrix products; only
the chunks are sequential. The module also has the masks of packed rows and the short convolutions
that both models use.

Legend: B batch, T tokens, S slots, N chunks, C positions of a chunk (i reads, j is read).
- Delta rule: K key heads, G value heads of each key head, H value heads, D key dim, E value dim.
- State space: G groups of heads, H heads of a group, N dims of `b` and `c`, P dims of a head.
- Convolutions: W weights, I channels.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.stable_bits import apply_batch_invariant

CHUNK_POSITIONS = 64
"""Positions of a chunk.

Prefill chunks end at multiples of it, so prompts are cut where whole rows are.
"""


def split_chunks(leaf: jax.Array) -> jax.Array:
    """Return [B, T, ...] as [N, B, C, ...], padded with zeros."""
    length = leaf.shape[1]
    size = min(CHUNK_POSITIONS, 1 << (length - 1).bit_length())
    num_chunks = -(-length // size)
    padding = [(0, 0)] * leaf.ndim
    padding[1] = (0, num_chunks * size - length)
    leaf = jnp.pad(leaf, padding)
    return jnp.moveaxis(leaf.reshape(leaf.shape[0], num_chunks, size, *leaf.shape[2:]), 1, 0)


@struct.dataclass
class ChunkMasks:
    """Masks of rows that hold multiple sequences, chunk by chunk."""

    reads_NBij: jax.Array  # whether j <= i, and both are in the same sequence
    continues_NBC: jax.Array  # whether the sequence of a position started in an earlier chunk

    @classmethod
    def from_starts(cls, start_BT: jax.Array) -> "ChunkMasks":
        """Return the masks.

        `start_BT` is the index in the row where the sequence of a position starts.
        """
        start_NBC = split_chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        return cls(reads_NBij=same_NBij & (index[:, None] >= index), continues_NBC=start_NBC < first_N11)


def get_chunk_masks(masks: ChunkMasks | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Return both masks of one chunk, [B, i, j] and [B, C]. Without masks, a row is one sequence."""
    if masks is None:
        index = jnp.arange(size)
        return (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    return masks.reads_NBij, masks.continues_NBC  # scanned over N, so these are of one chunk


def make_conv_masks(start_BT: jax.Array, width: int) -> jax.Array:
    """Return for each distance w < `width` whether position t - w is in the sequence of t.

    `start_BT` is the index in the row where the sequence of a position starts. Returns 1 or 0,
    float32 [W, B, T, 1].
    """
    position_BT = jnp.arange(start_BT.shape[1]) - start_BT
    return (position_BT >= jnp.arange(width)[:, None, None]).astype(jnp.float32)[..., None]


def short_conv(
    x_BTI: jax.Array, weight_WI: jax.Array, tail_BWI: jax.Array, masks_WBT1: jax.Array | None = None
) -> jax.Array:
    """Return for each position the weighted sum of the last W inputs, float32 [B, T, I].

    The last weight belongs to the position itself. `tail` [B, W - 1, I] has the inputs before the
    row. With `masks`, a sequence reads no input of another sequence.
    """
    width, length = weight_WI.shape[0], x_BTI.shape[1]
    weight = weight_WI.astype(jnp.float32)
    padded = jnp.concatenate([tail_BWI.astype(jnp.float32), x_BTI.astype(jnp.float32)], axis=1)
    y_BTI = jnp.zeros((), jnp.float32)
    for tap in range(width):
        term = padded[:, tap : tap + length] * weight[tap]
        y_BTI = y_BTI + (term if masks_WBT1 is None else term * masks_WBT1[width - 1 - tap])
    return y_BTI


def get_last_inputs(x_BTI: jax.Array, tail_BWI: jax.Array, size: jax.Array | int) -> jax.Array:
    """Return the inputs that the position after `size` positions reads, [B, W - 1, I].

    `size` is a scalar or [B].
    """
    padded, width = jnp.concatenate([tail_BWI, x_BTI.astype(tail_BWI.dtype)], axis=1), tail_BWI.shape[1]
    if jnp.ndim(size) == 0:
        return jax.lax.dynamic_slice_in_dim(padded, size, width, axis=1)
    return jax.vmap(lambda x_TI, size: jax.lax.dynamic_slice_in_dim(x_TI, size, width))(padded, size)


def short_conv_step(x_SI: jax.Array, weight_WI: jax.Array, tail_SWI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum for one token of each slot, float32 [S, I], and the inputs for the next token."""
    window_SWI = jnp.concatenate([tail_SWI, x_SI[:, None].astype(tail_SWI.dtype)], axis=1)
    y_SI = jnp.zeros((), jnp.float32)
    for tap in range(weight_WI.shape[0]):
        y_SI = y_SI + window_SWI[:, tap].astype(jnp.float32) * weight_WI[tap].astype(jnp.float32)
    return y_SI, window_SWI[:, 1:]


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

    `decay` is g <= 0, and `state` is the state before the first position. With `masks`, each
    sequence of a row starts with an empty state; None continues from `state`. A position with beta
    = 0 and decay = 0 leaves the state unchanged.

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
    chunks = q, k, v, beta, jnp.cumsum(decay, axis=-1), masks

    # The backward pass recomputes chunks: their intermediate results exceed all other activations.
    if together:
        state_BHDE, o = jax.lax.scan(
            jax.checkpoint(_run_chunk_group, prevent_cse=False), state_BHDE, _group_chunks(chunks)
        )
        o_NBHCE = o.reshape(-1, *o.shape[2:])
    else:
        state_BHDE, o_NBHCE = jax.lax.scan(jax.checkpoint(_run_delta_chunk, prevent_cse=False), state_BHDE, chunks)

    o = jnp.moveaxis(o_NBHCE, (0, 3), (1, 2))
    o = o.reshape(o.shape[0], -1, o.shape[3] // G, G, E)[:, :length]
    return o, state_BHDE.reshape(state_BKGDE.shape)


CHUNKS_PER_GROUP = 32
"""The maximum number of chunks computed together. Bounds the memory of their intermediate results."""

_Chunks = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, ChunkMasks | None]
"""Queries, keys, values, betas, cumulative decays within the chunk, and masks of chunks."""


def _group_chunks(chunks: _Chunks) -> _Chunks:
    """Return chunks in groups of up to CHUNKS_PER_GROUP, with a leading dim.

    The last group may be padded with chunks that change no state.
    """
    num_chunks = chunks[0].shape[0]
    number = -(-num_chunks // CHUNKS_PER_GROUP)
    size = -(-num_chunks // number)

    def group_leaf(leaf: jax.Array) -> jax.Array:
        padding = [(0, number * size - num_chunks)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding, constant_values=leaf.dtype == bool).reshape(number, size, *leaf.shape[1:])

    return jax.tree.map(group_leaf, chunks)


def _run_chunk_group(state_BHDE: jax.Array, chunks: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after some chunks, and their outputs [N, B, H, C, E].

    What a chunk learns is linear in the state before it: `fresh` minus `erased` times the state.
    Both solve the same triangular system, so only two products per chunk remain sequential.
    """
    q, k, v, beta, total, masks = chunks
    reads_NBij, continues_NBC = get_chunk_masks(masks, q.shape[3])
    if masks is None:
        reads_NBij, continues_NBC = reads_NBij[None], continues_NBC[None]

    # Mask before exp, so that no gradient is infinite.
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(reads_NBij[:, :, None], between, -jnp.inf))
    before = jnp.exp(jnp.where(continues_NBC[:, :, None], total, -jnp.inf))[..., None]
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
    q_BHCD, k_BHCD, v_BHCE, beta_BHC, total_BHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, q_BHCD.shape[2])

    # Mask before exp, so that no gradient is infinite.
    between = total_BHC[..., :, None] - total_BHC[..., None, :]
    between_BHij = jnp.exp(jnp.where(reads_Bij[:, None], between, -jnp.inf))
    before_BHC1 = jnp.exp(jnp.where(continues_BC[:, None], total_BHC, -jnp.inf))[..., None]

    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
    # A position learns its value minus what is known of its key, also from earlier positions of the
    # chunk. This is a triangular system.
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
    G, [[F, 0], [X, G]] has the inverse [[F', 0], [-G' X F', G']]. Unlike a series of powers, no
    intermediate result exceeds the inverse itself; equal keys would make the powers large. All
    blocks of one size are merged by two products of whole matrices, in a loop. This multiplies
    zeros too, but the program has one loop body instead of one per size.
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
    state_BGHNP, y = jax.lax.scan(run_chunk, state_BGHNP, (c, b, x, jnp.cumsum(decay, axis=-1), masks))
    y = jnp.moveaxis(y, (0, 4), (1, 2))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state_BGHNP


def _run_state_space_chunk(
    state_BGHNP: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, ChunkMasks | None]
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the chunk's outputs [B, G, H, C, P]."""
    c_BGCN, b_BGCN, x_BGHCP, total_BGHC, masks = inputs
    reads_Bij, continues_BC = get_chunk_masks(masks, c_BGCN.shape[2])

    # Mask before exp, so that no gradient is infinite.
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
    """Return the output [S, G, H, P] of one token of each slot, and the state after it, float32."""
    inputs = c_SGN, b_SGN, x_SGHP, decay_SGH, state_SGHNP
    return apply_batch_invariant(_state_space_step, *inputs, width=math.prod(x_SGHP.shape[1:]))


def _state_space_step(
    c_SGN: jax.Array, b_SGN: jax.Array, x_SGHP: jax.Array, decay_SGH: jax.Array, state_SGHNP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    state_SGHNP = state_SGHNP * jnp.exp(decay_SGH)[..., None, None]
    state_SGHNP = state_SGHNP + b_SGN[:, :, None, :, None] * x_SGHP[..., None, :]
    return jnp.sum(state_SGHNP * c_SGN[:, :, None, :, None], axis=-2), state_SGHNP
