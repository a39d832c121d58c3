"""The jitted half of sampling: prefill a prompt, insert its keys into slots, decode a slice. The host half: sampler.py.

Legend: S decode slots, T prompt positions (a bucket), M first tokens, N steps of a slice, D embed, V vocab, K top-k.

Shapes depend on the config and two buckets: the prompt's length, and how much of the cache is read. All else is data.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax.sampling import Drawn, DrawParams, draw
from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig


@struct.dataclass
class SliceRows:
    """What each slot does in one slice; free slots run too, at position 0 of their own."""

    token_S: jax.Array  # int32: drawn, and not yet in the cache
    position_S: jax.Array  # int32: where it goes in the cache
    num_drawn_S: jax.Array  # int32: tokens of the sample so far
    adapter_G: jax.Array  # int32: place in the sampler pool, of each tile of neighbouring slots, or of each slot
    draws: DrawParams
    wants_topk: jax.Array  # bool scalar


def take_adapter(pool: Adapter | None, slot: jax.Array) -> Adapter | None:
    """Return one adapter of the pool, to be shared by all rows; None of None: the base model."""
    return None if pool is None else jax.tree.map(lambda leaf: leaf[slot], pool)


@partial(jax.jit, static_argnames="config")
def prefill(
    params: DecoderParams, config: ModelConfig, pool: Adapter | None, slot: jax.Array, token_T: jax.Array
) -> tuple[jax.Array, KeyValues]:
    """Run one prompt, padded at its right: hidden states [T, D], keys and values [L, 1, K, T, H]."""
    hidden_1TD, keys = models.prefill(params, config, token_T[None], take_adapter(pool, slot))
    return hidden_1TD[0], keys


@partial(jax.jit, static_argnames="max_topk")
def draw_first(
    params: DecoderParams,
    pool: Adapter | None,
    slot: jax.Array,
    hidden_TD: jax.Array,
    last: jax.Array,
    draws: DrawParams,
    wants_topk: jax.Array,
    *,
    max_topk: int,
) -> Drawn:
    """Draw the first token of M samples of one prompt, whose last position is `last`."""
    hidden_1D = jax.lax.dynamic_slice_in_dim(hidden_TD, last, 1)
    logits_1V = models.logits(params, hidden_1D, take_adapter(pool, slot))
    M = draws.index_S.shape[0]
    logits_MV = jnp.broadcast_to(logits_1V, (M, logits_1V.shape[1]))
    return draw(logits_MV, draws, jnp.zeros(M, jnp.int32), max_topk=max_topk, wants_topk=wants_topk)


@partial(jax.jit, donate_argnames="cache")
def insert(cache: KeyValues, prefilled: KeyValues, slot_S: jax.Array, count: jax.Array) -> KeyValues:
    """Copy one prompt's keys and values into the first `count` of these slots, one at a time: no second cache."""
    row_1 = jnp.zeros(1, jnp.int32)

    def one(i: jax.Array, cache: KeyValues) -> KeyValues:
        return kv_cache.insert(cache, prefilled, row_1, jax.lax.dynamic_slice_in_dim(slot_S, i, 1))

    return jax.lax.fori_loop(0, count, one, cache)


@partial(jax.jit, static_argnames=("config", "bucket", "length", "max_topk"), donate_argnames="cache")
def decode_slice(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    cache: KeyValues,
    rows: SliceRows,
    num_steps: jax.Array,
    *,
    bucket: int,
    length: int,
    max_topk: int,
) -> tuple[KeyValues, Drawn]:
    """Run `num_steps` <= `length` steps of every slot; the result's leaves have a leading N, filled up to there.

    `bucket` must be at least `position + num_steps - 1` of every row that counts, or the cache's length. A row that
    goes on past its own end, or the cache's, harms none but itself.
    """

    def step(n: jax.Array, carry: tuple[KeyValues, jax.Array, Drawn]) -> tuple[KeyValues, jax.Array, Drawn]:
        cache, token_S, kept = carry
        hidden_SD, cache = models.decode_step(
            params, config, token_S, rows.position_S + n, cache, pool, rows.adapter_G, bucket=bucket
        )
        logits_SV = models.logits(params, hidden_SD, pool, rows.adapter_G)
        drawn = draw(logits_SV, rows.draws, rows.num_drawn_S + n, max_topk=max_topk, wants_topk=rows.wants_topk)
        return cache, drawn.token_S, jax.tree.map(lambda into, leaf: into.at[n].set(leaf), kept, drawn)

    S, K = rows.token_S.shape[0], min(max_topk, config.vocab_size)
    kept = Drawn(
        token_S=jnp.zeros((length, S), jnp.int32),
        logprob_S=jnp.zeros((length, S), jnp.float32),
        topk_token_SK=jnp.zeros((length, S, K), jnp.int32),
        topk_logprob_SK=jnp.zeros((length, S, K), jnp.float32),
    )
    cache, _, kept = jax.lax.fori_loop(0, num_steps, step, (cache, rows.token_S, kept))
    return cache, kept
