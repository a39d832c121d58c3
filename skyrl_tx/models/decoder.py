"""The transformer decoder that all model families share.

Differences between families are data in `ModelConfig`.

`forward` runs whole sequences for training, `prefill` runs a chunk of prompts, and `decode_step`
runs one new token per row. All three call `_run_layers` with their own `_LayerMode`.
`skyrl_tx.models.family` lists the functions that the backend calls, with their shapes.

A group of layers repeats a cycle of blocks, for example three delta nets and one attention. The
layers at the same place in the cycle form a stack: here a group has four stacks. See `config.Group`.

Legend: B batch, T tokens, D embed, V vocab, M pages of a row, S rows of a decode step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.layers import logprobs
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
from skyrl_tx.layers.flash_attention import KeyRange, find_positions
from skyrl_tx.layers.kv_cache import Pages
from skyrl_tx.layers.lora import Adapter, LoraPair, RowAdapter, RowSlots, select_rows
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.remat import RematPolicy, with_remat
from skyrl_tx.layers.sharding import Layout, gather_weight
from skyrl_tx.layers.stable_bits import add_unfused
from skyrl_tx.models.adapters import CutAdapter, GroupAdapters, GroupPairs
from skyrl_tx.models.config import Block, Group, ModelConfig
from skyrl_tx.models.params import OUTPUT_NORMS, DecoderParams, transpose_layer
from skyrl_tx.models.parts.base import LayerAdapters, LayerContext, LayerParams, Mixer, StackedParam


def forward(
    params: DecoderParams,
    config: ModelConfig,
    inputs: jax.Array,
    adapter: Adapter | CutAdapter | None = None,
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
            model. A `CutAdapter` is one adapter in the layout that gradients are added to.
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
    adapter: Adapter | CutAdapter | None = None,
    slots: RowSlots | None = None,
    *,
    uses_BT: jax.Array | None = None,
    start_BT: jax.Array | None = None,
    prefix: KeyRange | None = None,
    position_BT: jax.Array | None = None,
    remat: RematPolicy = RematPolicy.SAVE_MATMULS,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the hidden states of `forward`, and how many tokens each expert received.

    The second has an array int32 [layers, E] for each stack of layers with experts. It is empty
    without `uses_BT`, which says how often a position counts: 0 for padding, and more than 1 in a
    shared prefix. With `prefix`, sequences continue earlier positions of their row.
    """
    if position_BT is None:
        position_BT = find_positions(inputs.shape[1], start_BT, prefix)
    prepared = {mixer: mixer.prepare(start_BT, prefix) for mixer in config.mixers}
    rows: Any = {"start_BT": start_BT, "uses_BT": uses_BT, "prefix": prefix}
    context = replace(_make_context(params, config, position_BT), prepared=prepared, **rows)

    def mix_rows(mixer: Mixer, x_BTD: jax.Array, params: LayerParams, adapters: LayerAdapters, _: Any):
        return mixer.forward(x_BTD, params, adapters, context), None

    # On a single device, `joins` lets a layer multiply its weight and its adapter in one product.
    adapters = GroupAdapters.from_adapter(config, adapter, slots, joins=not context.layout.is_sharded)
    mode = _LayerMode(config, context, mix_rows, remat)
    x_BTD, counts = _run_layers(mode, _embed_inputs(params, config, inputs), params, adapters)
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
    position_T: jax.Array | None = None,
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
        table: where the cache has the pages and states of each row.
        adapter: as in `forward`.
        slots: as in `forward`.
        size: number of tokens before the padding, a scalar or [B]; None means no padding.
        position_T: RoPE positions, by default counted from `start`.
    """
    if position_T is None:
        position_T = start[..., None] + jnp.arange(inputs.shape[1])
    context = replace(_make_context(params, config, position_T), size=size)

    def mix_chunk(mixer: Mixer, x_BTD: jax.Array, params: LayerParams, adapters: LayerAdapters, layer_cache: Any):
        return mixer.prefill(x_BTD, params, adapters, layer_cache, context)

    def get_layer_cache(stack: int, layer: Any, state: Any) -> PrefillLayerCache:
        return PrefillLayerCache(Pages(cache[stack].positions, layer, table.page_BM), state, start)

    mode = _LayerMode(config, context, mix_chunk, RematPolicy.NONE, get_layer_cache)
    adapters = GroupAdapters.from_adapter(config, adapter, slots)
    states, (num_rows, num_tokens) = read_states(cache, table, context.layout), inputs.shape[:2]
    if params.has_separate_layers:
        states = tuple(map(unstack_layers, states))
    x_BTD, new_entries = _run_layers(mode, _embed_inputs(params, config, inputs), params, adapters, states)

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

    def mix_token(mixer: Mixer, x_SD: jax.Array, params: LayerParams, adapters: LayerAdapters, layer_cache: Any):
        return mixer.decode(x_SD, params, adapters, layer_cache, context)

    mode = _LayerMode(config, context, mix_token, RematPolicy.NONE, cache.get_layer)
    adapters = GroupAdapters.from_adapter(config, adapter, slots)
    # The states of recurrent layers. They are called `fixed`, because their size does not grow.
    states = tuple(
        tuple(layer.fixed for layer in stack) if isinstance(stack, tuple) else stack.fixed for stack in cache.live
    )
    x_SD, live = _run_layers(mode, _embed_inputs(params, config, token_S), params, adapters, states)
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

    # Exchange in two steps: from shards of D to shards of the rows, and then `constrain_hidden` also
    # splits the rows among the devices of an expert group (mesh axis `ep`).
    between = [None] * (x.ndim - 2)
    x = params.layout.constrain(x, None, *between, "embed")
    if not params.layout.shards_rows:
        x = params.layout.constrain(x, "expert_batch", *between, None)
    return constrain_hidden(params.layout, x)


def constrain_hidden(layout: Layout, x: jax.Array) -> jax.Array:
    """Apply the sharding of hidden states, [B, T, D] or [S, D]."""
    return layout.constrain(x, "batch", "tokens", None) if x.ndim == 3 else layout.constrain(x, "batch", None)


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
    """Apply the sharding of the cache to a whole cache, or to the entries that a decode slice has added.

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


