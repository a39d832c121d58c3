"""The configuration of the decoder as data, its parameter tree, and its KV cache.

Weights of equal layers are stacked for training. For decoding on a CPU they can be separated into
one tree per layer (`unstack_params`).

Legend: D embed, V vocab, n layers of a stack.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import Cache, LayerCache, get_position_axes
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Kernels
from skyrl_tx.layers.kv_cache import PAGE_SIZE
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.models.parts.base import CacheSpec, FeedForward, LayerParams, Mixer, Target
from skyrl_tx.process.memory import discard_zeros

ExpertLora = Literal["shared", "own"]
"""The form of experts' adapters.

With "shared", all experts of a layer share the factor next to the hidden size: A of gate and up,
and B of down. With "own", experts share no factors.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer as data: a mixer, a feed-forward, or both in this order."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    has_output_norms: bool = False
    """Whether the output of each part passes a norm before it is added to the hidden states."""

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """The one or two parts, in the order in which they run."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not None)

    def targets(self) -> dict[str, Target]:
        """Return the linear maps that adapters change, by name."""
        return {name: target for part in self.parts for name, target in part.targets().items()}

    def describe_cache(self) -> CacheSpec:
        """Return the arrays that the cache has for the layer."""
        return CacheSpec() if self.mixer is None else self.mixer.describe_cache()


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers with equal blocks, whose parameters are stacked.

    The layers of a stack have the same index in the cycle of their group.
    """

    block: Block
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive layers that repeat a cycle of blocks.

    They run as one loop whose body is one cycle.

    For example, 48 layers with three delta nets before each attention are one group: a cycle of
    four blocks, 12 repeats.
    """

    stacks: tuple[Stack, ...]  # of equal length, in the order of the cycle

    @property
    def num_repeats(self) -> int:
        """The number of repeats of the cycle."""
        return len(self.stacks[0].layers)


def group_blocks(blocks: Sequence[Block]) -> tuple[Group, ...]:
    """Group layers so that the number of stacks is minimal.

    The compiled program is then as small as possible. If multiple groupings have the minimal number
    of stacks, choose the one with the fewest groups.
    """
    kinds = [blocks.index(block) for block in blocks]

    # Dynamic programming from the last layer. An entry is the best grouping from a layer on: the
    # number of stacks, the number of groups, minus the end of the first group (to prefer a long
    # one), and the length of its cycle.
    best = {len(blocks): (0, 0, 0, 0)}
    for first in reversed(range(len(blocks))):
        best[first] = min(
            (cycle + best[end][0], 1 + best[end][1], -end, cycle) for cycle, end in _find_cycles(kinds, first)
        )

    groups: list[Group] = []
    first = 0
    while first < len(blocks):
        *_, end, cycle = best[first]
        stacks = (Stack(blocks[layer], tuple(range(layer, -end, cycle))) for layer in range(first, first + cycle))
        groups.append(Group(tuple(stacks)))
        first = -end
    return tuple(groups)


def _find_cycles(kinds: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yield (length of the cycle, end of its repeats) for every cycle from layer `first` on."""
    yield 1, first + 1
    for cycle in range(1, (len(kinds) - first) // 2 + 1):
        end = first + 2 * cycle
        while end <= len(kinds) and kinds[end - cycle : end] == kinds[first : first + cycle]:
            yield cycle, end
            end += cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of the decoder.

    It is hashable, so it can be a static argument of jitted functions.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_epsilon: float
    max_context_length: int  # tokens
    tied_embeddings: bool
    groups: tuple[Group, ...]
    scales_embeddings: bool = False  # by the square root of the hidden size
    expert_lora: ExpertLora = "shared"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.architecture, self.vocab_size, self.hidden_size, self.groups)))

    def __hash__(self) -> int:
        return self._hash  # precomputed, because every call of a jitted function needs it

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, in the order of the parameters and of the cache."""
        return tuple(stack for group in self.groups for stack in group.stacks)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The different mixers of all stacks."""
        return tuple(dict.fromkeys(stack.block.mixer for stack in self.stacks if stack.block.mixer is not None))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of every layer, in order."""
        by_layer = {layer: stack.block for stack in self.stacks for layer in stack.layers}
        return tuple(by_layer[layer] for layer in range(len(by_layer)))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return sum(len(stack.layers) for stack in self.stacks)


OUTPUT_NORMS = "attn_output_norm", "mlp_output_norm"
"""Names of the norms of the outputs of mixer and feed-forward, in blocks with `has_output_norms`."""

StackParams = LayerParams | tuple[LayerParams, ...]
"""The parameters of a stack, by name.

