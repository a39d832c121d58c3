"""Keys and values of one stack of layers in pages, and attention over them in sampling.

Legend: n layers of a stack, S rows of a decode step, B batch rows, M pages of a row, P positions of
a page, N heads, K kv heads, G query heads per kv head (N = K * G), T query and U key tokens, C
cache positions, H head dim.

Heads come before positions, so that attention reads one contiguous block per head. On CPU, this
layout was measured 1.26 times as fast as positions before heads.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.attention import (
    MASKED_SCORE,
    SoftmaxStats,
    add_keys,
    compute_scores,
    group_sinks,
    make_empty_stats,
    merge_stats,
)
from skyrl_tx.layers.stable_bits import exp_unfused, sum_last_dim

PAGE_SIZE = 64
"""Positions per page. It divides the chunk size of linear attention.

On average, half a page of each sample is unused.
"""

MIN_SEGMENT_SIZE = 128
"""The number of positions of the first segment in `read_segments`; a multiple of PAGE_SIZE."""

PAST_BLOCK_KEYS = 256
"""Keys per block of the past."""


@struct.dataclass
class KeyValues:
    """Keys (rotated) and values: of a stack in pages [n, pages, K, P, H], or of rows [B, K, C, H]."""

    k: jax.Array
    v: jax.Array | None  # None: the keys also serve as values, as with latents

    @property
    def values(self) -> jax.Array:
        """The values, or the keys if they serve as values."""
        return self.k if self.v is None else self.v


Segments = tuple[KeyValues, ...]
"""One layer's positions in consecutive segments: keys [S, K, H, C] and values [S, K, C, H].

Keys that also serve as values are [S, K, C, H].
"""


@struct.dataclass
class Pages:
    """One layer's positions of rows, read in place from the pages of the whole stack."""

    stack: KeyValues
    layer: Any
    page_BM: jax.Array  # int32

    def read_block(self, index: Any, num_pages: int) -> KeyValues:
        """Return a copy of block `index`, which has `num_pages` pages of each row: [B, K, C, H]."""
        page_Bm = jax.lax.dynamic_slice_in_dim(self.page_BM, index * num_pages, num_pages, axis=1)

        def read(leaf: jax.Array) -> jax.Array:
            pages = jnp.swapaxes(_gather_pages(leaf, self.layer, page_Bm), 1, 2)
            return pages.reshape(*pages.shape[:2], -1, pages.shape[4])

        return jax.tree.map(read, self.stack)


def _gather_pages(stack: jax.Array, layer: Any, page_BM: jax.Array) -> jax.Array:
    """Return pages of one layer, [B, M, K, P, H]."""
    return stack.at[layer, page_BM].get(mode="clip")


def append_token(recent: KeyValues, new: KeyValues, index: jax.Array) -> KeyValues:
    """Write one token's keys and values [S, K, H] into one layer's recent tokens."""

    def write_token(into: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, leaf[:, :, None].astype(into.dtype), index, axis=2)

    return jax.tree.map(write_token, recent, new)


def read_segments(pages: Pages, length: int) -> Segments:
    """Return copies of the first `length` positions of rows in segments.

    Every row needs pages for `length` positions. The first segment has MIN_SEGMENT_SIZE positions,
    and each later segment has as many as all segments before it. A position is therefore always in
    the same segment, regardless of the KV read length, and its products round alike. This makes
    decoding batch-invariant.

    A product of few queries with keys [H, C] was measured 1.5 times as fast on CPU as a product
    with keys [C, H]. Keys that also serve as values are read once, as [C, H].
    """
    *_, size, _ = pages.stack.k.shape

    def read(source: jax.Array, first: int, last: int, *, transposed: bool) -> jax.Array:
        page_Sm = pages.page_BM[:, first // size : last // size]
        read_SmKPH = _gather_pages(source, pages.layer, page_Sm)
        S, _, K, _, H = read_SmKPH.shape
        if transposed:
            return jnp.transpose(read_SmKPH, (0, 2, 4, 1, 3)).reshape(S, K, H, last - first)
        return jnp.swapaxes(read_SmKPH, 1, 2).reshape(S, K, last - first, H)

    segments: list[KeyValues] = []
    first, last = 0, min(MIN_SEGMENT_SIZE, length)
    while first < length:
        keys = read(pages.stack.k, first, last, transposed=pages.stack.v is not None)
        values = None if pages.stack.v is None else read(pages.stack.v, first, last, transposed=False)
        segments.append(KeyValues(k=keys, v=values))
        first, last = last, min(2 * last, length)
    return tuple(segments)


def paged_attention(
    q_BTNH: jax.Array,
    position_BT: jax.Array,
    past: Pages,
    start_B: jax.Array,
    new: KeyValues,
    seen_TU: jax.Array,
    sinks_N: jax.Array | None = None,
    *,
    window: int | None = None,
    kernel: Callable[..., SoftmaxStats] | None = None,
) -> jax.Array:
    """Return attention of new tokens over the past of their rows and over new keys, [B, T, N, H].

    Row b attends to its past positions below `start_B[b]`, and token t, at `position_BT[b, t]`, to
    the new keys [B, K, U, H] that `seen_TU[t]` selects. Windows and sinks are as in
    `causal_attention`; `seen_TU` must already respect the window.

    The past is read in blocks, from the first block in the window of any token up to the longest
    row, so the cost does not depend on the number of pages. A block that a row does not attend to
    changes none of its bits. `kernel` reads the past (see `Kernels.get_past_kernel`) if given.
    """
    B, T, N, H = q_BTNH.shape
    K = new.k.shape[1]
    q_BKGTH = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
    carry = make_empty_stats(q_BKGTH, H, group_sinks(sinks_N, K))
    if kernel is None:
        carry = _add_past(carry, q_BKGTH, past, start_B, position_BT, window)
    else:
        carry = merge_stats(carry, kernel(q_BKGTH, past, start_B, position_BT[:, 0]))

    scores = jnp.where(seen_TU, compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, new.k), MASKED_SCORE)
    _, total, out = add_keys(carry, scores, new.values)
    return jnp.transpose(out / total[..., None], (0, 3, 1, 2, 4)).reshape(B, T, N, H)