@dataclass(frozen=True, slots=True)
class _LayerMode:
    """How the layers of a call are computed: as training rows, prompt chunks or decode steps."""

    config: ModelConfig
    context: LayerContext
    mix: Callable[[Mixer, jax.Array, LayerParams, LayerAdapters, Any], tuple[jax.Array, Any]]
    """Calls the mixer: its arguments are mixer, input, parameters, adapters, cache of the layer."""
    remat: RematPolicy
    get_cache: Callable[[int, Any, Any], Any] = lambda stack, layer, state: None
    """Returns the cache of a layer, given its stack, its index in the stack, and its state."""

    def run_block(self, block: Block, x: jax.Array, params: LayerParams, adapters: LayerAdapters, layer_cache: Any):
        """Return `x` plus the outputs of one block, and the mixer's cache entries or `count_E`."""
        x = constrain_hidden(self.context.layout, x)
        epsilon, new_entries = self.config.norm_epsilon, LayerCache()
        mixer_output_norm, mlp_output_norm = (params.get(name) for name in OUTPUT_NORMS)
        if block.mixer is not None:
            normed = rms_norm(x, params["attn_norm"], epsilon)
            mixed, new_entries = self.mix(block.mixer, normed, params, adapters, layer_cache)
            x = _add_output(x, mixed, mixer_output_norm, epsilon)
        if block.feed_forward is not None:
            normed = rms_norm(x, params["mlp_norm"], epsilon)
            y, count_E = block.feed_forward.apply(normed, params, adapters, self.context)
            new_entries = new_entries if count_E is None else count_E
            x = _add_output(x, y, mlp_output_norm, epsilon)
        return x, new_entries


def _gather_params(block: Block, params: LayerParams, layout: Layout) -> LayerParams:
    """All-gather sharded parameters of one layer before they are used, see `gather_weight`."""
    axes = {name: parameter.axes for part in block.parts for name, parameter in part.describe().items()}
    return {name: gather_weight(leaf, axes[name], layout) if name in axes else leaf for name, leaf in params.items()}


def _find_unsliced_params(block: Block, context: LayerContext) -> frozenset[str]:
    """Return the names of parameters that stay stacked because a kernel indexes the stack.

    These are the weight matrices of experts. Slicing them in the loop would copy the experts of
    each layer.
    """
    if context.kernels.experts is None or context.layout.num_shards("embed") > 1:
        return frozenset()
    return frozenset(name for name, target in block.targets().items() if target.num_experts is not None)


def _add_output(x: jax.Array, output: jax.Array, norm: jax.Array | None, epsilon: float) -> jax.Array:
    """Return `x` plus the output of a part. The output first passes a norm if the part has one.

    The sum of `x` and a norm uses `add_unfused`. With a plain sum, XLA on CPU would fuse norm and
    sum, but only in programs without a gradient. The results of programs with and without a
    gradient would then differ in the last bits.
    """
    return x + output if norm is None else add_unfused(x, rms_norm(output, norm, epsilon))


