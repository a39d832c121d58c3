"""Draw tokens from logits, with log-probabilities: temperature, then min-p, top-k and top-p.

**Filters.** Tokens are sorted by descending logit, and equal logits by ascending id. A filter keeps
the tokens up to a position in this order. Min-p keeps the tokens that are at least min_p times as
likely as the first token. Top-k keeps the first k tokens. Top-p (Holtzman et al. 2020,
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

**Random numbers by key:** Threefry 2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw 2011,
"Parallel random numbers: as easy as 1, 2, 3"). The numbers equal the numbers of `jax.random`. On
CPU, `jax.random` runs the rounds as loops, which are 48 of the 248 kernels of a program that draws
tokens. Here the rounds are plain arithmetic, which XLA compiles to one kernel per use.

Legend: S rows, N steps or blocks of the vocabulary, V vocab, Z rows of a tile, J tokens of a block,
K best tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.backends.jax.sample.logit_blocks import (
    NO_TOKEN,
    LogitBlocks,
    Normalizer,
    SortPosition,
    cumsum,
    scale_logits,
    search_cumsum,
)
from skyrl_tx.layers.stable_bits import sum_last_dim

PROMPT_INDEX = np.uint32(0xFFFFFFFF)
"""Tokens drawn at prompt positions use sample indices that count down from this one."""

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
Ends = tuple[SortPosition, jax.Array]
"""The end of the kept tokens of each row, and the weight of the tokens before it."""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
"""The constant for the third word of a key, from Skein (Ferguson et al. 2010)."""
_ONE = np.float32(1).view(np.uint32)
_MANTISSA_BITS = 23


@struct.dataclass
class DrawParams:
    """The sampling parameters of each row. They are data, so one program runs any mix of them."""

    seed_S2: jax.Array  # uint32: the 64-bit seed of the request, high word first
    index_S: jax.Array  # uint32: the index of the sample in its request
    temperature_S: jax.Array  # float32; 0 is greedy
    top_k_S: jax.Array  # int32; off if <= 0
    top_p_S: jax.Array  # float32; off if >= 1
    min_p_S: jax.Array  # float32; off if 0
    raw_S: jax.Array  # bool: report raw log-probabilities, where they differ from tempered ones


@struct.dataclass
class DrawnTokens:
    """The tokens that a program drew, before stops are applied.

    Shapes are [S] for one step of rows, [N, S] for steps, and [N] for one sample.
    """

    tokens: Any  # int32
    logprobs: Any  # float32, before filters; see `SamplingParams.raw_logprobs`
    topk_tokens: Any  # int32 [..., K], best first; K is 0 if `max_topk` is 0
    topk_logprobs: Any  # float32 [..., K]

    def row(self, row: int, num_steps: int) -> "DrawnTokens":
        """Return the first `num_steps` tokens of one row."""
        return DrawnTokens(  # `jax.tree.map` would take ten times as long
            self.tokens[:num_steps, row],
            self.logprobs[:num_steps, row],
            self.topk_tokens[:num_steps, row],
            self.topk_logprobs[:num_steps, row],
        )


def draw(
    logits_SV: jax.Array,
    params: DrawParams,
    position_S: jax.Array,
    model_logits_SV: jax.Array | None = None,
    *,
    max_topk: int = 0,
    wants_topk: jax.Array,
) -> DrawnTokens:
    """Draw each row's token number `position_S` (0 is the first new token) from float32 logits.

    If the scalar `wants_topk` is False, the top-k is not computed and is zero. Raw log-probabilities
    come from `model_logits_SV`, the logits before they were adjusted; None if they were not.
    """
    blocks = LogitBlocks.from_logits(logits_SV, params.temperature_S)

    key_S2 = make_keys(params.seed_S2, params.index_S, position_S)
    filters = Filters(params.top_k_S, params.top_p_S, params.min_p_S, key_S2)
    drawn_S = redraw(blocks, filters, blocks.pick(uniform(key_S2)))
    token_S = jnp.where(params.temperature_S > 0, drawn_S, blocks.most_likely())

    # Report the distribution that the client asked for.
    if model_logits_SV is not None:
        reported_SV = jnp.where(params.raw_S[:, None], model_logits_SV, logits_SV)
        blocks = LogitBlocks.from_logits(reported_SV, params.temperature_S)
    normalizer = blocks.normalize(params.raw_S)
    token_SK, logprob_SK = find_top_k(blocks, normalizer, logits_SV.shape[1], max_topk, wants_topk)
    return DrawnTokens(token_S, blocks.get_logprob(token_S, normalizer), token_SK, logprob_SK)


def split_seed(seed: int) -> np.ndarray:
    """Return a seed of up to 64 bits as uint32 [2], high word first."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def make_keys(seed_S2: jax.Array, index_S: jax.Array, position_S: jax.Array) -> jax.Array:
    """Return a random key per row, uint32 [S, 2].

    It depends only on seed, sample index and position.
    """
    return fold_in(fold_in(seed_S2, index_S), position_S)


