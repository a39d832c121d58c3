"""The decoder that all families share; what differs between them is data in `ModelConfig`.

Legend: B batch, T tokens, D embed, V vocab, n layers of a stack, S rows of a decode step.
The interface is described in `skyrl_tx.models.family`.
"""

import math
from collections.abc import Callable, Iterator
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

    `inputs` are tokens [B, T] or their embeddings [B, T, D]. A row may hold several consecutive sequences: `start_BT`
    is the start in the row of the sequence of each position. `position_BT` are the positions that ropes rotate by, if
    those are not the index in the sequence. `remat` applies to each layer.
    """
    if position_BT is None:
        index = jnp.arange(inputs.shape[1])  # [T], or [B, T] if rows hold several sequences
        position_BT = index if start_BT is None else index - start_BT
    prepared = {mixer: mixer.prepare(start_BT) for mixer in config.mixers}
    at = replace(_make_context(params, config, position_BT), start_BT=start_BT, prepared=prepared)

    def mix_rows(mixer: Mixer, x_BTD: jax.Array, params: LayerParams, adapters: LayerAdapters, _: Any):
        return mixer.forward(x_BTD, params, adapters, at), None

    own = GroupAdapters.from_adapter(config, adapter, slots, joins=not at.layout.is_sharded)
    x_BTD, _ = _run_layers(_LayerMode(config, at, mix_rows, remat), _embed_inputs(params, config, inputs), params, own)
    return _apply_final_norm(params, config, x_BTD)


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
    """Run the tokens, or embeddings, from index `start` on, which attend to what the cache has of prompts.

    `table` says where that is. The first `size` inputs are tokens of the prompts, all others padding; None is all. Both
    numbers are those of all rows, or [B]. `position_T` is as in `forward`. Return the hidden states [B, T, D], and the
    cache with what is kept of the tokens.
    """
    if position_T is None:
        position_T = start[..., None] + jnp.arange(inputs.shape[1])
    at = replace(_make_context(params, config, position_T), size=size)

    def mix_chunk(mixer: Mixer, x_BTD: jax.Array, params: LayerParams, adapters: LayerAdapters, held: Any):
        return mixer.prefill(x_BTD, params, adapters, held, at)

    def get_layer_cache(stack: int, layer: Any, fixed: Any) -> PrefillLayerCache:
        return PrefillLayerCache(Pages(cache[stack].positions, layer, table.page_BM), fixed, start)

    mode = _LayerMode(config, at, mix_chunk, RematPolicy.NONE, get_layer_cache)
    own = GroupAdapters.from_adapter(config, adapter, slots)
    fixed, (num_rows, num_tokens) = read_states(cache, table, at.layout), inputs.shape[:2]
    if params.has_separate_layers:
        fixed = tuple(map(unstack_layers, fixed))
    x_BTD, kept = _run_layers(mode, _embed_inputs(params, config, inputs), params, own, fixed)
    num_new = jnp.int32(num_tokens) if size is None else size
    start_B = jnp.broadcast_to(start, (num_rows,))
    grown = write_cache(cache, kept, table, start_B, num_new, at.layout)
    return _apply_final_norm(params, config, x_BTD), constrain_cache(at.layout, config, grown)


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

    Row s attends to its past and its token. `position_S` is as in `forward`. If the cache has separate layers,
    `params` must have them too.
    """
    at = _make_context(params, config, cache.start_S + cache.num_recent if position_S is None else position_S)

    def mix_token(mixer: Mixer, x_SD: jax.Array, params: LayerParams, adapters: LayerAdapters, held: Any):
        return mixer.decode(x_SD, params, adapters, held, at)

    mode = _LayerMode(config, at, mix_token, RematPolicy.NONE, cache.get_layer)
    own = GroupAdapters.from_adapter(config, adapter, slots)
    fixed = tuple(tuple(each.fixed for each in live) if isinstance(live, tuple) else live.fixed for live in cache.live)
    x_SD, live = _run_layers(mode, _embed_inputs(params, config, token_S), params, own, fixed)
    hidden_SD = rms_norm(x_SD, params.final_norm, config.norm_epsilon)
    if at.layout.is_sharded:
        live = constrain_cache(at.layout, config, live)
    return hidden_SD, replace(cache, live=live, num_recent=cache.num_recent + 1)


