"""Causal attention with grouped heads: over whole rows, and over a KV cache.

Legend: B batch, T query and U key tokens, N heads, K kv heads, G query heads per kv head
(N = K * G), S decode slots, C cache positions, H head dim, which may differ between keys and values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp

from skyrl_tx.layers.flash_attention import (
    MASKED_SCORE,
    KeyRange,
    SoftmaxStats,
    add_keys,
    flash_attention,
    make_empty_stats,
    merge_stats,
)
from skyrl_tx.layers.kv_cache import KeyValues, Pages
from skyrl_tx.layers.stable_bits import exp_unfused, sum_last_dim

DENSE_LENGTH = 64
"""Up to this many tokens, all scores are computed at once.

Above, blocks are faster, and their memory is linear in T.
"""

PAST_BLOCK_KEYS = 256
"""Keys per block of the past."""


def causal_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    start_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    *,
    prefix: KeyRange | None = None,
    window: int | None = None,
    kernel: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Return attention of each position over itself and earlier positions, float32 [B, T, N, H].

    There is no padding mask: rows are padded on the right, and no real position attends to the
    padding.

    Args:
        q_BTNH: Queries.
        k_BTKH: Keys.
        v_BTKH: Values.
        start_BT: The first key that a position attends to, ascending along T. A row can so hold
            multiple sequences, for example 0, 0, 0, 3, 3 for two sequences of three and two tokens.
        sinks_N: For each head, the score of one more key whose value is 0. Sinks get no gradient.
        prefix: Earlier keys of the row that a position attends to as well, as if they came directly
            before its own sequence. No kernel computes this.
        window: A position attends to at most this many positions, including itself.
        kernel: The kernel for these heads (see `Kernels.get_attention_kernel`), if there is one. It
            computes rows of more than DENSE_LENGTH tokens.
    """
    B, T, N, H = q_BTNH.shape
    assert prefix is None or kernel is None, "kernels do not attend to a shared prefix"
    if kernel is not None and T > DENSE_LENGTH:
        return kernel(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N)

    # A window is equivalent to a start that moves with the position. The prefix has the keys of the
    # window that are not in the position's own sequence.
    if window is not None and window < T:
        if prefix is not None:
            assert start_BT is not None
            num_own_BT = jnp.arange(T, dtype=jnp.int32) - start_BT + 1
            prefix = replace(prefix, start_BT=jnp.maximum(prefix.start_BT, prefix.end_BT - (window - num_own_BT)))
        first_T = jnp.maximum(jnp.arange(T, dtype=jnp.int32) - (window - 1), 0)
        start_BT = jnp.broadcast_to(first_T, (B, T)) if start_BT is None else jnp.maximum(start_BT, first_T)

    K = k_BTKH.shape[2]
    q_BKGTH = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
    k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    attend = dense_attention if T <= DENSE_LENGTH else flash_attention
    out_BKGTH = attend(q_BKGTH, k_BKTH, v_BKTH, start_BT, _group_sinks(sinks_N, K), prefix=prefix)
    return jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, v_BTKH.shape[3])


def dense_attention(
    q_BKGTH: jax.Array,
    k_BKUH: jax.Array,
    v_BKUH: jax.Array,
    start_BT: jax.Array | None = None,
    sinks_KG: jax.Array | None = None,
    *,
    prefix: KeyRange | None = None,
) -> jax.Array:
    """Compute the same as `flash_attention`, from all scores at once."""
    scores = _compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, k_BKUH)
    visible_BTU = jnp.tri(q_BKGTH.shape[3], dtype=jnp.bool_)[None]
    if start_BT is not None:
        visible_BTU &= jnp.arange(k_BKUH.shape[2]) >= start_BT[:, :, None]
    if prefix is not None:
        visible_BTU |= prefix.includes(jnp.arange(k_BKUH.shape[2]))
    scores = jnp.where(visible_BTU[:, None, None], scores, -jnp.inf)
    if sinks_KG is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = jnp.broadcast_to(jax.lax.stop_gradient(sinks_KG)[:, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bkgtu,bkuh->bkgth", weights.astype(v_BKUH.dtype), v_BKUH, preferred_element_type=jnp.float32)


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
    carry = make_empty_stats(q_BKGTH, H, _group_sinks(sinks_N, K))
    if kernel is None:
        carry = _add_past(carry, q_BKGTH, past, start_B, position_BT, window)
    else:
        carry = merge_stats(carry, kernel(q_BKGTH, past, start_B, position_BT[:, 0]))

    scores = jnp.where(seen_TU, _compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, new.k), MASKED_SCORE)
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
            lambda x: x[:, :, :, 0], make_empty_stats(q_SKGH[:, :, :, None], H, _group_sinks(sinks_N, K))
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
            visible_BTU[:, None, None], _compute_scores("bkgth,bkuh->bkgtu", q_BKGTH, block.k), MASKED_SCORE
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
    scored = [(jnp.where(seen_T, _compute_scores("skgh,skth->skgt", q_SKGH, recent.k), -jnp.inf), recent.values)]
    first = 0
    for segment in past:
        seen_SC = first + jnp.arange(segment.values.shape[2]) < start_S[:, None]
        if window is not None:
            seen_SC &= first + jnp.arange(segment.values.shape[2]) >= start_S[:, None] + num_recent - window
        scores = _compute_scores("skgh,skch->skgc" if segment.v is None else "skgh,skhc->skgc", q_SKGH, segment.k)
        scored.append((jnp.where(seen_SC[:, None, None], scores, -jnp.inf), segment.values))
        first += segment.values.shape[2]

    # Softmax over all of them.
    highest = reduce(jnp.maximum, [scores.max(-1, keepdims=True) for scores, _ in scored])
    out, total = jnp.float32(0), jnp.float32(0)
    if (sinks_KG := _group_sinks(sinks_N, K)) is not None:
        highest = jnp.maximum(highest, sinks_KG[:, :, None])
        total = jnp.exp(sinks_KG[:, :, None] - highest)
    for scores, v in scored:
        weights = exp_unfused(scores - highest)  # exp gives the same bits for any number of slots
        out += jnp.einsum("skgc,skch->skgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total += sum_last_dim(weights)[..., None]
    return (out / total).reshape(S, N, H)


def _group_sinks(sinks_N: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    return None if sinks_N is None else sinks_N.reshape(num_kv_heads, -1)


def _compute_scores(equation: str, q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jnp.einsum(equation, q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return scores / math.sqrt(q.shape[-1])
