"""Top-k, then top-p of the remaining tokens (Holtzman et al. 2020, arXiv:1904.09751), by rejection sampling.

Legend: S rows, Z rows of a tile, N blocks of the vocabulary, J tokens of a block, K best tokens.

Tokens are ordered by descending logit, equal logits by ascending id. A filter keeps the tokens up to a position in this
order: top-k those with fewer than k tokens before them; top-p those with less than top_p of the weight before them, and
always the first.

Top-p does not search for that position. A drawn token is kept if the weight before it is small enough. If it is not,
no token after it is kept either, and the next round draws from the tokens before it. Every round draws from a set that
includes all kept tokens, by the same weights, so the accepted token follows the weights of the kept tokens. On average
1 / top_p rounds are needed (Xing, Ye, Hou, Ceze and Chen 2025, "Sorting-Free GPU Kernels for LLM Sampling",
flashinfer.ai/2025/03/10/sampling.html, which compares weights only; here tokens of equal weight are distinct).

For a small k the best k tokens are found in order and filtered directly. For a larger k the last of them is found by
its bits, one after another.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.backends.jax.sample.logit_blocks import (
    NO_TOKEN,
    LogitBlocks,
    SortPosition,
    cumsum,
    scale_logits,
    search_cumsum,
)
from skyrl_tx.backends.jax.sample.random_numbers import fold_in, uniform
from skyrl_tx.layers.stable_bits import sum_last_dim

SMALL_TOP_K = (24, 64, 256)
"""A top-k up to one of these sizes is found in as many blocks."""

TILE = 4
"""Rows that are processed together on CPU, if there are more than `WHOLE`. Accelerators process all of them."""
WHOLE = 8
"""Rows that are processed together even if only one has a filter: without tiles, a program has fewer kernels."""
_ALL, _SIGN = np.uint32(0xFFFFFFFF), np.uint32(1 << 31)
_LOWEST = ~np.float32(-np.inf).view(np.uint32)
_TINY = np.finfo(np.float32).tiny

T = TypeVar("T")
RowIndices = jax.Array | None
"""Indices of rows; None is all."""


@struct.dataclass
class _RejectionState:
    """The state of rejection sampling."""

    token_S: jax.Array
    round_S: jax.Array  # uint32: the round in which the token is judged; 0 if it is accepted


def redraw(
    blocks: LogitBlocks, top_k_S: jax.Array, top_p_S: jax.Array, key_S2: jax.Array, token_S: jax.Array
) -> jax.Array:
    """Return each row's token, drawn from the whole distribution, if its filters keep it, else one of a later round.

    Each row has random numbers of its own, by its key, and is processed independently, so the result is
    batch-invariant.
    """
    num_rows = token_S.shape[0]
    arguments = blocks, top_k_S, top_p_S, key_S2, token_S
    if num_rows <= WHOLE:
        return redraw_in_tiles(num_rows, *arguments)
    redrawn: jax.Array = jax.lax.platform_dependent(
        *arguments, cpu=partial(redraw_in_tiles, TILE), default=partial(redraw_in_tiles, num_rows)
    )
    return redrawn


def redraw_in_tiles(
    size: int, blocks: LogitBlocks, top_k_S: jax.Array, top_p_S: jax.Array, key_S2: jax.Array, token_S: jax.Array
) -> jax.Array:
    """Do the same with `size` rows processed together."""
    sampled_S = blocks.temperature_S > 0
    cuts_S = sampled_S & (top_k_S > 0) & (top_k_S < blocks.token_NJ.size)
    few_S, many_S = cuts_S & (top_k_S <= SMALL_TOP_K[-1]), cuts_S & (top_k_S > SMALL_TOP_K[-1])
    token_S = _filter_small_top_k(size, blocks, few_S, top_k_S, top_p_S, key_S2, token_S)
    end, total_S = _find_large_top_k_ends(size, blocks, many_S, top_k_S)
    requested_S = many_S | (sampled_S & ~cuts_S & (top_p_S < 1.0))
    return _draw_in_rounds(size, blocks, requested_S, end, _limit_weight(top_p_S, total_S), key_S2, token_S)


def _filter_small_top_k(
    size: int,
    blocks: LogitBlocks,
    requested_S: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    key_S2: jax.Array,
    token_S: jax.Array,
) -> jax.Array:
    """Find the tokens of each small top-k in order and filter them directly."""

    def best(rows: LogitBlocks, few: int) -> jax.Array:
        _, token_ZK = rows.find_top_k(min(few, blocks.token_NJ.size))
        return jnp.pad(token_ZK, ((0, 0), (0, SMALL_TOP_K[-1] - token_ZK.shape[1])))

    def tile(row_Z: RowIndices, found_SK: jax.Array) -> jax.Array:
        most = _take_rows(jnp.where(requested_S, top_k_S, 0), row_Z).max()
        which = (most > np.array(SMALL_TOP_K[:-1])).sum(dtype=jnp.int32)
        best_ZK = jax.lax.switch(which, [partial(best, few=few) for few in SMALL_TOP_K], blocks.select_rows(row_Z))
        return _put_rows(found_SK, row_Z, best_ZK)

    def draw() -> jax.Array:
        token_SK = _apply_in_tiles(size, requested_S, tile, jnp.zeros((token_S.shape[0], SMALL_TOP_K[-1]), jnp.int32))
        weight_SK = jnp.exp(scale_logits(blocks.get_logits(token_SK), blocks.highest_S, blocks.temperature_S))
        weight_SK = jnp.where(jnp.arange(SMALL_TOP_K[-1]) < top_k_S[:, None], weight_SK, 0.0)
        until_SK = cumsum(weight_SK)
        before_SK = jnp.pad(until_SK[:, :-1], ((0, 0), (1, 0)))
        weight_SK = jnp.where(before_SK < _limit_weight(top_p_S, until_SK[:, -1])[:, None], weight_SK, 0.0)
        is_kept_S = ((token_SK == token_S[:, None]) & (weight_SK > 0)).any(axis=-1)
        until_SK = cumsum(weight_SK)
        place_S, _ = search_cumsum(until_SK, _draw_uniform(key_S2, jnp.ones_like(token_S)) * until_SK[:, -1])
        again_S = jnp.take_along_axis(token_SK, place_S[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(is_kept_S | ~requested_S, token_S, again_S)

    return jax.lax.cond(requested_S.any(), draw, lambda: token_S)


def _draw_in_rounds(
    size: int,
    blocks: LogitBlocks,
    requested_S: jax.Array,
    end: SortPosition,
    target_S: jax.Array,
    key_S2: jax.Array,
    token_S: jax.Array,
) -> jax.Array:
    """Draw until each requesting row has a token before `end` with less weight before it than its target."""
    mark = blocks.get_sort_position(token_S)
    is_out_S = ~end.is_after(mark.logit_S, mark.token_S)
    # An upper bound of the weight before the token, from block sums: if it is low enough, the token is accepted.
    own_S = jnp.exp(scale_logits(mark.logit_S, blocks.highest_S, blocks.temperature_S))
    most_S = sum_last_dim(jnp.where(blocks.highest_SN >= mark.logit_S[:, None], blocks.weight_SN, 0.0)) - own_S
    is_open_S = requested_S & (is_out_S | ~(most_S < target_S))

    def run_round(drawing: _RejectionState) -> _RejectionState:
        is_open_S = drawing.round_S > 0
        row_Z = None if is_open_S.size <= size else _sort_requested_first(is_open_S)[:size]
        token_Z, round_Z = _take_rows((drawing.token_S, drawing.round_S), row_Z)
        rows = blocks.select_rows(row_Z)
        if row_Z is None:
            # Else XLA computes scaled logits before the loop, and writes them to memory in every step.
            maximum, round_Z = jax.lax.optimization_barrier((rows.highest_SN, round_Z))
            rows = replace(rows, highest_SN=maximum)
        end_Z, target_Z, is_out_Z, key_Z2 = _take_rows((end, target_S, is_out_S, key_S2), row_Z)
        was_out_Z = is_out_Z & (round_Z == 1)
        mark = jax.tree.map(lambda end, drawn: jnp.where(was_out_Z, end, drawn), end_Z, rows.get_sort_position(token_Z))
        before_ZN = rows.sum_before(mark)
        is_refused_Z = (round_Z > 0) & (was_out_Z | (sum_last_dim(before_ZN) >= target_Z))
        again_Z = rows.pick_before(mark, before_ZN, _draw_uniform(key_Z2, round_Z))
        judged = _RejectionState(
            token_S=jnp.where(is_refused_Z, again_Z, token_Z), round_S=jnp.where(is_refused_Z, round_Z + 1, 0)
        )
        return _put_rows(drawing, row_Z, judged)

    first = _RejectionState(token_S, is_open_S.astype(jnp.uint32))
    return jax.lax.while_loop(lambda drawing: (drawing.round_S > 0).any(), run_round, first).token_S


def _find_large_top_k_ends(
    size: int, blocks: LogitBlocks, requested_S: jax.Array, top_k_S: jax.Array
) -> tuple[SortPosition, jax.Array]:
    """Return the position where each row's top-k ends, and the weight before it; for other rows, the last position."""
    S = requested_S.shape[0]
    top_k_S = jnp.where(requested_S, top_k_S, blocks.token_NJ.size)

    def tile(row_Z: RowIndices, ends: tuple[SortPosition, jax.Array]) -> tuple[SortPosition, jax.Array]:
        rows = blocks.select_rows(row_Z)
        end = _find_top_k_end(rows, _take_rows(top_k_S, row_Z))
        found, is_requested_Z = (end, sum_last_dim(rows.sum_before(end))), _take_rows(requested_S, row_Z)
        kept = jax.tree.map(lambda new, old: jnp.where(is_requested_Z, new, old), found, _take_rows(ends, row_Z))
        return _put_rows(ends, row_Z, kept)

    nowhere = SortPosition(jnp.full(S, -jnp.inf), jnp.full(S, NO_TOKEN))
    return _apply_in_tiles(size, requested_S, tile, (nowhere, blocks.total_S))


