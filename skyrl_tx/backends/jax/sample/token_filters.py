"""Sampling filters: min-p, then top-k, then top-p of the remaining tokens, by rejection sampling.

Legend: S rows, Z rows of a tile, N blocks of the vocabulary, J tokens of a block, K best tokens.

Tokens are sorted by descending logit, and equal logits by ascending id. A filter keeps the tokens
up to a position in this order. Min-p keeps the tokens that are at least min_p times as likely as
the first token. Top-k keeps the first k tokens. Top-p (Holtzman et al. 2020,
arXiv:1904.09751) keeps the tokens that have less than top_p of the remaining weight before them,
and always keeps the first token.

Top-p does not search for the position where it ends. Instead, it draws a token and computes the
weight before it. If this weight is small enough, the token is accepted. Otherwise no later token is
kept either, and the next round draws from the tokens before it. Every round draws from a set that
includes all kept tokens, by the same weights, so the accepted token follows the distribution of the
kept tokens. On average this takes 1 / top_p rounds (Xing, Ye, Hou, Ceze and Chen 2025,
"Sorting-Free GPU Kernels for LLM Sampling", flashinfer.ai/2025/03/10/sampling.html). The article
compares weights only; this module distinguishes tokens of equal weight.

For a small k, the k best tokens are found in order and filtered directly. For a larger k, the last
of them is found by a binary search over the bits of its sort key.
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
"""The sizes of small top-k.

A request uses the smallest size that holds its k; that many blocks are read.
"""

TILE = 4
"""Rows per tile on CPU, for more than MAX_UNTILED_ROWS rows. Accelerators process all rows at once."""
MAX_UNTILED_ROWS = 8
"""Up to this many rows are processed together, even if only one has a filter.