They are either stacked, so that each array has a leading dim n, or a tuple with one entry per
layer.
"""


@struct.dataclass
class DecoderParams:
    """All base weights, as arrays or as `Parameter`s that describe them."""

    embed: Any  # [V, D]
    layers: tuple[StackParams, ...]  # one entry per stack; linear maps are [in, out]
    final_norm: Any  # [D]
    unembed: Any = None  # [V, D]; None if tied to `embed`
    layout: Layout = struct.field(pytree_node=False, default=UNSHARDED)
    """The sharding of these arrays and of all results computed with them."""
    kernels: Kernels = struct.field(pytree_node=False, default=NO_KERNELS)
    """The kernels that the computations use."""
    is_transposed: bool = struct.field(pytree_node=False, default=False)
    """Whether linear maps are stored as [out, in], see `unstack_params`."""

    @property
    def has_separate_layers(self) -> bool:
        """Whether the layers are separate rather than stacked, so that programs unroll them."""
        return any(isinstance(stack, tuple) for stack in self.layers)

    @property
    def unembed_VD(self) -> Any:
        """The unembedding matrix [V, D]."""
        return self.embed if self.unembed is None else self.unembed


def describe_params(config: ModelConfig) -> DecoderParams:
    """Return the shape, axes and initialisation of every parameter, as a tree of `Parameter`."""
    D, V = config.hidden_size, config.vocab_size
    return DecoderParams(
        embed=Parameter((V, D), ("vocab", "embed")),
        layers=tuple(_describe_stack(stack, D) for stack in config.stacks),
        final_norm=Parameter((D,), ("embed",), "ones", is_float32=True),
        unembed=None if config.tied_embeddings else Parameter((V, D), ("vocab", "embed")),
    )


def _describe_stack(stack: Stack, hidden_size: int) -> Mapping[str, Parameter]:
    norm = Parameter((hidden_size,), ("embed",), "ones", is_float32=True)
    block, parameters = stack.block, dict[str, Parameter]()
    mixer_output_norm, mlp_output_norm = OUTPUT_NORMS
    for name, output_norm, part in (
        ("attn_norm", mixer_output_norm, block.mixer),
        ("mlp_norm", mlp_output_norm, block.feed_forward),
    ):
        norms = (name, output_norm) if block.has_output_norms else (name,)
        new = {} if part is None else {**dict.fromkeys(norms, norm), **part.describe()}
        duplicates = sorted(parameters.keys() & new.keys())
        assert not duplicates, f"the parts of a block have parameters with the same names: {duplicates}"
        parameters |= new

    # Add the dimension of the stacked layers.
    num_layers = len(stack.layers)
    return {
        name: replace(
            parameter,
            shape=(num_layers, *parameter.shape),
            axes=("layers", *parameter.axes),
            layers=stack.layers,
        )
        for name, parameter in parameters.items()
    }


def split_stacks(params: DecoderParams, unstack: Callable[[Any], tuple[Any, ...]]) -> DecoderParams:
    """Return the parameters with separate layers.

    `unstack` splits one stacked array into one entry per layer.
    """

    def split_stack(stack: StackParams) -> tuple[LayerParams, ...]:
        assert not isinstance(stack, tuple), "the layers are separate already"
        by_name = {name: unstack(leaf) for name, leaf in stack.items()}
        return tuple(dict(zip(by_name, layer, strict=True)) for layer in zip(*by_name.values(), strict=True))

    return replace(params, layers=tuple(map(split_stack, params.layers)))


def unstack_params(params: DecoderParams, config: ModelConfig) -> DecoderParams:
    """Return a copy of the parameters with separate layers, for decoding on a CPU.

    Decoding with stacked layers would copy them in every step. Linear maps are stored as [out, in];
    `transpose_layer` undoes this inside the program. With this storage order XLA on CPU sums the
    products of 2 to 256 rows in the same order, so a row has the same bits in a batch of any of
    these sizes.
    """

    def transpose_stack(stack: Stack, layers: StackParams) -> tuple[LayerParams, ...]:
        assert isinstance(layers, tuple)
        return tuple(transpose_layer(stack.block, layer) for layer in layers)

    separate = split_stacks(params, cache_state.unstack_layers).layers
    return replace(params, layers=tuple(map(transpose_stack, config.stacks, separate)), is_transposed=True)


def transpose_layer(block: Block, params: LayerParams) -> LayerParams:
    """Return the parameters of one layer with transposed linear maps.

    Inside a jitted program this copies nothing.
    """
    maps = _find_linear_maps(block)
    return {name: jnp.swapaxes(leaf, 0, 1) if name in maps else leaf for name, leaf in params.items()}


def _find_linear_maps(block: Block) -> frozenset[str]:
    """Return the names of the linear maps [in, out] of a block, except the maps of experts."""
    adapted = {name for name, target in block.targets().items() if target.num_experts is None}
    described = {name: parameter for part in block.parts for name, parameter in part.describe().items()}
    return frozenset(adapted | {name for name, parameter in described.items() if parameter.axes == ("embed", "heads")})


def make_empty_cache(
    params: DecoderParams, config: ModelConfig, num_pages: int, num_states: int, page: int = PAGE_SIZE
) -> Cache:
    """Return an empty cache on the devices of the weights, with the sharding that programs use.

    On CPU, a page takes no memory before it is first written.
    """

    def make_zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        zeros = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
        for shard in zeros.addressable_shards:
            if shard.device.platform == "cpu":
                discard_zeros(shard.data.block_until_ready().unsafe_buffer_pointer(), shard.data.nbytes)
        return zeros

    return jax.tree.map(make_zeros, describe_cache(params, config, num_pages, num_states, page))


def describe_cache(
    params: DecoderParams, config: ModelConfig, num_pages: int, num_states: int, page: int = PAGE_SIZE
) -> Cache:
    """Return the arrays of `make_empty_cache` as `jax.ShapeDtypeStruct`s.

    `params` may also hold such structs instead of arrays.
    """
    layout, dtype = params.layout, params.embed.dtype

    def make_shape(parameter: Parameter, dims: tuple[int, ...], axes: tuple[Axis | None, ...]) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding(axes, dims) if layout.is_sharded else params.embed.sharding
        return jax.ShapeDtypeStruct(dims, jnp.float32 if parameter.is_float32 else dtype, sharding=sharding)

    def describe_stack(stack: Stack) -> LayerCache:
        spec, num_layers = stack.block.describe_cache(), len(stack.layers)

        def describe_positions(parameter: Parameter) -> jax.ShapeDtypeStruct:
            num_heads, dim = parameter.shape
            return make_shape(parameter, (num_layers, num_pages, num_heads, page, dim), get_position_axes(parameter))

        def describe_fixed(parameter: Parameter) -> jax.ShapeDtypeStruct:
            return make_shape(
                parameter, (num_layers, num_states, *parameter.shape), ("layers", "batch", *parameter.axes)
            )

        return LayerCache(
            positions=jax.tree.map(describe_positions, spec.positions), fixed=jax.tree.map(describe_fixed, spec.fixed)
        )

    return tuple(describe_stack(stack) for stack in config.stacks)
