"""Causal attention with grouped heads, over whole rows and over a cache.

Legend: B batch, T query and U key tokens, N heads, K kv heads, G query heads per kv head (N = K * G), H head dim,
S decode slots, C cache positions.
"""

import math
from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from skyrl_tx.layers.flash_attention import LOWEST, Stats, flash_attention
from skyrl_tx.layers.kv_cache import KeyValues

DENSE_LENGTH = 64
"""Up to this many tokens all scores are held at once; beyond, blocks are faster and their memory grows as T only."""

PAST_BLOCK = 256
"""Keys of a block of what came before a chunk."""


def causal_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, start_BT: jax.Array | None = None
) -> jax.Array:
    """Return attention of each position over itself and what came before it, float32 [B, T, N, H].

    With `start_BT`, ascending along T, a position sees nothing before its start: a row may hold several sequences,
    one behind the other. Needs no padding mask: a row is padded at its right, where no real position looks.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BKGTH = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
    k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    attend = dense_attention if T <= DENSE_LENGTH else flash_attention
    out_BKGTH = attend(q_BKGTH, k_BKTH, v_BKTH, start_BT)
    return jnp.transpose(out_BKGTH, (0, 3, 1, 2, 4)).reshape(B, T, N, H)


def dense_attention(
    q_BKGTH: jax.Array, k_BKUH: jax.Array, v_BKUH: jax.Array, start_BT: jax.Array | None = None
) -> jax.Array:
    """Return what `flash_attention` returns, from all scores at once."""
    scores = _scores("bkgth,bkuh->bkgtu", q_BKGTH, k_BKUH)
    visible_BTU = jnp.tri(q_BKGTH.shape[3], dtype=jnp.bool_)[None]
    if start_BT is not None:
        visible_BTU &= jnp.arange(k_BKUH.shape[2]) >= start_BT[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible_BTU[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgtu,bkuh->bkgth", weights.astype(v_BKUH.dtype), v_BKUH, preferred_element_type=jnp.float32)


def extending_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, past: KeyValues, layer: jax.Array, start: jax.Array
) -> jax.Array:
    """Return attention of the positions from `start` on over themselves and what came before, float32 [B, T, N, H].

    `past` is all layers' [L, B, K, C, H], of which positions < `start` are seen; their own keys and values come beside
    it. The past is read in blocks, as many as there are: time follows `start`, not C, and nothing of it is copied.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BKGTH = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, H), (0, 2, 3, 1, 4))
    size = math.gcd(past.k.shape[3], PAST_BLOCK)

    def fold(carry: Stats, k_BKUH: jax.Array, v_BKUH: jax.Array, visible_TU: jax.Array) -> Stats:
        highest, total, out = carry
        scores = jnp.where(visible_TU, _scores("bkgth,bkuh->bkgtu", q_BKGTH, k_BKUH), LOWEST)
        higher = jnp.maximum(highest, scores.max(-1))
        weights, rescale = jnp.exp(scores - higher[..., None]), jnp.exp(highest - higher)
        added = jnp.einsum(
            "bkgtu,bkuh->bkgth", weights.astype(v_BKUH.dtype), v_BKUH, preferred_element_type=jnp.float32
        )
        return higher, total * rescale + weights.sum(-1), out * rescale[..., None] + added

    def past_block(j: jax.Array, carry: Stats) -> Stats:
        k_BKUH, v_BKUH = (
            jax.lax.dynamic_slice(x, (layer, 0, 0, j * size, 0), (1, B, K, size, H))[0] for x in (past.k, past.v)
        )
        seen_U = j * size + jnp.arange(size) < start
        # What was never written may be anything, and 0 * NaN is NaN.
        return fold(carry, k_BKUH, jnp.where(seen_U[:, None], v_BKUH, 0), seen_U[None])

    zeros = jnp.zeros(q_BKGTH.shape, jnp.float32)
    carry = (jnp.full(zeros.shape[:-1], LOWEST), zeros[..., 0], zeros)
    carry = jax.lax.fori_loop(0, (start + size - 1) // size, past_block, carry)
    k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    _, total, out = fold(carry, k_BKTH, v_BKTH, jnp.tri(T, dtype=jnp.bool_))
    return jnp.transpose(out / total[..., None], (0, 3, 1, 2, 4)).reshape(B, T, N, H)


def cached_attention(
    q_SNH: jax.Array, past: Sequence[KeyValues], recent: KeyValues, start_S: jax.Array, num_recent: jax.Array
) -> jax.Array:
    """Return attention of one new token per slot over its cached past and what came since, [S, N, H].

    All is of one layer. The past lies in segments, one behind the other, values [S, K, C, H] and keys [S, K, H, C];
    slot s may see positions < `start_S[s]`. Of `recent` [S, K, T, H] every slot may see the first `num_recent`, the
    new token among them. Segments that a slot does not see change none of its bits.
    """
    S, N, H = q_SNH.shape
    K = recent.k.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    seen_T = jnp.arange(recent.v.shape[2]) < num_recent
    scored = [(jnp.where(seen_T, _scores("skgh,skth->skgt", q_SKGH, recent.k), -jnp.inf), recent.v)]
    first = 0
    for segment in past:
        seen_SC = first + jnp.arange(segment.v.shape[2]) < start_S[:, None]
        scores = _scores("skgh,skhc->skgc", q_SKGH, segment.k)
        scored.append((jnp.where(seen_SC[:, None, None], scores, -jnp.inf), segment.v))
        first += segment.v.shape[2]
    highest = reduce(jnp.maximum, [scores.max(-1, keepdims=True) for scores, _ in scored])
    out, total = jnp.float32(0), jnp.float32(0)
    for scores, v in scored:
        weights = jnp.exp(scores - highest)
        out += jnp.einsum("skgc,skch->skgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total += weights.sum(-1, keepdims=True)
    return (out / total).reshape(S, N, H)


def _scores(equation: str, q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jnp.einsum(equation, q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return scores / math.sqrt(q.shape[-1])
