"""Parts that delta nets and Mamba share: rows cut into chunks, masks of packed rows, short convolutions.

Legend: B batch, T tokens, N chunks, C positions of a chunk (i reads, j is read).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.stable_bits import apply_batch_invariant

CHUNK_POSITIONS = 64
"""Positions of a chunk. It divides every end of a chunk of prompts, so prompts are cut where whole rows are."""


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
    """Masks of rows that hold several sequences, chunk by chunk."""

    reads_NBij: jax.Array  # whether position j is an earlier one of the sequence of i, or i itself
    continues_NBC: jax.Array  # whether the sequence of a position began in an earlier chunk

    @classmethod
    def from_starts(cls, start_BT: jax.Array) -> "ChunkMasks":
        """Return the masks, given the start in the row of the sequence of each position."""
        start_NBC = split_chunks(start_BT)
        index = jnp.arange(start_NBC.shape[2])
        same_NBij = start_NBC[..., :, None] == start_NBC[..., None, :]
        first_N11 = (jnp.arange(start_NBC.shape[0]) * start_NBC.shape[2])[:, None, None]
        return cls(reads_NBij=same_NBij & (index[:, None] >= index), continues_NBC=start_NBC < first_N11)


def get_chunk_masks(masks: ChunkMasks | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Return both masks of one chunk, [B, i, j] and [B, C]; of rows with one sequence if there are none."""
    if masks is None:
        index = jnp.arange(size)
        return (index[:, None] >= index)[None], jnp.ones((1, index.size), bool)
    return masks.reads_NBij, masks.continues_NBC  # of this chunk, without N


def make_conv_masks(start_BT: jax.Array, width: int) -> jax.Array:
    """Return for each distance below `width` whether the position so far before is of the same sequence: 1 or 0.

    `start_BT` is the start in the row of the sequence of each position. Returns float32 [W, B, T, 1].
    """
    position_BT = jnp.arange(start_BT.shape[1]) - start_BT
    return (position_BT >= jnp.arange(width)[:, None, None]).astype(jnp.float32)[..., None]


def short_conv(
    x_BTI: jax.Array, weight_WI: jax.Array, tail_BWI: jax.Array, masks_WBT1: jax.Array | None = None
) -> jax.Array:
    """Return for each position the weighted sum of the last W inputs, float32 [B, T, I].

    The last weight is that of the position itself. `tail` [B, W - 1, I] are the inputs before the row. With `masks`
    the first outputs of a sequence read no input of another.
    """
    width, length = weight_WI.shape[0], x_BTI.shape[1]
    weight = weight_WI.astype(jnp.float32)
    padded = jnp.concatenate([tail_BWI.astype(jnp.float32), x_BTI.astype(jnp.float32)], axis=1)
    y_BTI = jnp.zeros((), jnp.float32)
    for place in range(width):
        each = padded[:, place : place + length] * weight[place]
        y_BTI = y_BTI + (each if masks_WBT1 is None else each * masks_WBT1[width - 1 - place])
    return y_BTI


def get_last_inputs(x_BTI: jax.Array, tail_BWI: jax.Array, size: jax.Array | int) -> jax.Array:
    """Return the inputs that the next position reads, [B, W - 1, I], after the first `size` (or [B]) of a row."""
    padded, width = jnp.concatenate([tail_BWI, x_BTI.astype(tail_BWI.dtype)], axis=1), tail_BWI.shape[1]
    if jnp.ndim(size) == 0:
        return jax.lax.dynamic_slice_in_dim(padded, size, width, axis=1)
    return jax.vmap(lambda x_TI, size: jax.lax.dynamic_slice_in_dim(x_TI, size, width))(padded, size)


def short_conv_step(x_SI: jax.Array, weight_WI: jax.Array, tail_SWI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum for one token of each slot, float32 [S, I], and the inputs that the next one reads."""
    window_SWI = jnp.concatenate([tail_SWI, x_SI[:, None].astype(tail_SWI.dtype)], axis=1)
    y_SI = jnp.zeros((), jnp.float32)
    for place in range(weight_WI.shape[0]):
        y_SI = y_SI + window_SWI[:, place].astype(jnp.float32) * weight_WI[place].astype(jnp.float32)
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
        state_BHDE, o_NBHCE = jax.lax.scan(jax.checkpoint(_run_delta_chunk, prevent_cse=False), state_BHDE, chunks)
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


def _run_delta_chunk(state_BHDE: jax.Array, inputs: _Chunks) -> tuple[jax.Array, jax.Array]:
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
    one = jax.checkpoint(_run_state_space_chunk, prevent_cse=False)
    # The first dim is of chunks.
    state_BGHNP, y = jax.lax.scan(one, state_BGHNP, (c, b, x, jnp.cumsum(decay, axis=-1), masks))
    y = jnp.moveaxis(y, (0, 4), (1, 2))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state_BGHNP


def _run_state_space_chunk(
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
