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

For a small k the best k tokens are found in order and filtered directly. For a larger k the position is found by
bisection.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.backends.jax.sample.blocks import NO_TOKEN, Blocks, Mark, first_past, scale
from skyrl_tx.layers.steady import sum_last

FEW = (24, 64, 256)
"""A top-k up to one of these sizes is found in as many blocks."""

TILE = 4
"""Rows that are processed together."""
_MAX = np.int32(2**31 - 1)
_TINY = np.finfo(np.float32).tiny

T = TypeVar("T")

Numbers = Callable[[jax.Array, jax.Array], jax.Array]
"""A function from rows and the round of each to uniform numbers in [0, 1)."""


@struct.dataclass
class _Drawing:
    """The state of rejection sampling."""

    token_S: jax.Array
    is_out_S: jax.Array  # bool: the token is not in the top-k
    is_open_S: jax.Array  # bool: the token is not accepted yet
    round_S: jax.Array  # uint32


def redraw(blocks: Blocks, top_k_S: jax.Array, top_p_S: jax.Array, numbers: Numbers, token_S: jax.Array) -> jax.Array:
    """Return each row's token, drawn from the whole distribution, if its filters keep it, else one of a later round.

    Each row has its own random numbers and is processed independently, so the result is batch-invariant.
    """
    sampled_S = blocks.temperature_S > 0
    cuts_S = sampled_S & (top_k_S > 0) & (top_k_S < blocks.token_NJ.size)
    few_S, many_S = cuts_S & (top_k_S <= FEW[-1]), cuts_S & (top_k_S > FEW[-1])
    token_S = _from_few(blocks, few_S, top_k_S, top_p_S, numbers, token_S)
    end, total_S = _ends_of_many(blocks, many_S, top_k_S)
    return _by_rounds(blocks, many_S | (sampled_S & ~cuts_S & (top_p_S < 1.0)), end, total_S, top_p_S, numbers, token_S)


