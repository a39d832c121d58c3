"""The jitted half of sampling: extend a prompt by a chunk, insert it into slots, decode a slice. The host: sampler.py.

Legend: S decode slots, T tokens of a chunk, M first tokens, N steps of a slice, D embed, V vocab, K top-k.

Shapes depend on the config and a few sizes: of a chunk, of a prompt's room, and of what is read of the cache. All else
is data.
"""

from dataclasses import replace
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

Recent = KeyValues | tuple[KeyValues, ...]


@struct.dataclass
class SliceRows:
    """What each slot does in one slice; free slots run too, at position 0 of their own."""

    token_S: jax.Array  # int32: drawn, and not yet in the cache
    position_S: jax.Array  # int32: where it goes in the cache
    num_drawn_S: jax.Array  # int32: tokens of the sample so far
    adapter_G: jax.Array  # int32: place in the sampler pool, of each tile of neighbouring slots, or of each slot
    draws: DrawParams
    wants_topk: jax.Array  # bool scalar


def take_adapter(pool: Adapter | None, place: jax.Array) -> Adapter | None:
    """Return one adapter of the pool, to be shared by all rows; None of None: the base model."""
    return None if pool is None else jax.tree.map(lambda leaf: leaf[place], pool)


by_layer = jax.jit(models.by_layer, static_argnames="config")


@partial(jax.jit, static_argnames="config", donate_argnames="keys")
def extend(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    place: jax.Array,
    token_T: jax.Array,
    start: jax.Array,
    last: jax.Array,
    keys: KeyValues,
) -> tuple[jax.Array, jax.Array, KeyValues]:
    """Run a chunk of one prompt, padded at its right, after the `start` tokens that have keys [L, 1, K, C, H].

    Return its hidden states [T, D], that at `last` alone [1, D], and the keys with its own.
    """
    hidden_1TD, keys = models.extend(params, config, token_T[None], start, keys, take_adapter(pool, place))
    return hidden_1TD[0], jax.lax.dynamic_slice_in_dim(hidden_1TD[0], last, 1), keys


@partial(jax.jit, static_argnames="room")
def copy_prompt(keys: KeyValues, *, room: int) -> KeyValues:
    """Return a copy of `room` positions, so that others may go on from what a prompt begins with."""

    def copy(leaf: jax.Array) -> jax.Array:
        kept = leaf[:, :, :, :room]
        return jnp.pad(kept, ((0, 0), (0, 0), (0, 0), (0, room - kept.shape[3]), (0, 0)))

    return jax.tree.map(copy, keys)


@partial(jax.jit, static_argnames="max_topk")
def draw_first(
    params: DecoderParams,
    pool: Adapter | None,
    place: jax.Array,
    last_1D: jax.Array,
    draws: DrawParams,
    wants_topk: jax.Array,
    *,
    max_topk: int,
) -> Drawn:
    """Draw the first token of M samples of one prompt from its last hidden state."""
    logits_1V = models.logits(params, last_1D, take_adapter(pool, place))
    M = draws.index_S.shape[0]
    logits_MV = jnp.broadcast_to(logits_1V, (M, logits_1V.shape[1]))
    return draw(logits_MV, draws, jnp.zeros(M, jnp.int32), max_topk=max_topk, wants_topk=wants_topk)


@partial(jax.jit, donate_argnames="cache")
def insert(cache: KeyValues, prompt: KeyValues, size: jax.Array, slot_S: jax.Array, count: jax.Array) -> KeyValues:
    """Copy one prompt of `size` tokens into the first `count` of these slots, one at a time: no second cache."""

    def one(i: jax.Array, cache: KeyValues) -> KeyValues:
        return kv_cache.insert(cache, prompt, size, jnp.int32(0), slot_S[i])

    return jax.lax.fori_loop(0, count, one, cache)


@partial(jax.jit, static_argnames="size")
def take_piece(cache: KeyValues, slot: jax.Array, start: jax.Array, *, size: int) -> KeyValues:
    """Return a copy of one slot's keys and values [L, 1, K, T, H] of `size` positions, all of which it must have."""

    def take(leaf: jax.Array) -> jax.Array:
        num_layers, _, num_kv_heads, _, head_dim = leaf.shape
        return jax.lax.dynamic_slice(leaf, (0, slot, 0, start, 0), (num_layers, 1, num_kv_heads, size, head_dim))

    return jax.tree.map(take, cache)


@partial(jax.jit, donate_argnames="cache")
def put_piece(cache: KeyValues, piece: KeyValues, slot: jax.Array, start: jax.Array) -> KeyValues:
    """Write what `take_piece` returned into a slot."""
    return jax.tree.map(
        lambda into, leaf: jax.lax.dynamic_update_slice(into, leaf, (0, slot, 0, start, 0)), cache, piece
    )


@partial(jax.jit, static_argnames=("config", "stretch", "length", "max_topk"), donate_argnames="cache")
def decode_slice(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    cache: KeyValues,
    rows: SliceRows,
    num_steps: jax.Array,
    *,
    stretch: int,
    length: int,
    max_topk: int,
) -> tuple[KeyValues, Drawn]:
    """Run `num_steps` <= `length` steps of every slot; the result's leaves have a leading N, filled up to there.

    `stretch` must be at least the `position` of every row that counts. A row that goes on past its own end, or the
    cache's, harms none but itself. With each layer of `params` by itself, the stretch of the cache is taken apart too,
    once for all steps instead of in each: a larger program and more memory, but on CPU much less copying.
    """
    are_apart = isinstance(params.layers, tuple)
    opened = kv_cache.open_slice(cache, rows.position_S, stretch=stretch, max_tokens=length, by_layer=are_apart)

    def step(n: jax.Array, carry: tuple[Recent, jax.Array, Drawn]) -> tuple[Recent, jax.Array, Drawn]:
        recent, token_S, kept = carry
        now = replace(opened, recent=recent, num_recent=n)
        hidden_SD, now = models.decode_step(params, config, token_S, now, pool, rows.adapter_G)
        logits_SV = models.logits(params, hidden_SD, pool, rows.adapter_G)
        drawn = draw(logits_SV, rows.draws, rows.num_drawn_S + n, max_topk=max_topk, wants_topk=rows.wants_topk)
        return now.recent, drawn.token_S, jax.tree.map(lambda into, leaf: into.at[n].set(leaf), kept, drawn)

    S, K = rows.token_S.shape[0], min(max_topk, config.vocab_size)
    kept = Drawn(
        token_S=jnp.zeros((length, S), jnp.int32),
        logprob_S=jnp.zeros((length, S), jnp.float32),
        topk_token_SK=jnp.zeros((length, S, K), jnp.int32),
        topk_logprob_SK=jnp.zeros((length, S, K), jnp.float32),
    )
    recent, _, kept = jax.lax.fori_loop(0, num_steps, step, (opened.recent, rows.token_S, kept))
    cache = kv_cache.close_slice(cache, replace(opened, recent=recent, num_recent=num_steps))
    return jax.tree.map(lambda leaf: params.layout.constrain(leaf, *kv_cache.AXES), cache), kept
