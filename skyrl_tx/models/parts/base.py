"""The interface of the parts of a decoder block, and the data that the decoder passes to them.

A block consists of a mixer (attention, delta net, Mamba) and a feed-forward (dense or a mixture of
experts). A part is frozen, hashable data, because it belongs to `ModelConfig`, and its methods are
pure functions. The names of its parameters and linear maps are unique within a block. Adapters and
checkpoints use the same names.

Legend: B batch, T tokens, S slots, D embed, n layers of a stack.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import jax
from flax import struct

from skyrl_tx.layers.attention import KeyRange
from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.experts import ExpertAdapters
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Heads, Kernels
from skyrl_tx.layers.lora import RowAdapter, linear
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.rope import Rope
from skyrl_tx.layers.sharding import Layout

LayerParams = Mapping[str, Any]
"""Parameters of one layer by name, where some may be a `StackedParam`.

For a stack of layers, each array has a leading dim n.
"""

Rotation = tuple[Rope, int]
"""A RoPE and the number of dimensions that it rotates."""

Angles = tuple[jax.Array, jax.Array]
"""Cosine and sine for each position."""

ShardedSize = tuple[Axis, str, int]
"""A size that a mesh may divide: the logical axis, the key in config.json, and the size."""

TargetGroup = Literal["attn", "mlp", "unembed"]
"""A group of linear maps that a client can switch on or off together, see `LoraSpec`."""


class UnsupportedModel(ValueError):
    """The model needs a feature that is not supported and that would change the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A linear map that adapters change. With `num_experts`, there is one such map per expert."""

    inputs: int
    outputs: int
    axes: tuple[Axis, Axis]
    group: TargetGroup
    num_experts: int | None = None

    def describe(self, num_heads: int = 1) -> Parameter:
        """Return the parameter of the map, or of the map of one expert."""
        return Parameter((self.inputs, self.outputs), self.axes, num_heads=num_heads)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The arrays that the cache has for one layer, as trees of `Parameter`.

    `positions` are arrays [K, H] per position, in the type of the base weights. `fixed` are arrays
    of a fixed size per sample, for example the state of a delta net.
    """

    positions: Any = ()
    fixed: Any = ()


@struct.dataclass
class StackedParam:
    """A parameter of one layer that is read from the stack of all layers, without slicing it."""

    stack: jax.Array  # [n, ...]
    layer: jax.Array


@struct.dataclass
class LayerAdapters:
    """The adapters of the rows in one layer. Empty for the base model."""

    maps: Mapping[str, RowAdapter] = struct.field(default_factory=dict[str, RowAdapter])
    experts: ExpertAdapters | None = None


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Data of a call that is the same for all layers: sharding, kernels and token positions."""

    layout: Layout
    angles: Mapping[Rotation, Angles]
    start_BT: jax.Array | None = None
    """In training, the index in the row at which the sequence of each token begins.

    None means that each row contains one sequence.
    """
    prefix: KeyRange | None = None
    """In training, the keys of the shared prefix that the sequence of each token continues."""
    prepared: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """In training, the result of `Mixer.prepare` for each mixer."""
    kernels: Kernels = NO_KERNELS
    """The kernels for training and sampling."""
    size: jax.Array | None = None
    """In prefill, the number of tokens before the padding; None means no padding."""
    num_uses_BT: jax.Array | None = None
    """In training, how often each position counts in the number of tokens of its experts.

    With None, mixtures of experts count nothing.
    """


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in a call: its parameters, the adapters of the rows, and the data of the call."""

    params: LayerParams
    adapters: LayerAdapters
    context: LayerContext

    def apply_map(self, x: jax.Array, name: str, bias: str = "") -> jax.Array:
        """Apply a linear map [in, out], with the adapters of the rows and the bias if there are any."""
        return linear(x, self.params[name], self.adapters.maps.get(name), self.params.get(bias))


class Part(ABC):
    """Methods that mixers and feed-forwards have in common."""

    @abstractmethod
    def targets(self) -> Mapping[str, Target]:
        """Return the linear maps that adapters change, by name."""

    @abstractmethod
    def describe(self) -> Mapping[str, Parameter]:
        """Return the parameters of one layer by name."""

    @abstractmethod
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the sizes that a mesh may divide."""


class Mixer(Part):
    """A part that mixes positions. Its inputs are normalised.

    `forward`, `prefill` and `decode` compute the same numbers for training, prompts and new tokens.
    """

    @property
    def rotation(self) -> Rotation | None:
        """The RoPE of the mixer, or None."""
        return None

    @property
    def heads(self) -> Heads | None:
        """The heads of softmax attention, used to choose kernels. None for other mixers."""
        return None

    @property
    def cache_heads(self) -> Heads | None:
        """The heads as the cache stores them, used to choose the kernel that reads its pages."""
        return self.heads

    def with_cached_dims(self, multiple: int) -> Self:
        """Return the mixer with its cached dims, if any, padded with zeros to a multiple of `multiple`."""
        return self

    @abstractmethod
    def describe_cache(self) -> CacheSpec:
        """Return the arrays that the cache has for one layer."""

    def prepare(self, start_BT: jax.Array | None, prefix: KeyRange | None = None) -> Any:
        """Compute from `start_BT` and `prefix` what `forward` needs of them, once for all layers.

        See `LayerContext`. By default this is nothing: attention compares starts within each of its
        tiles.

        Without this method, XLA could compute these values inside the loop over layers in one
        program, and before the loop in another program. XLA would then fuse the following
        operations differently, and the last bits would differ.
        """
        return None

    @abstractmethod
    def forward(self, x: jax.Array, layer: Layer) -> jax.Array:
        """Return the output for whole training rows [B, T, D]."""

    @abstractmethod
    def prefill(self, x: jax.Array, layer: Layer, cache: PrefillLayerCache) -> tuple[jax.Array, LayerCache]:
        """Return the output for a chunk of prompts [B, T, D], and the new cache entries."""

    @abstractmethod
    def decode(self, x: jax.Array, layer: Layer, cache: DecodeLayerCache) -> tuple[jax.Array, LayerCache]:
        """Return the output for one token per slot [S, D], and the changed cache entries."""


class FeedForward(Part):
    """A part that computes each position independently."""

    @abstractmethod
    def apply(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array | None]:
        """Return the output for positions [..., D], and the number of tokens of each expert [E].

        The second is None for a dense feed-forward, and without `context.num_uses_BT`.
        """