Without tiles, a program has fewer kernels.
"""
_ALL, _SIGN = np.uint32(0xFFFFFFFF), np.uint32(1 << 31)
_LOWEST = ~np.float32(-np.inf).view(np.uint32)
_TINY = np.finfo(np.float32).tiny

T = TypeVar("T")
RowIndices = jax.Array | None
"""Indices of rows; None selects all rows."""


@struct.dataclass
class _RejectionState:
    """The state of rejection sampling."""

    token_S: jax.Array
    round_S: jax.Array  # uint32: the round that judges the token; 0 once it is accepted


def redraw(
    blocks: LogitBlocks,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    key_S2: jax.Array,
    token_S: jax.Array,
) -> jax.Array:
    """Return each row's token if its filters keep it, else a token that a later round draws.

    The given tokens must be drawn from the whole distribution. Each row has its own random numbers
    (by its key) and is processed independently, so the result is batch-invariant.
    """
    num_rows = token_S.shape[0]
    arguments = blocks, top_k_S, top_p_S, min_p_S, key_S2, token_S
    if num_rows <= MAX_UNTILED_ROWS:
        return redraw_in_tiles(num_rows, *arguments)
    redrawn: jax.Array = jax.lax.platform_dependent(
        *arguments, cpu=partial(redraw_in_tiles, TILE), default=partial(redraw_in_tiles, num_rows)
    )
    return redrawn


def redraw_in_tiles(
    size: int,
    blocks: LogitBlocks,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    key_S2: jax.Array,
    token_S: jax.Array,
) -> jax.Array:
    """Do the same as `redraw`, with tiles of `size` rows."""
    sampled_S = blocks.temperature_S > 0
    cuts_S = sampled_S & (top_k_S > 0) & (top_k_S < blocks.token_NJ.size)
    few_S, many_S = cuts_S & (top_k_S <= SMALL_TOP_K[-1]), cuts_S & (top_k_S > SMALL_TOP_K[-1])
    token_S = _filter_small_top_k(size, blocks, few_S, top_k_S, top_p_S, min_p_S, key_S2, token_S)
    min_S = sampled_S & ~few_S & (min_p_S > 0)
    end, total_S = _apply_min_p(size, blocks, min_S, min_p_S, _find_large_top_k_ends(size, blocks, many_S, top_k_S))
    requested_S = many_S | min_S | (sampled_S & ~cuts_S & (top_p_S < 1.0))
    return _draw_in_rounds(size, blocks, requested_S, end, _limit_weight(top_p_S, total_S), key_S2, token_S)


def _filter_small_top_k(
    size: int,
    blocks: LogitBlocks,
    requested_S: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    key_S2: jax.Array,
    token_S: jax.Array,
) -> jax.Array:
    """Find the tokens of each small top-k in order, and filter them directly."""

    def find_best(rows: LogitBlocks, few: int) -> jax.Array:
        _, token_ZK = rows.find_top_k(min(few, blocks.token_NJ.size))
        return jnp.pad(token_ZK, ((0, 0), (0, SMALL_TOP_K[-1] - token_ZK.shape[1])))

    def find_best_in_tile(row_Z: RowIndices, best_SK: jax.Array) -> jax.Array:
        largest_k = _take_rows(jnp.where(requested_S, top_k_S, 0), row_Z).max()
        which = (largest_k > np.array(SMALL_TOP_K[:-1])).sum(dtype=jnp.int32)
        best_ZK = jax.lax.switch(which, [partial(find_best, few=few) for few in SMALL_TOP_K], blocks.select_rows(row_Z))
        return _put_rows(best_SK, row_Z, best_ZK)

    def draw() -> jax.Array:
        empty_SK = jnp.zeros((token_S.shape[0], SMALL_TOP_K[-1]), jnp.int32)
        token_SK = _apply_in_tiles(size, requested_S, find_best_in_tile, empty_SK)

        # Apply min-p and top-k, then top-p, to the weights.
        weight_SK = jnp.exp(scale_logits(blocks.get_logits(token_SK), blocks.highest_S, blocks.temperature_S))
        is_in_SK = (jnp.arange(SMALL_TOP_K[-1]) < top_k_S[:, None]) & ~(weight_SK < min_p_S[:, None])
        weight_SK = jnp.where(is_in_SK, weight_SK, 0.0)
        until_SK = cumsum(weight_SK)
        before_SK = jnp.pad(until_SK[:, :-1], ((0, 0), (1, 0)))
        weight_SK = jnp.where(before_SK < _limit_weight(top_p_S, until_SK[:, -1])[:, None], weight_SK, 0.0)

        # Keep the drawn token, or draw again among the kept tokens.
        is_kept_S = ((token_SK == token_S[:, None]) & (weight_SK > 0)).any(axis=-1)
        until_SK = cumsum(weight_SK)
        index_S, _ = search_cumsum(until_SK, _draw_uniform(key_S2, jnp.ones_like(token_S)) * until_SK[:, -1])
        again_S = jnp.take_along_axis(token_SK, index_S[:, None], axis=1, mode="clip")[:, 0]
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
    """Draw until each requesting row has a token before `end` with less than `target_S` before it."""
    mark = blocks.get_sort_position(token_S)
    is_out_S = ~end.is_after(mark.logit_S, mark.token_S)

    # Accept tokens at once if an upper bound of the weight before them, from block sums, is low.
    own_S = jnp.exp(scale_logits(mark.logit_S, blocks.highest_S, blocks.temperature_S))
    bound_S = sum_last_dim(jnp.where(blocks.highest_SN >= mark.logit_S[:, None], blocks.weight_SN, 0.0)) - own_S
    is_open_S = requested_S & (is_out_S | ~(bound_S < target_S))

    def run_round(drawing: _RejectionState) -> _RejectionState:
        is_open_S = drawing.round_S > 0
        row_Z = None if is_open_S.size <= size else _sort_requested_first(is_open_S)[:size]
        token_Z, round_Z = _take_rows((drawing.token_S, drawing.round_S), row_Z)
        rows = blocks.select_rows(row_Z)
        if row_Z is None:
            # Otherwise XLA would compute scaled logits before the loop and write them to memory in
            # every iteration.
            maximum, round_Z = jax.lax.optimization_barrier((rows.highest_SN, round_Z))
            rows = replace(rows, highest_SN=maximum)
        end_Z, target_Z, is_out_Z, key_Z2 = _take_rows((end, target_S, is_out_S, key_S2), row_Z)

        # Refuse tokens with too much weight before them, and draw from the tokens before them.
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
    """Return where each row's top-k ends, and the weight before it.

    For rows without a request, this is the last position and the total weight.
    """
    S = requested_S.shape[0]
    top_k_S = jnp.where(requested_S, top_k_S, blocks.token_NJ.size)

    def find_ends_in_tile(row_Z: RowIndices, ends: tuple[SortPosition, jax.Array]) -> tuple[SortPosition, jax.Array]:
        rows = blocks.select_rows(row_Z)
        end = _find_top_k_end(rows, _take_rows(top_k_S, row_Z))
        new_ends, is_requested_Z = (end, sum_last_dim(rows.sum_before(end))), _take_rows(requested_S, row_Z)
        kept = jax.tree.map(lambda new, old: jnp.where(is_requested_Z, new, old), new_ends, _take_rows(ends, row_Z))
        return _put_rows(ends, row_Z, kept)

    last = SortPosition(jnp.full(S, -jnp.inf), jnp.full(S, NO_TOKEN))
    return _apply_in_tiles(size, requested_S, find_ends_in_tile, (last, blocks.total_S))


def _apply_min_p(
    size: int, blocks: LogitBlocks, requested_S: jax.Array, min_p_S: jax.Array, ends: tuple[SortPosition, jax.Array]
) -> tuple[SortPosition, jax.Array]:
    """Move the ends of requesting rows before the tokens that min-p removes.

    Takes and returns the positions and the weights before them.
    """

    def move_ends_in_tile(row_Z: RowIndices, ends: tuple[SortPosition, jax.Array]) -> tuple[SortPosition, jax.Array]:
        rows, (end, _) = blocks.select_rows(row_Z), _take_rows(ends, row_Z)
        lowest_Z = rows.highest_S + rows.temperature_S * jnp.log(_take_rows(min_p_S, row_Z))
        is_earlier_Z = lowest_Z > end.logit_S
        end = SortPosition(
            jnp.where(is_earlier_Z, lowest_Z, end.logit_S), jnp.where(is_earlier_Z, NO_TOKEN, end.token_S)
        )
        new_ends, is_requested_Z = (end, sum_last_dim(rows.sum_before(end))), _take_rows(requested_S, row_Z)
        kept = jax.tree.map(lambda new, old: jnp.where(is_requested_Z, new, old), new_ends, _take_rows(ends, row_Z))
        return _put_rows(ends, row_Z, kept)

    return _apply_in_tiles(size, requested_S, move_ends_in_tile, ends)


def _find_top_k_end(rows: LogitBlocks, top_k_S: jax.Array) -> SortPosition:
    """Find the last token of each top-k, and return the position after it.

    The sort key of a token has two words, its logit and its id, both encoded as integers that are
    larger for tokens that come earlier. The key of the last token is the largest number that k
    tokens reach. Its bits are determined from the highest to the lowest. The bits of the id are
    needed only if a top-k ends among tokens of equal logits.
    """
    num_tokens = rows.token_NJ.size
    num_bits = num_tokens.bit_length()  # of an id

    def make_position(high_S: jax.Array, low_S: jax.Array) -> SortPosition:
        return SortPosition(_decode_logit(high_S), (low_S ^ _ALL).astype(jnp.int32) + 1)

    def find_bit(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, *bits_and_count = state
        high_S, low_S, _ = bits_and_count
        bit = jnp.uint32(1) << jnp.where(i < 32, 31 - i, num_bits + 31 - i).astype(jnp.uint32)
        tried = high_S | jnp.where(i < 32, bit, 0), low_S | jnp.where(i < 32, 0, bit)
        num_S = make_position(*tried).is_after(rows.logits, rows.token_NJ).sum(axis=(1, 2), dtype=jnp.int32)
        pairs = zip((*tried, num_S), bits_and_count, strict=True)
        return i + 1, *(jnp.where(num_S >= top_k_S, new, old) for new, old in pairs)

    def is_unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        i, *_, num_S = state
        return (i < 32) | ((i < 32 + num_bits) & (num_S > top_k_S).any())

    nothing = jnp.zeros(top_k_S.shape, jnp.uint32)
    initial = jnp.int32(0), nothing, nothing | _ALL << np.uint32(num_bits), jnp.full(top_k_S.shape, num_tokens)
    _, high_S, low_S, _ = jax.lax.while_loop(is_unfinished, find_bit, initial)
    return make_position(high_S, low_S)


def _decode_logit(number: jax.Array) -> jax.Array:
    """Map uint32 to float32, ascending from -inf. The largest numbers map to NaN."""
    number = jnp.maximum(number, _LOWEST)
    return jax.lax.bitcast_convert_type(jnp.where(number < _SIGN, ~number, number ^ _SIGN), jnp.float32)


def _draw_uniform(key_S2: jax.Array, round_S: jax.Array) -> jax.Array:
    """Return the random number of a round."""
    return uniform(fold_in(key_S2, round_S))


def _limit_weight(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """Return the weight limit: a token with this much weight before it is not kept.

    The limit is above 0, so that the first token is always kept.
    """
    return jnp.where(top_p < 1.0, jnp.maximum(top_p * total, _TINY), jnp.inf)


def _apply_in_tiles(size: int, requested_S: jax.Array, run_tile: Callable[[RowIndices, T], T], initial: T) -> T:
    """Apply `run_tile` to the state for all requesting rows, `size` rows at a time."""
    num_rows = requested_S.shape[0]
    if num_rows <= size:
        return jax.lax.cond(requested_S.any(), partial(run_tile, None), lambda state: state, initial)
    row_S = _sort_requested_first(requested_S)

    def run_next_tile(i: jax.Array, state: T) -> T:
        return run_tile(jax.lax.dynamic_slice_in_dim(row_S, i * size, size), state)  # the last tile may overlap

    return jax.lax.fori_loop(0, (requested_S.sum(dtype=jnp.int32) + size - 1) // size, run_next_tile, initial)


def _sort_requested_first(requested_S: jax.Array) -> jax.Array:
    """Return the indices of all rows, requesting rows first."""
    return jnp.argsort(~requested_S, stable=True)


def _take_rows(tree: T, row_Z: RowIndices) -> T:
    """Return the chosen rows of a tree."""
    return tree if row_Z is None else jax.tree.map(lambda leaf: leaf[row_Z], tree)


def _put_rows(into: T, row_Z: RowIndices, values: T) -> T:
    """Return the tree with `values` in the chosen rows."""
    return values if row_Z is None else jax.tree.map(lambda leaf, new: leaf.at[row_Z].set(new), into, values)