def _from_few(
    blocks: Blocks, requested_S: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array, numbers: Numbers, token_S: jax.Array
) -> jax.Array:
    """Find the tokens of each small top-k in order and filter them directly."""

    def best(rows: Blocks, few: int) -> tuple[jax.Array, jax.Array]:
        logit_ZK, token_ZK = rows.best(min(few, blocks.token_NJ.size))
        missing = ((0, 0), (0, FEW[-1] - token_ZK.shape[1]))
        return jnp.pad(logit_ZK, missing, constant_values=-jnp.inf), jnp.pad(token_ZK, missing)

    def tile(row_Z: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        most = jnp.where(requested_S[row_Z], top_k_S[row_Z], 0).max()
        which = jnp.searchsorted(jnp.asarray(FEW), most)
        best_Z = jax.lax.switch(which, [partial(best, few=few) for few in FEW], blocks.rows(row_Z))
        return jax.tree.map(lambda into_S, leaf_Z: into_S.at[row_Z].set(leaf_Z), found, best_Z)

    def draw() -> jax.Array:
        nothing = jnp.zeros((token_S.shape[0], FEW[-1]))
        logit_SK, token_SK = _tiles(requested_S, tile, (nothing, nothing.astype(jnp.int32)))
        weight_SK = jnp.exp(scale(logit_SK, blocks.highest_S, blocks.temperature_S))
        weight_SK = jnp.where(jnp.arange(FEW[-1]) < top_k_S[:, None], weight_SK, 0.0)
        until_SK = jnp.cumsum(weight_SK, axis=-1)
        before_SK = jnp.pad(until_SK[:, :-1], ((0, 0), (1, 0)))
        weight_SK = jnp.where(before_SK < _target(top_p_S, until_SK[:, -1])[:, None], weight_SK, 0.0)
        is_kept_S = ((token_SK == token_S[:, None]) & (weight_SK > 0)).any(axis=-1)
        until_SK = jnp.cumsum(weight_SK, axis=-1)
        row_S = jnp.arange(token_S.shape[0])
        place_S = first_past(weight_SK, until_SK, numbers(row_S, jnp.ones_like(token_S)) * until_SK[:, -1])
        return jnp.where(is_kept_S | ~requested_S, token_S, token_SK[row_S, place_S])

    return jax.lax.cond(requested_S.any(), draw, lambda: token_S)


def _by_rounds(
    blocks: Blocks,
    requested_S: jax.Array,
    end: Mark,
    total_S: jax.Array,
    top_p_S: jax.Array,
    numbers: Numbers,
    token_S: jax.Array,
) -> jax.Array:
    """Draw until each requesting row has a token of its top-p, relative to the total weight before `end`."""
    target_S = _target(top_p_S, total_S)
    mark = blocks.mark(token_S)
    is_out_S = mark.is_after(end.logit_S, end.token_S) | (mark.token_S == end.token_S)
    # An upper bound of the weight before the token, from block sums: if it is low enough, the token is accepted.
    own_S = jnp.exp(scale(mark.logit_S, blocks.highest_S, blocks.temperature_S))
    most_S = sum_last(jnp.where(blocks.highest_SN >= mark.logit_S[:, None], blocks.weight_SN, 0.0)) - own_S
    initial = _Drawing(
        token_S, is_out_S, requested_S & (is_out_S | ~(most_S < target_S)), jnp.ones(token_S.shape, jnp.uint32)
    )

    def one_round(drawing: _Drawing) -> _Drawing:
        row_Z = _requested_first(drawing.is_open_S)[:TILE]
        rows, was_out_Z = blocks.rows(row_Z), drawing.is_out_S[row_Z]
        drawn = rows.mark(drawing.token_S[row_Z])
        mark = jax.tree.map(lambda out, of_drawn: jnp.where(was_out_Z, out[row_Z], of_drawn), end, drawn)
        before_ZN = rows.before(mark)
        is_refused_Z = drawing.is_open_S[row_Z] & (was_out_Z | (sum_last(before_ZN) >= target_S[row_Z]))
        again_Z = rows.pick_before(mark, before_ZN, numbers(row_Z, drawing.round_S[row_Z]))
        return _Drawing(
            token_S=drawing.token_S.at[row_Z].set(jnp.where(is_refused_Z, again_Z, drawn.token_S)),
            is_out_S=drawing.is_out_S.at[row_Z].set(False),
            is_open_S=drawing.is_open_S.at[row_Z].set(is_refused_Z),
            round_S=drawing.round_S.at[row_Z].add(1),
        )

    return jax.lax.while_loop(lambda drawing: drawing.is_open_S.any(), one_round, initial).token_S


def _ends_of_many(blocks: Blocks, requested_S: jax.Array, top_k_S: jax.Array) -> tuple[Mark, jax.Array]:
    """Return the position where each row's top-k ends, and the weight before it; for other rows, the last position."""
    S = requested_S.shape[0]

    def tile(row_Z: jax.Array, ends: tuple[Mark, jax.Array]) -> tuple[Mark, jax.Array]:
        rows = blocks.rows(row_Z)
        end = _end_of_top_k(rows, top_k_S[row_Z])
        found = (end, sum_last(rows.before(end)))
        return jax.tree.map(lambda s, z: s.at[row_Z].set(jnp.where(requested_S[row_Z], z, s[row_Z])), ends, found)

    nowhere = Mark(jnp.full(S, -jnp.inf), jnp.full(S, NO_TOKEN))
    return _tiles(requested_S, tile, (nowhere, blocks.total_S))


def _end_of_top_k(rows: Blocks, top_k_S: jax.Array) -> Mark:
    """Find the k-th largest logit by bisection over its bits, then the first token of that logit beyond the top-k."""
    logits_SJ = rows.logits_RNJ[rows.row_S].reshape(top_k_S.shape[0], -1)

    def count(mask_SJ: jax.Array) -> jax.Array:
        return mask_SJ.sum(axis=-1, dtype=jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        taken_S, refused_S = bounds
        middle_S = (taken_S & refused_S) + ((taken_S ^ refused_S) >> 1)  # the mean, without overflow
        takes_S = count(logits_SJ >= _in_order(middle_S)[:, None]) >= top_k_S
        return jnp.where(takes_S, middle_S, taken_S), jnp.where(takes_S, refused_S, middle_S)

    infinity = np.float32(np.inf).view(np.int32)
    bounds = (jnp.full_like(top_k_S, infinity ^ -1), jnp.full_like(top_k_S, infinity + 1))
    logit_S = _in_order(jax.lax.fori_loop(0, 32, halve, bounds)[0])
    left_S = top_k_S - count(logits_SJ > logit_S[:, None])
    return Mark(logit_S, rows.nth_equal(logit_S, left_S))


def _in_order(number: jax.Array) -> jax.Array:
    """Map an int32 to a float32, preserving the order."""
    return jax.lax.bitcast_convert_type(jnp.where(number < 0, number ^ _MAX, number), jnp.float32)


def _target(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """Return the weight before a token from which on it is not kept; above 0, so that the first token is kept."""
    return jnp.where(top_p < 1.0, jnp.maximum(top_p * total, _TINY), jnp.inf)


def _tiles(requested_S: jax.Array, tile: Callable[[jax.Array, T], T], initial: T) -> T:
    """Apply `tile` to the state for all requesting rows, TILE rows at a time."""
    size, row_S = min(TILE, requested_S.shape[0]), _requested_first(requested_S)

    def one(i: jax.Array, state: T) -> T:
        return tile(jax.lax.dynamic_slice_in_dim(row_S, i * size, size), state)  # the last tile overlaps

    return jax.lax.fori_loop(0, (requested_S.sum(dtype=jnp.int32) + size - 1) // size, one, initial)


def _requested_first(requested_S: jax.Array) -> jax.Array:
    """Return all rows, requesting rows first."""
    return jnp.argsort(~requested_S, stable=True)
