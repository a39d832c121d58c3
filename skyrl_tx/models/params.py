"""The base weights of a decoder: descriptions, stacked arrays, and separate layers for decoding.

Legend: D embed, V vocab, n layers of a stack.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import Cache, LayerCache, get_position_axes
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Kernels
from skyrl_tx.layers.kv_cache import PAGE_SIZE
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.models.config import Block, ModelConfig, Stack
from skyrl_tx.models.parts.base import LayerParams

OUTPUT_NORMS = "attn_output_norm", "mlp_output_norm"
"""The norms of what a block adds, where it has them (`Block.has_output_norms`)."""

StackParams = LayerParams | tuple[LayerParams, ...]
"""The parameters of a stack by name, each with a leading n; or in a tuple, each layer by itself."""


@struct.dataclass
class DecoderParams:
    """All base weights: arrays, or `Parameter`s that describe them."""

    embed: Any  # [V, D]
    layers: tuple[StackParams, ...]  # by stack; linear maps are [in, out]
    final_norm: Any  # [D]
    unembed: Any = None  # [V, D]; None when tied to `embed`
    layout: Layout = struct.field(
        pytree_node=False, default=UNSHARDED
    )  # of these arrays and all that is computed of them
    kernels: Kernels = struct.field(pytree_node=False, default=NO_KERNELS)  # of all that is computed of them
    is_transposed: bool = struct.field(pytree_node=False, default=False)  # linear maps are [out, in], see `by_layer`

    @property
    def has_separate_layers(self) -> bool:
        """Whether each layer is by itself, so that programs have no loop over layers."""
        return any(isinstance(stack, tuple) for stack in self.layers)

    @property
    def unembed_VD(self) -> Any:
        """The unembedding matrix."""
        return self.embed if self.unembed is None else self.unembed


def describe_params(config: ModelConfig) -> DecoderParams:
    """Return shape, logical axes and initialisation of every parameter, as a tree of `Parameter`."""
    D, V = config.hidden_size, config.vocab_size
    return DecoderParams(
        embed=Parameter((V, D), ("vocab", "embed")),
        layers=tuple(_describe_stack(stack, D) for stack in config.stacks),
        final_norm=Parameter((D,), ("embed",), "ones", is_float32=True),
        unembed=None if config.tied_embeddings else Parameter((V, D), ("vocab", "embed")),
    )


def _describe_stack(stack: Stack, hidden_size: int) -> Mapping[str, Parameter]:
    norm = Parameter((hidden_size,), ("embed",), "ones", is_float32=True)
    block, found = stack.block, dict[str, Parameter]()
    of_mixer, of_feed_forward = OUTPUT_NORMS
    for name, output_norm, part in (
        ("attn_norm", of_mixer, block.mixer),
        ("mlp_norm", of_feed_forward, block.feed_forward),
    ):
        norms = (name, output_norm) if block.has_output_norms else (name,)
        own = {} if part is None else {**dict.fromkeys(norms, norm), **part.describe()}
        assert not found.keys() & own.keys(), (
            f"the names of a block are not unique: {sorted(found.keys() & own.keys())}"
        )
        found |= own
    return {
        name: replace(each, shape=(len(stack.layers), *each.shape), axes=("layers", *each.axes), layers=stack.layers)
        for name, each in found.items()
    }


def split_stacks(params: DecoderParams, layers_of: Callable[[Any], tuple[Any, ...]]) -> DecoderParams:
    """Return the parameters with each layer by itself; `layers_of` returns those of one array of a stack."""

    def split_stack(stack: StackParams) -> tuple[LayerParams, ...]:
        assert not isinstance(stack, tuple), "the layers are separate already"
        by_name = {name: layers_of(leaf) for name, leaf in stack.items()}
        return tuple(dict(zip(by_name, layer, strict=True)) for layer in zip(*by_name.values(), strict=True))

    return replace(params, layers=tuple(map(split_stack, params.layers)))


def unstack_params(params: DecoderParams, config: ModelConfig) -> DecoderParams:
    """Return the parameters with the layers out of their stacks: copies, for a loop that would copy them each time.

    Linear maps are [out, in], which `transpose_layer` undoes. XLA on CPU then sums the products of 2 to 256 rows in one
    order, so that a row has the same bits in any of them.
    """

    def transpose_stack(stack: Stack, own: StackParams) -> tuple[LayerParams, ...]:
        assert isinstance(own, tuple)
        return tuple(transpose_layer(stack.block, layer) for layer in own)

    apart = split_stacks(params, cache_state.unstack_layers).layers
    return replace(params, layers=tuple(map(transpose_stack, config.stacks, apart)), is_transposed=True)


def transpose_layer(block: Block, params: LayerParams) -> LayerParams:
    """Return one layer's parameters with the linear maps transposed. Inside a program that copies nothing."""
    maps = _find_linear_maps(block)
    return {name: jnp.swapaxes(leaf, 0, 1) if name in maps else leaf for name, leaf in params.items()}


def _find_linear_maps(block: Block) -> frozenset[str]:
    """Return the names of the linear maps [in, out] of a block, without those of experts."""
    adapted = {name for name, target in block.targets().items() if target.num_experts is None}
    parts = [part for part in (block.mixer, block.feed_forward) if part is not None]
    described = {name: each for part in parts for name, each in part.describe().items()}
    return frozenset(adapted | {name for name, each in described.items() if each.axes == ("embed", "heads")})


def make_empty_cache(
    params: DecoderParams, config: ModelConfig, num_pages: int, num_states: int, page: int = PAGE_SIZE
) -> Cache:
    """Return an empty cache on the devices of the weights, sharded as programs do."""
    shapes = describe_cache(params, config, num_pages, num_states, page)
    return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype, device=each.sharding), shapes)


def describe_cache(
    params: DecoderParams, config: ModelConfig, num_pages: int, num_states: int, page: int = PAGE_SIZE
) -> Cache:
    """Return the arrays of `make_empty_cache` as `jax.ShapeDtypeStruct`s with shardings; so may the weights be."""
    layout, dtype = params.layout, params.embed.dtype

    def make_shape(each: Parameter, dims: tuple[int, ...], axes: tuple[Axis | None, ...]) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding(axes, dims) if layout.is_sharded else params.embed.sharding
        return jax.ShapeDtypeStruct(dims, jnp.float32 if each.is_float32 else dtype, sharding=sharding)

    def describe_stack(stack: Stack) -> LayerCache:
        room, num_layers = stack.block.describe_cache(), len(stack.layers)

        def describe_positions(each: Parameter) -> jax.ShapeDtypeStruct:
            num_heads, dim = each.shape
            return make_shape(each, (num_layers, num_pages, num_heads, page, dim), get_position_axes(each))

        def describe_fixed(each: Parameter) -> jax.ShapeDtypeStruct:
            return make_shape(each, (num_layers, num_states, *each.shape), ("layers", "batch", *each.axes))

        return LayerCache(
            positions=jax.tree.map(describe_positions, room.positions), fixed=jax.tree.map(describe_fixed, room.fixed)
        )

    return tuple(describe_stack(stack) for stack in config.stacks)