def embed(params: DecoderParams, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Return the tokens' embeddings, float32 [B, ..., D].

    Each device looks up its part of D for all rows; then the parts are exchanged. The table is not moved.
    """
    x = params.embed[tokens].astype(jnp.float32)
    if config.scales_embeddings:  # by a factor in the type of the weights, as models were trained: 55.5, not 55.43
        x = x * np.float32(np.float32(math.sqrt(config.hidden_size)).astype(params.embed.dtype))
    others = [None] * (x.ndim - 2)
    x = params.layout.constrain(x, None, *others, "embed")
    if not params.layout.shards_rows:
        x = params.layout.constrain(x, "expert_batch", *others, None)
    return constrain_hidden(params.layout, x)


def constrain_hidden(layout: Layout, x: jax.Array) -> jax.Array:
    """Constrain hidden states [B, T, D] or [S, D] to their sharding."""
    return layout.constrain(x, "batch", "tokens", None) if x.ndim == 3 else layout.constrain(x, "batch", None)


def _embed_inputs(params: DecoderParams, config: ModelConfig, inputs: jax.Array) -> jax.Array:
    return embed(params, config, inputs) if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs.astype(jnp.float32)


def _apply_final_norm(params: DecoderParams, config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    return constrain_hidden(params.layout, rms_norm(x_BTD, params.final_norm, config.norm_epsilon))


def _make_context(params: DecoderParams, config: ModelConfig, position: jax.Array) -> LayerContext:
    """Return where the tokens are, with the angles of every rope of the model."""
    rotations = dict.fromkeys(mixer.rotation for mixer in config.mixers)
    angles = {each: each[0].compute_angles(position, each[1]) for each in rotations if each is not None}
    return LayerContext(params.layout, angles, kernels=params.kernels)


def constrain_cache(
    layout: Layout, config: ModelConfig, cache: tuple[LayerCache | tuple[LayerCache, ...], ...]
) -> tuple[Any, ...]:
    """Constrain the cache, or what a slice changed of it, in stacks or by layer, to its sharding."""

    def constrain_positions(leaf: jax.Array, each: Parameter) -> jax.Array:
        return layout.constrain(leaf, *get_position_axes(each)[-leaf.ndim :])

    def constrain_fixed(leaf: jax.Array, each: Parameter) -> jax.Array:
        return layout.constrain(leaf, *("layers", "batch", *each.axes)[-leaf.ndim :])

    def constrain_layer(block: Block, held: LayerCache) -> LayerCache:
        room = block.describe_cache()
        return LayerCache(
            positions=jax.tree.map(constrain_positions, held.positions, room.positions),
            fixed=jax.tree.map(constrain_fixed, held.fixed, room.fixed),
        )

    return tuple(
        tuple(constrain_layer(stack.block, each) for each in held)
        if isinstance(held, tuple)
        else constrain_layer(stack.block, held)
        for stack, held in zip(config.stacks, cache, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _LayerMode:
    """The way that all layers are computed: for training, for prompts or for steps."""

    config: ModelConfig
    at: LayerContext
    mix: Callable[[Mixer, jax.Array, LayerParams, LayerAdapters, Any], tuple[jax.Array, Any]]
    remat: RematPolicy
    get_cache: Callable[[int, Any, Any], Any] = lambda stack, layer, fixed: None
    """Returns what the cache has of one layer: its stack, its number there, and its state."""

    def run_block(self, block: Block, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: Any):
        """Return `x` with the outputs of one block added, and what its mixer keeps."""
        x = constrain_hidden(self.at.layout, x)
        epsilon, kept = self.config.norm_epsilon, LayerCache()
        of_mixer, of_feed_forward = (params.get(name) for name in OUTPUT_NORMS)
        if block.mixer is not None:
            mixed, kept = self.mix(block.mixer, rms_norm(x, params["attn_norm"], epsilon), params, adapters, held)
            x = _add_output(x, mixed, of_mixer, epsilon)
        if block.feed_forward is not None:
            y = block.feed_forward.apply(rms_norm(x, params["mlp_norm"], epsilon), params, adapters, self.at)
            x = _add_output(x, y, of_feed_forward, epsilon)
        return x, kept


def _gather_params(block: Block, params: LayerParams, layout: Layout) -> LayerParams:
    """Return the parameters of one layer with whole D where they are gathered before use (see `layers.gather`)."""
    axes = {name: each.axes for part in block.parts for name, each in part.describe().items()}
    return {name: gather_weight(leaf, axes[name], layout) if name in axes else leaf for name, leaf in params.items()}


def _find_unsliced_params(block: Block, at: LayerContext) -> frozenset[str]:
    """Return the names of parameters that a kernel reads in the stack of all layers: a loop would copy each layer's."""
    if at.kernels.experts is None or at.layout.num_shards("embed") > 1:
        return frozenset()
    return frozenset(name for name, each in block.targets().items() if each.num_experts is not None)


def _add_output(x: jax.Array, output: jax.Array, norm: jax.Array | None, epsilon: float) -> jax.Array:
    """Return `x` plus the output of a part, through its output norm if it has one.

    Apart, because XLA on CPU rounds the product of a norm and its sum with `x` otherwise if no gradient needs the sum.
    """
    return x + output if norm is None else add_unfused(x, rms_norm(output, norm, epsilon))


def _run_layers(
    mode: _LayerMode,
    x: jax.Array,
    params: DecoderParams,
    adapters: Iterator[GroupAdapters],
    fixed: tuple[Any, ...] | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run `x` through all layers, one loop for each group; return it, and what the mixers keep, by stack."""
    kept: list[Any] = []
    for group, own in zip(mode.config.groups, adapters, strict=True):
        first, last = len(kept), len(kept) + len(group.stacks)
        state = ((),) * len(group.stacks) if fixed is None else fixed[first:last]
        x, new = _run_group(mode, x, group, first, params, own, state)
        kept += new
    return x, tuple(kept)


def _run_group(
    mode: _LayerMode,
    x: jax.Array,
    group: Group,
    first: int,
    params: DecoderParams,
    adapters: GroupAdapters,
    fixed: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run `x` through one group, whose first stack has number `first`; return it and what is kept, by stack.

    Stacked layers are computed by a loop, whose compile time does not depend on its number of repeats. Layers in a
    tuple are computed without a loop, and what mixers keep is a tuple too: a larger program that copies nothing out of
    a stack.
    """
    layers = params.layers[first : first + len(group.stacks)]
    stacked = [each for each in layers if not isinstance(each, tuple)]  # all or none
    whole = [_find_unsliced_params(stack.block, mode.at) if stacked else frozenset[str]() for stack in group.stacks]

    def make_layer(place: int):
        block = group.stacks[place].block

        def run_layer_once(x: jax.Array, own: LayerParams, pairs: GroupPairs, state: Any, repeat: Any):
            held = mode.get_cache(first + place, repeat, state)
            own = _gather_params(block, own, mode.at.layout)
            own = {**own, **{name: StackedParam(stacked[place][name], repeat) for name in whole[place]}}
            return mode.run_block(block, x, own, adapters.select_layer(place, repeat, pairs), held)

        return with_remat(mode.remat, run_layer_once)

    run_layer = [make_layer(place) for place in range(len(group.stacks))]

    def run_cycle(x: jax.Array, sliced: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        of_stacks, pairs, fixed, repeat = sliced
        kept: list[Any] = []
        for run, own, state in zip(run_layer, of_stacks, fixed, strict=True):
            x, new = run(x, own, pairs, state, repeat)
            kept.append(new)
        return x, tuple(kept)

    pairs = adapters.get_pairs()
    if stacked:
        sliced = tuple(
            {name: leaf for name, leaf in stack.items() if name not in names}
            for stack, names in zip(stacked, whole, strict=True)
        )
        return jax.lax.scan(run_cycle, x, (sliced, pairs, fixed, jnp.arange(group.num_repeats, dtype=jnp.int32)))
    by_repeat: list[tuple[Any, ...]] = []
    for repeat in range(group.num_repeats):
        of_repeat = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], pairs)
        own = tuple(
            transpose_layer(stack.block, each[repeat]) if params.is_transposed else each[repeat]
            for stack, each in zip(group.stacks, layers, strict=True)
            if isinstance(each, tuple)
        )
        state = tuple(each[repeat] if each else () for each in fixed)
        x, new = run_cycle(x, (own, of_repeat, state, repeat))
        by_repeat.append(new)
    by_stack = zip(group.stacks, zip(*by_repeat, strict=True), strict=True)
    return x, tuple(LayerCache() if stack.block.mixer is None else kept for stack, kept in by_stack)


def logits(
    params: DecoderParams, hidden: jax.Array, adapter: Adapter | None = None, slots: RowSlots | None = None
) -> jax.Array:
    """Return float32 logits [B, ..., V] of hidden states [B, ..., D]; `slots` are those of the rows of B."""
    y = logprobs.logits(hidden, params.unembed_VD, select_unembed_adapter(adapter, slots))
    layout, between = params.layout, [None] * (y.ndim - 2)
    # Each device computes its part of the vocabulary. Without this XLA sends the unembedding to all, not the logits.
    y = layout.constrain(y, "batch", *between, "vocab")
    return layout.constrain(y, "batch", *between, None)  # whole rows, because they are sorted and summed


def target_logprobs(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter | None = None,
    slots: RowSlots | None = None,
) -> jax.Array:
    """Return log p(target), float32 in the shape of `targets` ([B, T] or [B, T, K]), never holding [B, T, V]."""
    rows, layout = select_unembed_adapter(adapter, slots), params.layout
    hidden, split_targets = (layout.split_shards(x) for x in (hidden_BTD, targets))
    chunk = logprobs.CHUNK_POSITIONS * layout.num_shards("tokens")
    found = logprobs.target_logprobs(hidden, _gather_unembedding(params), split_targets, rows, chunk=chunk)
    return layout.merge_shards(found, targets.shape[0])


def loss_and_gradient(
    params: DecoderParams,
    hidden_BTD: jax.Array,
    targets: jax.Array,
    adapter: Adapter,
    loss: logprobs.PositionLoss,
    inputs: Any,
    total: LoraPair,
) -> tuple[Any, jax.Array, LoraPair]:
    """Return outputs of a loss, its gradient by the hidden states, and `total` plus that by the unembedding's adapter.

    `loss` and `inputs` are those of `layers.logprobs.loss_and_gradient`.
    """
    rows, layout = RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale), params.layout
    hidden, split_targets, inputs = jax.tree.map(layout.split_shards, (hidden_BTD, targets, inputs))
    chunk = logprobs.CHUNK_POSITIONS * layout.num_shards("tokens")
    *of_rows, total = logprobs.loss_and_gradient(
        hidden, _gather_unembedding(params), split_targets, rows, loss, inputs, total, chunk=chunk
    )
    outputs, d_hidden_BTD = jax.tree.map(partial(layout.merge_shards, num_rows=targets.shape[0]), of_rows)
    return outputs, d_hidden_BTD, total


def _gather_unembedding(params: DecoderParams) -> jax.Array:
    """Return the unembedding with whole D on GPU, where XLA would gather it for each chunk otherwise.

    On TPU it sends parts around while it computes with others, which takes less memory.
    """
    layout, unembed_VD = params.layout, params.unembed_VD
    if layout.num_shards("embed") == 1:
        return unembed_VD
    return jax.lax.platform_dependent(
        unembed_VD, cuda=lambda x: layout.constrain(x, "vocab", None), default=lambda x: x
    )


def select_unembed_adapter(adapter: Adapter | None, slots: RowSlots | None) -> RowAdapter | None:
    """Return the adapters of the rows for the unembedding."""
    if adapter is None:
        return None
    if adapter.scale.ndim == 0:
        return RowAdapter(pair=adapter.weights["unembed"], scale=adapter.scale)
    return select_rows(adapter, "unembed", slots, layer=None)