def _find_top_k_end(rows: LogitBlocks, top_k_S: jax.Array) -> SortPosition:
    """Find the last token of each top-k; return the position after it.

    Tokens have keys of two words, the logit and the id, both as numbers that are the larger, the earlier in the order.
    The key of the last token is the largest number that k tokens reach. Its bits are found from the highest on; those
    of the id are needed only where some tokens of equal logits are in a top-k and others are not.
    """
    num_tokens = rows.token_NJ.size
    num_bits = num_tokens.bit_length()  # of an id

    def make_position(high_S: jax.Array, low_S: jax.Array) -> SortPosition:
        return SortPosition(_decode_logit(high_S), (low_S ^ _ALL).astype(jnp.int32) + 1)

    def find_bit(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, *found = state
        high_S, low_S, _ = found
        bit = jnp.uint32(1) << jnp.where(i < 32, 31 - i, num_bits + 31 - i).astype(jnp.uint32)
        tried = high_S | jnp.where(i < 32, bit, 0), low_S | jnp.where(i < 32, 0, bit)
        num_S = make_position(*tried).is_after(rows.logits, rows.token_NJ).sum(axis=(1, 2), dtype=jnp.int32)
        pairs = zip((*tried, num_S), found, strict=True)
        return i + 1, *(jnp.where(num_S >= top_k_S, new, old) for new, old in pairs)

    def is_unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        i, *_, num_S = state
        return (i < 32) | ((i < 32 + num_bits) & (num_S > top_k_S).any())

    nothing = jnp.zeros(top_k_S.shape, jnp.uint32)
    initial = jnp.int32(0), nothing, nothing | _ALL << np.uint32(num_bits), jnp.full(top_k_S.shape, num_tokens)
    _, high_S, low_S, _ = jax.lax.while_loop(is_unfinished, find_bit, initial)
    return make_position(high_S, low_S)


def _decode_logit(number: jax.Array) -> jax.Array:
    """Map uint32 to float32, ascending from -inf; the largest numbers are mapped to NaN."""
    number = jnp.maximum(number, _LOWEST)
    return jax.lax.bitcast_convert_type(jnp.where(number < _SIGN, ~number, number ^ _SIGN), jnp.float32)


def _draw_uniform(key_S2: jax.Array, round_S: jax.Array) -> jax.Array:
    """Return the random number of a round."""
    return uniform(fold_in(key_S2, round_S))


def _limit_weight(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """Return the weight before a token from which on it is not kept; above 0, so that the first token is kept."""
    return jnp.where(top_p < 1.0, jnp.maximum(top_p * total, _TINY), jnp.inf)


def _apply_in_tiles(size: int, requested_S: jax.Array, tile: Callable[[RowIndices, T], T], initial: T) -> T:
    """Apply `tile` to the state for all requesting rows, `size` rows at a time."""
    num_rows = requested_S.shape[0]
    if num_rows <= size:
        return jax.lax.cond(requested_S.any(), partial(tile, None), lambda state: state, initial)
    row_S = _sort_requested_first(requested_S)

    def run_tile(i: jax.Array, state: T) -> T:
        return tile(jax.lax.dynamic_slice_in_dim(row_S, i * size, size), state)  # the last tile overlaps

    return jax.lax.fori_loop(0, (requested_S.sum(dtype=jnp.int32) + size - 1) // size, run_tile, initial)


def _sort_requested_first(requested_S: jax.Array) -> jax.Array:
    """Return all rows, requesting rows first."""
    return jnp.argsort(~requested_S, stable=True)


def _take_rows(tree: T, row_Z: RowIndices) -> T:
    """Return the chosen rows of a tree."""
    return tree if row_Z is None else jax.tree.map(lambda leaf: leaf[row_Z], tree)


def _put_rows(into: T, row_Z: RowIndices, values: T) -> T:
    """Return a tree with other values in the chosen rows."""
    return values if row_Z is None else jax.tree.map(lambda leaf, new: leaf.at[row_Z].set(new), into, values)
