"""Causal attention with grouped heads, over whole rows and over a cache.

Legend: B batch, T query and U key tokens, N heads, K kv heads, G query heads per kv head (N = K * G), H head dim,
S decode slots, C cache positions.
"""

import math

import jax
import jax.numpy as jnp

from skyrl_tx.layers.flash_attention import flash_attention
from skyrl_tx.layers.kv_cache import KeyValues

DENSE_LENGTH = 64
"""Up to this many tokens all scores are held at once; beyond, blocks are faster and their memory grows as T only."""


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


def cached_attention(
    q_SNH: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array, cache: KeyValues, position_S: jax.Array
) -> jax.Array:
    """Return attention of one new token per slot over its cached past and itself, [S, N, H].

    `cache` is one layer's [S, K, C, H]; of it slot s may see positions < `position_S[s]`. The new token's own key and
    value come beside it: so the cache is only read here, and all layers are written at once afterwards.
    """
    S, N, H = q_SNH.shape
    K = k_SKH.shape[1]
    q_SKGH = q_SNH.reshape(S, K, N // K, H)
    past = _scores("skgh,skch->skgc", q_SKGH, cache.k)
    visible_SC = jnp.arange(cache.k.shape[2]) < position_S[:, None]
    past = jnp.where(visible_SC[:, None, None, :], past, -jnp.inf)
    own = _scores("skgh,skh->skg", q_SKGH, k_SKH.astype(cache.k.dtype))[..., None]
    weights = jax.nn.softmax(jnp.concatenate([past, own], axis=-1), axis=-1)
    dtype = cache.v.dtype
    out = jnp.einsum("skgc,skch->skgh", weights[..., :-1].astype(dtype), cache.v, preferred_element_type=jnp.float32)
    out = out + weights[..., -1:] * v_SKH[:, :, None, :].astype(dtype).astype(jnp.float32)
    return out.reshape(S, N, H)


def _scores(equation: str, q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jnp.einsum(equation, q.astype(k.dtype), k, preferred_element_type=jnp.float32)
    return scores / math.sqrt(q.shape[-1])