def _run_layers(
    mode: _LayerMode,
    x: jax.Array,
    params: DecoderParams,
    adapters: Iterator[GroupAdapters],
    states: tuple[Any, ...] | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run `x` through all layers, with one loop per group.

    Returns the hidden states, and the new cache entries of the mixers, one per stack. `states` are
    the states of recurrent layers before the call, one per stack.
    """
    new_entries: list[Any] = []
    for group, group_adapters in zip(mode.config.groups, adapters, strict=True):
        first, last = len(new_entries), len(new_entries) + len(group.stacks)
        group_states = ((),) * len(group.stacks) if states is None else states[first:last]
        x, new = _run_group(mode, x, group, first, params, group_adapters, group_states)
        new_entries += new
    return x, tuple(new_entries)


def _run_group(
    mode: _LayerMode,
    x: jax.Array,
    group: Group,
    first: int,
    params: DecoderParams,
    adapters: GroupAdapters,
    states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run `x` through one group. `first` is the index of its first stack among all stacks.

    Returns the hidden states, and the new cache entries, one per stack.
    """
    layers = params.layers[first : first + len(group.stacks)]
    separate = [stack for stack in layers if isinstance(stack, tuple)]  # all stacks or none
    if separate:
        return _run_separate_layers(mode, x, group, first, separate, params.is_transposed, adapters, states)
    stacked = [stack for stack in layers if not isinstance(stack, tuple)]
    return _run_stacked_layers(mode, x, group, first, stacked, adapters, states)


def _run_stacked_layers(
    mode: _LayerMode,
    x: jax.Array,
    group: Group,
    first: int,
    stacks: Sequence[LayerParams],
    adapters: GroupAdapters,
    states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Do the same as `_run_group` in a loop (`jax.lax.scan`) over the repeats of the cycle.

    The time to trace and compile the loop does not depend on the number of layers.
    """
    unsliced = [_find_unsliced_params(stack.block, mode.context) for stack in group.stacks]

    # One function per block of the cycle.
    def make_layer(index: int):
        block = group.stacks[index].block

        def run_layer_once(x: jax.Array, layer_params: LayerParams, pairs: GroupPairs, state: Any, repeat: Any):
            layer_cache = mode.get_cache(first + index, repeat, state)
            layer_params = _gather_params(block, layer_params, mode.context.layout)
            in_stack = {name: StackedParam(stacks[index][name], repeat) for name in unsliced[index]}
            layer_adapters = adapters.select_layer(index, repeat, pairs)
            return mode.run_block(block, x, {**layer_params, **in_stack}, layer_adapters, layer_cache)

        return with_remat(mode.remat, run_layer_once)

    run_layer = [make_layer(index) for index in range(len(group.stacks))]

    def run_cycle(x: jax.Array, sliced: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        cycle_params, pairs, cycle_states, repeat = sliced
        new_entries: list[Any] = []
        for run, layer_params, state in zip(run_layer, cycle_params, cycle_states, strict=True):
            x, new = run(x, layer_params, pairs, state, repeat)
            new_entries.append(new)
        return x, tuple(new_entries)

    sliced = tuple(
        {name: leaf for name, leaf in stack.items() if name not in names}
        for stack, names in zip(stacks, unsliced, strict=True)
    )
    repeats = jnp.arange(group.num_repeats, dtype=jnp.int32)
    return jax.lax.scan(run_cycle, x, (sliced, adapters.get_pairs(), states, repeats))


def _run_separate_layers(
    mode: _LayerMode,
    x: jax.Array,
    group: Group,
    first: int,
    stacks: Sequence[tuple[LayerParams, ...]],
    is_transposed: bool,
    adapters: GroupAdapters,
    states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Do the same as `_run_group` without a loop. The cache entries of a stack are a tuple too.

    Compiling takes longer than for a loop, but no layer is copied out of a stack. The layers of a
    stack call the same jitted function, which is traced and lowered only once. XLA inlines the calls.
    """

    def make_layer(block: Block):
        @jax.jit
        def run_layer(x: jax.Array, layer_params: LayerParams, layer_adapters: LayerAdapters, layer_cache: Any):
            if is_transposed:
                layer_params = transpose_layer(block, layer_params)
            layer_params = _gather_params(block, layer_params, mode.context.layout)
            return mode.run_block(block, x, layer_params, layer_adapters, layer_cache)

        return run_layer

    run_layer = [make_layer(stack.block) for stack in group.stacks]
    pairs = adapters.get_pairs()
    new_entries: list[list[Any]] = [[] for _ in group.stacks]
    for repeat in range(group.num_repeats):
        repeat_pairs = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], pairs)
        for index, (run, stack, stack_states) in enumerate(zip(run_layer, stacks, states, strict=True)):
            layer_adapters = adapters.select_layer(index, repeat, repeat_pairs)
            layer_cache = mode.get_cache(first + index, repeat, stack_states[repeat] if stack_states else ())
            x, new = run(x, stack[repeat], layer_adapters, layer_cache)
            new_entries[index].append(new)
    return x, tuple(
        LayerCache() if stack.block.mixer is None else tuple(entries)
        for stack, entries in zip(group.stacks, new_entries, strict=True)
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
    return layout.constrain(y, "batch", *between, None)  # sorting and summing need whole rows


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
    # The loop over chunks of tokens uses all devices only if each shard of a row is a separate row.
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

    The new sum is `total` plus the gradient of the unembedding's adapter. `loss` and `inputs` are
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