def decode_attention(
    q_SNH: jax.Array,
    past: Pages,
    start_S: jax.Array,
    recent: KeyValues,
    num_recent: jax.Array,
    sinks_N: jax.Array | None = None,
    *,
    kernel: Callable[..., SoftmaxStats],
) -> jax.Array:
    """Return the result of `paged_attention` for the last recent token of each row, [S, N, H].

    One kernel reads both the past and the recent tokens (see `Kernels.get_step_kernel`).
    """
    S, N, H = q_SNH.shape
    K = recent.k.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    stats = kernel(q_SKGH, past, start_S, recent, num_recent)
    if sinks_N is not None:
        no_key = jax.tree.map(
            lambda x: x[:, :, :, 0], make_empty_stats(q_SKGH[:, :, :, None], H, group_sinks(sinks_N, K))
        )
        stats = merge_stats(no_key, stats)
    _, total, out = stats
    return (out / total[..., None]).reshape(S, N, H)


def attend_past_in_blocks(
    q_BKGTH: jax.Array, past: Pages, start_B: jax.Array, first_B: jax.Array, *, window: int | None
) -> SoftmaxStats:
    """Return the statistics of the past like an `AttendPast` kernel, with a plain loop."""
    position_BT = first_B[:, None] + jnp.arange(q_BKGTH.shape[3])
    return _add_past(make_empty_stats(q_BKGTH, q_BKGTH.shape[4], None), q_BKGTH, past, start_B, position_BT, window)


def _add_past(
    carry: SoftmaxStats, q_BKGTH: jax.Array, past: Pages, start_B: jax.Array, position_BT: jax.Array, window: int | None
) -> SoftmaxStats:
    page_size = past.stack.k.shape[3]
    num_pages = math.gcd(past.page_BM.shape[1], max(PAST_BLOCK_KEYS // page_size, 1))
    size = num_pages * page_size

    def add_past_block(j: jax.Array, carry: SoftmaxStats) -> SoftmaxStats:
        block, position_U = past.read_block(j, num_pages), j * size + jnp.arange(size)
        seen_BU = position_U < start_B[:, None]
        visible_BTU = seen_BU[:, None]
        if window is not None:
            visible_BTU &= position_U > position_BT[:, :, None] - window
        scores = jnp.where(
            visible_BTU[:, None, None], compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, block.k), MASKED_SCORE
        )
        # Positions that were never written may hold NaN, and 0 * NaN is NaN.
        return add_keys(carry, scores, jnp.where(seen_BU[:, None, :, None], block.values, 0))

    first = 0 if window is None else jnp.maximum(position_BT.min() - (window - 1), 0) // size
    return jax.lax.fori_loop(first, (start_B.max() + size - 1) // size, add_past_block, carry)


def attend_segments(
    q_SNH: jax.Array,
    past: Sequence[KeyValues],
    recent: KeyValues,
    start_S: jax.Array,
    num_recent: jax.Array,
    sinks_N: jax.Array | None = None,
    *,
    window: int | None = None,
) -> jax.Array:
    """Return attention of one new token per slot over the past and the recent tokens, [S, N, H].

    All arrays are of one layer. The past has consecutive segments (see `Segments`), and slot s
    attends to its positions below `start_S[s]`. Of `recent` [S, K, T, H], every slot attends to the
    first `num_recent` tokens, which include the new token. With a window, it attends to at most
    that many positions, including the new token. Segments that a slot does not attend to change
    none of its bits.
    """
    S, N, H = q_SNH.shape
    K = recent.k.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    seen_T = jnp.arange(recent.values.shape[2]) < num_recent
    if window is not None:
        seen_T &= jnp.arange(recent.values.shape[2]) >= num_recent - window

    # Scores of the recent tokens, then of each segment.
    scored = [(jnp.where(seen_T, compute_scores("skgh,skth->skgt", q_SKGH, recent.k), -jnp.inf), recent.values)]
    first = 0
    for segment in past:
        seen_SC = first + jnp.arange(segment.values.shape[2]) < start_S[:, None]
        if window is not None:
            seen_SC &= first + jnp.arange(segment.values.shape[2]) >= start_S[:, None] + num_recent - window
        scores = compute_scores("skgh,skch->skgc" if segment.v is None else "skgh,skhc->skgc", q_SKGH, segment.k)
        scored.append((jnp.where(seen_SC[:, None, None], scores, -jnp.inf), segment.values))
        first += segment.values.shape[2]

    # Softmax over all of them.
    highest = reduce(jnp.maximum, [scores.max(-1, keepdims=True) for scores, _ in scored])
    out, total = jnp.float32(0), jnp.float32(0)
    if (sinks_KG := group_sinks(sinks_N, K)) is not None:
        highest = jnp.maximum(highest, sinks_KG[:, :, None])
        total = jnp.exp(sinks_KG[:, :, None] - highest)
    for scores, v in scored:
        weights = exp_unfused(scores - highest)  # exp gives the same bits for any number of slots
        out += jnp.einsum("skgc,skch->skgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total += sum_last_dim(weights)[..., None]
    return (out / total).reshape(S, N, H)
