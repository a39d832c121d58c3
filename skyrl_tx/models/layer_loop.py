"""Run all layers of a model, as a loop over stacked layers or as separate layers.

A group of layers repeats a cycle of blocks, for example three delta nets and one attention. The
layers at the same place in the cycle form a stack: here a group has four stacks. See `config.Group`.

Legend: B batch, T tokens, D embed, S rows of a decode step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.cache_state import LayerCache
from skyrl_tx.layers.parameter import rms_norm
from skyrl_tx.layers.remat import RematPolicy, with_remat
from skyrl_tx.layers.sharding import Layout, gather_weight
from skyrl_tx.layers.stable_bits import add_unfused
from skyrl_tx.models.adapters import GroupAdapters, GroupPairs
from skyrl_tx.models.config import OUTPUT_NORMS, Block, DecoderParams, Group, ModelConfig, transpose_layer
from skyrl_tx.models.parts.base import Layer, LayerAdapters, LayerContext, LayerParams, Mixer, StackedParam


def constrain_hidden(layout: Layout, x: jax.Array) -> jax.Array:
    """Apply the sharding of hidden states, [B, T, D] or [S, D]."""
    return layout.constrain(x, "batch", "tokens", None) if x.ndim == 3 else layout.constrain(x, "batch", None)


@dataclass(frozen=True, slots=True)
class LayerMode:
    """How the layers of a call are computed: as training rows, prompt chunks or decode steps."""

    config: ModelConfig
    context: LayerContext
    mix: Callable[[Mixer, jax.Array, Layer, Any], tuple[jax.Array, Any]]
    """Calls the mixer: its arguments are mixer, input, layer, and cache of the layer."""
    remat: RematPolicy
    get_cache: Callable[[int, Any, Any], Any] = lambda stack, layer, state: None
    """Returns the cache of a layer, given its stack, its index in the stack, and its state."""

    def run_block(self, block: Block, x: jax.Array, params: LayerParams, adapters: LayerAdapters, layer_cache: Any):
        """Return `x` plus the outputs of one block, and the mixer's cache entries or `count_E`."""
        x = constrain_hidden(self.context.layout, x)
        layer, epsilon, new_entries = Layer(params, adapters, self.context), self.config.norm_epsilon, LayerCache()
        mixer_output_norm, mlp_output_norm = (params.get(name) for name in OUTPUT_NORMS)
        if block.mixer is not None:
            normed = rms_norm(x, params["attn_norm"], epsilon)
            mixed, new_entries = self.mix(block.mixer, normed, layer, layer_cache)
            x = _add_output(x, mixed, mixer_output_norm, epsilon)
        if block.feed_forward is not None:
            normed = rms_norm(x, params["mlp_norm"], epsilon)
            y, count_E = block.feed_forward.apply(normed, layer)
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


def run_layers(
    mode: LayerMode,
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
    run_stacks = _run_separate_layers if params.has_separate_layers else _run_stacked_layers
    for group, group_adapters in zip(mode.config.groups, adapters, strict=True):
        first, last = len(new_entries), len(new_entries) + len(group.stacks)
        group_states = ((),) * len(group.stacks) if states is None else states[first:last]
        part = _GroupPart(group, first, params.layers[first:last], params.is_transposed, group_adapters, group_states)
        x, new = run_stacks(mode, x, part)
        new_entries += new
    return x, tuple(new_entries)


@dataclass(frozen=True, slots=True)
class _GroupPart:
    """A group of layers, and its parts of the arguments of `run_layers`."""

    group: Group
    first: int
    """The index of its first stack among all stacks."""
    layers: tuple[Any, ...]
    """The parameters of its stacks, which are all stacked or all separate."""
    is_transposed: bool
    adapters: GroupAdapters
    states: tuple[Any, ...]


def _run_stacked_layers(mode: LayerMode, x: jax.Array, part: _GroupPart) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run one group as a loop (`jax.lax.scan`) over the repeats of the cycle.

    Returns the hidden states, and the new cache entries, one per stack. The time to trace and
    compile the loop does not depend on the number of layers.
    """
    group, stacks, adapters = part.group, part.layers, part.adapters
    unsliced = [_find_unsliced_params(stack.block, mode.context) for stack in group.stacks]

    # One function per block of the cycle.
    def make_layer(index: int):
        block = group.stacks[index].block

        def run_layer_once(x: jax.Array, layer_params: LayerParams, pairs: GroupPairs, state: Any, repeat: Any):
            layer_cache = mode.get_cache(part.first + index, repeat, state)
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
    return jax.lax.scan(run_cycle, x, (sliced, adapters.get_pairs(), part.states, repeats))


def _run_separate_layers(mode: LayerMode, x: jax.Array, part: _GroupPart) -> tuple[jax.Array, tuple[Any, ...]]:
    """Do the same as `_run_stacked_layers` without a loop. The cache entries of a stack are a tuple too.

    Compiling takes longer than for a loop, but no layer is copied out of a stack. The layers of a
    stack call the same jitted function, which is traced and lowered only once. XLA inlines the calls.
    """

    def make_layer(block: Block):
        @jax.jit
        def run_layer(x: jax.Array, layer_params: LayerParams, layer_adapters: LayerAdapters, layer_cache: Any):
            if part.is_transposed:
                layer_params = transpose_layer(block, layer_params)
            layer_params = _gather_params(block, layer_params, mode.context.layout)
            return mode.run_block(block, x, layer_params, layer_adapters, layer_cache)

        return run_layer

    group, adapters = part.group, part.adapters
    run_layer = [make_layer(stack.block) for stack in group.stacks]
    pairs = adapters.get_pairs()
    new_entries: list[list[Any]] = [[] for _ in group.stacks]
    for repeat in range(group.num_repeats):
        repeat_pairs = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], pairs)
        for index, (run, stack, stack_states) in enumerate(zip(run_layer, part.layers, part.states, strict=True)):
            layer_adapters = adapters.select_layer(index, repeat, repeat_pairs)
            layer_cache = mode.get_cache(part.first + index, repeat, stack_states[repeat] if stack_states else ())
            x, new = run(x, stack[repeat], layer_adapters, layer_cache)
            new_entries[index].append(new)
    return x, tuple(
        LayerCache() if stack.block.mixer is None else tuple(entries)
        for stack, entries in zip(group.stacks, new_entries, strict=True)
    )
