"""The transformer decoder that all model families share.

Differences between families are data in `ModelConfig`.

`forward` runs whole sequences for training, `prefill` runs a chunk of prompts, and `decode_step`
runs one new token per row. All three call `run_layers` with their own `LayerMode` (see `layer_loop`).
`skyrl_tx.models.family` lists the functions that the backend calls, with their shapes.

Legend: B batch, T tokens, D embed, V vocab, M pages of a row, S rows of a decode step.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.layers import logprobs
from skyrl_tx.layers.attention import KeyRange, find_positions
from skyrl_tx.layers.cache_state import (
    BlockTable,
    Cache,
    DecodeSliceCache,
    LayerCache,
    PrefillLayerCache,
    get_position_axes,
    read_states,
    unstack_layers,
    write_cache,
)
from skyrl_tx.layers.kv_cache import Pages
from skyrl_tx.layers.lora import Adapter, LoraPair, RowAdapter, RowSlots, select_rows
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.adapters import GroupAdapters, SplitAdapter
from skyrl_tx.models.config import Block, DecoderParams, ModelConfig
from skyrl_tx.models.layer_loop import LayerMode, constrain_hidden, run_layers
from skyrl_tx.models.parts.base import Layer, LayerContext, Mixer


def forward(
    params: DecoderParams,
    config: ModelConfig,
    inputs: jax.Array,
    adapter: Adapter | SplitAdapter | None = None,
    slots: RowSlots | None = None,
    *,
    start_BT: jax.Array | None = None,
    position_BT: jax.Array | None = None,
    remat: RematPolicy = RematPolicy.SAVE_MATMULS,
) -> jax.Array:
    """Return the hidden states after the final norm, float32 [B, T, D], of right-padded rows.

    Args:
        params: the base weights.
        config: the model's configuration.
        inputs: tokens [B, T], or embeddings [B, T, D].
        adapter: one adapter for all rows, or a pool of adapters with `slots`; None is the base
            model. A `SplitAdapter` is one adapter whose stacked arrays are split by group of layers,
            as the sums of its gradients are.
        slots: the adapter slot of each row.
        start_BT: `start_BT[b, t]` is the index in row b at which the sequence of token t begins.
            Needed if a row contains multiple sequences.
        position_BT: RoPE positions. By default each token has its index within its sequence.
        remat: the activation checkpointing of each layer.
    """
    arguments = params, config, inputs, adapter, slots
    return forward_and_count(*arguments, start_BT=start_BT, position_BT=position_BT, remat=remat)[0]


def forward_and_count(
    params: DecoderParams,
    config: ModelConfig,
    inputs: jax.Array,
    adapter: Adapter | SplitAdapter | None = None,
    slots: RowSlots | None = None,
    *,
    num_uses_BT: jax.Array | None = None,
    start_BT: jax.Array | None = None,
    prefix: KeyRange | None = None,
    position_BT: jax.Array | None = None,
    remat: RematPolicy = RematPolicy.SAVE_MATMULS,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the hidden states of `forward`, and how many tokens each expert received.

    The counts are an array int32 [layers, E] for each stack of layers with experts. `num_uses_BT` says
    how many sequences use a position: 0 for padding, and more than 1 in a shared prefix. Without it
    nothing is counted. With `prefix`, each position also attends to the given range of earlier
    positions in its row: the prefix that multiple sequences share.
    """
    if position_BT is None:
        position_BT = find_positions(inputs.shape[1], start_BT, prefix)
    prepared = {mixer: mixer.prepare(start_BT, prefix) for mixer in config.mixers}
    rows: Any = {"start_BT": start_BT, "num_uses_BT": num_uses_BT, "prefix": prefix}
    context = replace(_make_context(params, config, position_BT), prepared=prepared, **rows)

    def mix_rows(mixer: Mixer, x_BTD: jax.Array, layer: Layer, _: Any) -> tuple[jax.Array, None]:
        return mixer.forward(x_BTD, layer), None

    # On a single device, a layer may multiply its input by the weight and by LoRA's A at once.
    adapters = GroupAdapters.from_adapter(config, adapter, slots, may_concatenate=not context.layout.is_sharded)
    mode = LayerMode(config, context, mix_rows, remat)
    x_BTD, counts = run_layers(mode, _embed_inputs(params, config, inputs), params, adapters)
    counts = tuple(context.layout.constrain(x, None, None) for x in counts if isinstance(x, jax.Array))
    return _apply_final_norm(params, config, x_BTD), counts