def find_top_k(
    blocks: LogitBlocks, normalizer: Normalizer, num_tokens: int, max_topk: int, wants_topk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the `max_topk` most likely tokens and their log-probabilities, best first.

    Both are zero unless `wants_topk`.
    """
    shape = (blocks.num_rows, min(max_topk, num_tokens))

    def compute() -> tuple[jax.Array, jax.Array]:
        logits_SK, token_SK = blocks.find_top_k(shape[1])
        return token_SK, normalizer.get_logprobs(logits_SK)

    if shape[1] == 0:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return jax.lax.cond(wants_topk, compute, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))


def fold_in(key_S2: jax.Array, number_S: jax.Array) -> jax.Array:
    """Return a new key from each key and a number, uint32 [S, 2]."""
    number_S = number_S.astype(jnp.uint32)
    return jnp.stack(_threefry(key_S2, jnp.zeros_like(number_S), number_S), axis=-1)


def uniform(key_S2: jax.Array) -> jax.Array:
    """Return one number in [0, 1) for each key, float32 [S]."""
    zero_S = jnp.zeros(key_S2.shape[:-1], jnp.uint32)
    high_S, low_S = _threefry(key_S2, zero_S, zero_S)
    between_1_and_2_S = (high_S ^ low_S) >> (32 - _MANTISSA_BITS) | _ONE
    return jax.lax.bitcast_convert_type(between_1_and_2_S, jnp.float32) - 1.0


def _threefry(key_S2: jax.Array, x_S: jax.Array, y_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an encrypted block of two words."""
    first_S, second_S = key_S2[..., 0], key_S2[..., 1]
    words = first_S, second_S, first_S ^ second_S ^ _PARITY
    x_S, y_S = x_S + words[0], y_S + words[1]
    for number in range(1, 6):
        for rotation in _ROTATIONS[(number - 1) % 2]:
            x_S = x_S + y_S
            y_S = (y_S << rotation | y_S >> (32 - rotation)) ^ x_S
        x_S, y_S = x_S + words[number % 3], y_S + words[(number + 1) % 3] + np.uint32(number)
    return x_S, y_S


@struct.dataclass
class _RejectionState:
    """The state of rejection sampling."""

    token_S: jax.Array
    round_S: jax.Array  # uint32: the round that judges the token; 0 once it is accepted


class Filters(NamedTuple):
    """The filters of each row, and the key of its random numbers. See `DrawParams`."""

    top_k_S: jax.Array
    top_p_S: jax.Array
    min_p_S: jax.Array
    key_S2: jax.Array


def redraw(blocks: LogitBlocks, filters: Filters, token_S: jax.Array) -> jax.Array:
    """Return each row's token if its filters keep it, else a token that a later round draws.

    The given tokens must be drawn from the whole distribution. Each row has its own random numbers
    (by its key) and is processed independently, so the result is batch-invariant.
    """
    num_rows = token_S.shape[0]
    if num_rows <= MAX_UNTILED_ROWS:
        return redraw_in_tiles(num_rows, blocks, filters, token_S)
    by_platform = {"cpu": partial(redraw_in_tiles, TILE), "default": partial(redraw_in_tiles, num_rows)}
    redrawn: jax.Array = jax.lax.platform_dependent(blocks, filters, token_S, **by_platform)
    return redrawn


def redraw_in_tiles(size: int, blocks: LogitBlocks, filters: Filters, token_S: jax.Array) -> jax.Array:
    """Do the same as `redraw`, with tiles of `size` rows."""
    top_k_S, top_p_S, min_p_S, key_S2 = filters
    sampled_S = blocks.temperature_S > 0
    cuts_S = sampled_S & (top_k_S > 0) & (top_k_S < blocks.token_NJ.size)
    few_S, many_S = cuts_S & (top_k_S <= SMALL_TOP_K[-1]), cuts_S & (top_k_S > SMALL_TOP_K[-1])
    token_S = _filter_small_top_k(size, blocks, few_S, filters, token_S)
    min_S = sampled_S & ~few_S & (min_p_S > 0)
    end, total_S = _apply_min_p(size, blocks, min_S, min_p_S, _find_large_top_k_ends(size, blocks, many_S, top_k_S))
    requested_S = many_S | min_S | (sampled_S & ~cuts_S & (top_p_S < 1.0))
    return _draw_in_rounds(size, blocks, requested_S, end, _limit_weight(top_p_S, total_S), key_S2, token_S)


def _filter_small_top_k(
    size: int, blocks: LogitBlocks, requested_S: jax.Array, filters: Filters, token_S: jax.Array
) -> jax.Array:
    """Find the tokens of each small top-k in order, and filter them directly."""
    top_k_S, top_p_S, min_p_S, key_S2 = filters

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


def _find_large_top_k_ends(size: int, blocks: LogitBlocks, requested_S: jax.Array, top_k_S: jax.Array) -> Ends:
    """Return where each row's top-k ends, and the weight before it.

    For rows without a request, this is the last position and the total weight.
    """
    S = requested_S.shape[0]
    top_k_S = jnp.where(requested_S, top_k_S, blocks.token_NJ.size)

    def find_ends_in_tile(row_Z: RowIndices, ends: Ends) -> Ends:
        rows = blocks.select_rows(row_Z)
        return _replace_ends(ends, row_Z, requested_S, rows, _find_top_k_end(rows, _take_rows(top_k_S, row_Z)))

    last = SortPosition(jnp.full(S, -jnp.inf), jnp.full(S, NO_TOKEN))
    return _apply_in_tiles(size, requested_S, find_ends_in_tile, (last, blocks.total_S))


def _apply_min_p(size: int, blocks: LogitBlocks, requested_S: jax.Array, min_p_S: jax.Array, ends: Ends) -> Ends:
    """Move the ends of requesting rows before the tokens that min-p removes.

    Takes and returns the positions and the weights before them.
    """

    def move_ends_in_tile(row_Z: RowIndices, ends: Ends) -> Ends:
        rows, (end, _) = blocks.select_rows(row_Z), _take_rows(ends, row_Z)
        lowest_Z = rows.highest_S + rows.temperature_S * jnp.log(_take_rows(min_p_S, row_Z))
        is_earlier_Z = lowest_Z > end.logit_S
        end = SortPosition(
            jnp.where(is_earlier_Z, lowest_Z, end.logit_S), jnp.where(is_earlier_Z, NO_TOKEN, end.token_S)
        )
        return _replace_ends(ends, row_Z, requested_S, rows, end)

    return _apply_in_tiles(size, requested_S, move_ends_in_tile, ends)


def _replace_ends(ends: Ends, row_Z: RowIndices, requested_S: jax.Array, rows: LogitBlocks, end: SortPosition) -> Ends:
    """Replace the ends of the requesting rows of a tile. `rows` are all rows of the tile, `end` their new ends."""
    new_ends, is_requested_Z = (end, sum_last_dim(rows.sum_before(end))), _take_rows(requested_S, row_Z)
    kept = jax.tree.map(lambda new, old: jnp.where(is_requested_Z, new, old), new_ends, _take_rows(ends, row_Z))
    return _put_rows(ends, row_Z, kept)


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