def prefill(
    params: DecoderParams,
    config: ModelConfig,
    inputs: jax.Array,
    start: jax.Array,
    cache: Cache,
    table: BlockTable,
    adapter: Adapter | None = None,
    slots: RowSlots | None = None,
    *,
    size: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Prefill one chunk of prompts. Returns its hidden states [B, T, D] and the updated cache.

    The chunk begins at position `start` and attends to the cached part of each prompt. The cache
    receives the chunk's keys and values, and the states of recurrent layers.

    Args:
        params: the base weights.
        config: the model's configuration.
        inputs: tokens [B, T], or embeddings [B, T, D].
        start: position of the first token, a scalar or one number per row [B].
        cache: keys, values and states of all prompts.
        table: the indices of each row's pages and states in the cache.
        adapter: as in `forward`.
        slots: as in `forward`.
        size: number of tokens before the padding, a scalar or [B]; None means no padding.
    """
    position_T = start[..., None] + jnp.arange(inputs.shape[1])
    context = replace(_make_context(params, config, position_T), size=size)

    def mix_chunk(mixer: Mixer, x_BTD: jax.Array, layer: Layer, layer_cache: Any) -> tuple[jax.Array, LayerCache]:
        return mixer.prefill(x_BTD, layer, layer_cache)

    def get_layer_cache(stack: int, layer: Any, state: Any) -> PrefillLayerCache:
        return PrefillLayerCache(Pages(cache[stack].positions, layer, table.page_BM), state, start)

    mode = LayerMode(config, context, mix_chunk, RematPolicy.NONE, get_layer_cache)
    adapters = GroupAdapters.from_adapter(config, adapter, slots)
    states, (num_rows, num_tokens) = read_states(cache, table, context.layout), inputs.shape[:2]
    if params.has_separate_layers:
        states = tuple(map(unstack_layers, states))
    x_BTD, new_entries = run_layers(mode, _embed_inputs(params, config, inputs), params, adapters, states)

    # Write the new keys, values and states of the chunk.
    num_new = jnp.int32(num_tokens) if size is None else size
    start_B = jnp.broadcast_to(start, (num_rows,))
    updated_cache = write_cache(cache, new_entries, table, start_B, num_new, context.layout)
    return _apply_final_norm(params, config, x_BTD), constrain_cache(context.layout, config, updated_cache)


def decode_step(
    params: DecoderParams,
    config: ModelConfig,
    token_S: jax.Array,
    cache: DecodeSliceCache,
    adapter: Adapter | None = None,
    slots: RowSlots | None = None,
    *,
    position_S: jax.Array | None = None,
) -> tuple[jax.Array, DecodeSliceCache]:
    """Run one token per row: return hidden states [S, D] and the cache with the token appended.

    Row s attends to its cached tokens and to the new token. `position_S` are RoPE positions; by
    default each token has its index in the sequence. If the stacks of `cache.live` are tuples of
    separate layers, `params` must have separate layers too.
    """
    context = _make_context(params, config, cache.start_S + cache.num_recent if position_S is None else position_S)

    def mix_token(mixer: Mixer, x_SD: jax.Array, layer: Layer, layer_cache: Any) -> tuple[jax.Array, LayerCache]:
        return mixer.decode(x_SD, layer, layer_cache)

    mode = LayerMode(config, context, mix_token, RematPolicy.NONE, cache.get_layer)
    adapters = GroupAdapters.from_adapter(config, adapter, slots)
    # The states of recurrent layers. They are called `fixed`, because their size does not grow.
    states = tuple(
        tuple(layer.fixed for layer in stack) if isinstance(stack, tuple) else stack.fixed for stack in cache.live
    )
    x_SD, live = run_layers(mode, _embed_inputs(params, config, token_S), params, adapters, states)
    hidden_SD = rms_norm(x_SD, params.final_norm, config.norm_epsilon)
    if context.layout.is_sharded:
        live = constrain_cache(context.layout, config, live)
    return hidden_SD, replace(cache, live=live, num_recent=cache.num_recent + 1)


def embed(params: DecoderParams, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Return the embeddings of tokens, float32 [B, ..., D].

    Each device looks up its part of D for all rows, and then the devices exchange the results. This
    way the embedding table is not moved.
    """
    x = params.embed[tokens].astype(jnp.float32)
    # The factor is rounded to the type of the weights, as in the published models. For example, with
    # hidden size 3072 it is 55.5 in bfloat16 instead of 55.43.
    if config.scales_embeddings:
        x = x * np.float32(np.float32(math.sqrt(config.hidden_size)).astype(params.embed.dtype))

    # Exchange in two steps: first from shards of D to shards of the rows. Then `constrain_hidden` splits
    # the rows among the devices of an expert group (mesh axis `ep`), too.
    between = [None] * (x.ndim - 2)
    x = params.layout.constrain(x, None, *between, "embed")
    if not params.layout.shards_rows:
        x = params.layout.constrain(x, "expert_batch", *between, None)
    return constrain_hidden(params.layout, x)


def _embed_inputs(params: DecoderParams, config: ModelConfig, inputs: jax.Array) -> jax.Array:
    return embed(params, config, inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs.astype(jnp.float32)


def _apply_final_norm(params: DecoderParams, config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    return constrain_hidden(params.layout, rms_norm(x_BTD, params.final_norm, config.norm_epsilon))


def _make_context(params: DecoderParams, config: ModelConfig, position: jax.Array) -> LayerContext:
    """Return the context that all layers share: layout, kernels, and the angles of every RoPE."""
    rotations = dict.fromkeys(mixer.rotation for mixer in config.mixers if mixer.rotation is not None)
    angles = {(rope, num_dims): rope.compute_angles(position, num_dims) for rope, num_dims in rotations}
    return LayerContext(params.layout, angles, kernels=params.kernels)


def constrain_cache(
    layout: Layout, config: ModelConfig, cache: tuple[LayerCache | tuple[LayerCache, ...], ...]
) -> tuple[Any, ...]:
    """Apply the sharding of the cache to a whole cache, or to entries that decode steps have added.

    Each entry of `cache` is a stack of layers, or a tuple of separate layers.
    """

    def constrain_positions(leaf: jax.Array, parameter: Parameter) -> jax.Array:
        return layout.constrain(leaf, *get_position_axes(parameter)[-leaf.ndim :])

    def constrain_fixed(leaf: jax.Array, parameter: Parameter) -> jax.Array:
        return layout.constrain(leaf, *("layers", "batch", *parameter.axes)[-leaf.ndim :])

    def constrain_layer(block: Block, layer: LayerCache) -> LayerCache:
        spec = block.describe_cache()
        return LayerCache(
            positions=jax.tree.map(constrain_positions, layer.positions, spec.positions),
            fixed=jax.tree.map(constrain_fixed, layer.fixed, spec.fixed),
        )

    return tuple(
        tuple(constrain_layer(stack.block, layer) for layer in layers)
        if isinstance(layers, tuple)
        else constrain_layer(stack.block, layers)
        for stack, layers in zip(config.stacks, cache, strict=True)
    )


def logits(
    params: DecoderParams, hidden: jax.Array, adapter: Adapter | None = None, slots: RowSlots | None = None
) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D].

    `slots` has one adapter slot per row of B.
    """
    y = logprobs.logits(hidden, params.unembed_VD, select_unembed_adapter(adapter, slots))
    layout, between = params.layout, [None] * (y.ndim - 2)
    # Each device computes its part of the vocabulary. Otherwise XLA would send the unembedding to
    # all devices instead of the logits.
    y = layout.constrain(y, "batch", *between, "vocab")
    return layout.constrain(y, "batch", *between, None)  # drawing sorts and sums whole rows


def target_logprobs(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter | None = None,
    slots: RowSlots | None = None,
) -> jax.Array:
    """Return log p(target), float32, in the shape of `targets`, which is [B, T] or [B, T, K].

    Logits are computed in chunks, so an array [B, T, V] never exists.
    """
    row_adapter, layout = select_unembed_adapter(adapter, slots), params.layout
    # With context parallelism, a row lies on multiple devices. Treat each device's part as a separate row:
    # otherwise only one device would work on a chunk of tokens.
    hidden, split_targets = (layout.split_shards(x) for x in (hidden_BTD, targets))
    chunk = logprobs.CHUNK_POSITIONS * layout.num_shards("tokens")
    result = logprobs.target_logprobs(hidden, _gather_unembedding(params), split_targets, row_adapter, chunk=chunk)
    return layout.merge_shards(result, targets.shape[0])


def loss_and_gradient(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter,
    loss: logprobs.PositionLoss,
    inputs: Any,
    total: LoraPair,
) -> tuple[Any, jax.Array, LoraPair]:
    """Return the outputs of `loss`, d loss / d hidden, and the new gradient sum of the adapter.

    The new sum is `total` plus the gradient of the LoRA factors of the unembedding. `loss` and `inputs` are
    passed to `layers.logprobs.loss_and_gradient`.
    """
    row_adapter, layout = RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale), params.layout
    hidden, split_targets, inputs = jax.tree.map(layout.split_shards, (hidden_BTD, targets, inputs))
    chunk = logprobs.CHUNK_POSITIONS * layout.num_shards("tokens")
    *by_row, total = logprobs.loss_and_gradient(
        hidden, _gather_unembedding(params), split_targets, row_adapter, loss, inputs, total, chunk=chunk
    )
    outputs, d_hidden_BTD = jax.tree.map(partial(layout.merge_shards, num_rows=targets.shape[0]), by_row)
    return outputs, d_hidden_BTD, total


def _gather_unembedding(params: DecoderParams) -> jax.Array:
    """All-gather the sharded D of the unembedding on GPUs.

    XLA would otherwise gather it once per chunk. On TPUs the unembedding stays sharded: XLA
    exchanges parts of it while it computes, which takes less memory.
    """
    layout, unembed_VD = params.layout, params.unembed_VD
    if layout.num_shards("embed") == 1:
        return unembed_VD
    return jax.lax.platform_dependent(
        unembed_VD, cuda=lambda x: layout.constrain(x, "vocab", None), default=lambda x: x
    )


def select_unembed_adapter(adapter: Adapter | None, slots: RowSlots | None) -> RowAdapter | None:
    """Return the adapter of the unembedding for each row."""
    if adapter is None:
        return None
    if adapter.scale.ndim == 0:
        return RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    return select_rows(adapter, "unembed", slots, layer=None)
