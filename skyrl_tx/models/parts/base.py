"""The two kinds of parts of a decoder block, mixers and feed-forwards, and what the decoder passes to them.

A part is frozen data with all its sizes: part of `ModelConfig`, hence hashable. Its methods are pure functions. The
names of its parameters and linear maps are unique within a block; adapters and checkpoints use the same names.

Legend: B batch, T tokens, S slots, D embed, n layers of a stack.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import jax
from flax import struct

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Heads, Kernels
from skyrl_tx.layers.lora import RowAdapter
from skyrl_tx.layers.moe import ExpertAdapters
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.rope import Rope
from skyrl_tx.layers.sharding import Layout

LayerParams = Mapping[str, Any]
"""Parameters by name: those of one layer, some of them `StackedParam`, or with a leading n those of a stack."""

Rotation = tuple[Rope, int]
"""A rope and the number of dims that it rotates."""

Angles = tuple[jax.Array, jax.Array]
"""Cosine and sine of each position."""

ShardedSize = tuple[Axis, str, int]
"""A size that a mesh may divide: its logical axis, its name in config.json, and the size."""

TargetGroup = Literal["attn", "mlp", "unembed"]
"""The linear maps that a client trains together."""


class UnsupportedModel(ValueError):
    """The checkpoint requires an unsupported feature that changes the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A linear map that adapters change, or one such map per expert."""

    inputs: int
    outputs: int
    axes: tuple[Axis, Axis]
    group: TargetGroup
    num_experts: int | None = None


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The arrays that the cache keeps of one layer, as trees of `Parameter`.

    Those of each position are [K, H], in the type of the base weights; others have a fixed size for each sample.
    """

    positions: Any = ()
    fixed: Any = ()


@struct.dataclass
class StackedParam:
    """A parameter of one layer that is read in the stack of all."""

    stack: jax.Array  # [n, ...]
    layer: jax.Array


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of the rows in one layer; empty for the base model."""

    maps: Mapping[str, RowAdapter] = field(default_factory=dict[str, RowAdapter])
    experts: ExpertAdapters | None = None


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The place of a call's tokens, the same for all layers."""

    layout: Layout
    angles: Mapping[Rotation, Angles]
    start_BT: jax.Array | None = None
    """In training, the start in the row of the sequence of each position; None if a row holds one sequence."""
    prepared: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """In training, what `prepare` of each mixer returned."""
    kernels: Kernels = NO_KERNELS
    """The kernels in training and in sampling."""
    size: jax.Array | None = None
    """The number of tokens of a chunk of prompts that are no padding; None if all."""


class Part(Protocol):
    """The methods that mixers and feed-forwards share."""

    def describe(self) -> Mapping[str, Parameter]:
        """Return the parameters of one layer."""
        ...

    def targets(self) -> Mapping[str, Target]:
        """Return the linear maps that adapters change."""
        ...

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the sizes that a mesh may divide."""
        ...


class Mixer(Part, Protocol):
    """A part that mixes positions. `rows`, `extend` and `step` give the same numbers; `x` is normalised already."""

    @property
    def rotation(self) -> Rotation | None:
        """The rotation whose angles the mixer reads."""
        ...

    @property
    def heads(self) -> Heads | None:
        """The heads of a mixer with softmax attention, by which its kernels are chosen."""
        ...

    @property
    def cache_heads(self) -> Heads | None:
        """The same heads as they are in the cache, by which the kernel that reads its pages is chosen."""
        ...

    def with_cached_dims(self, multiple: int) -> Self:
        """Return the mixer with zeros in the cache after the dims of each position, up to a multiple of that number."""
        ...

    def describe_cache(self) -> CacheSpec:
        """Return what the cache keeps of one layer."""
        ...

    def prepare(self, start_BT: jax.Array | None) -> Any:
        """Return what `rows` reads of `start_BT` (see Place), computed once for all layers.

        Within a layer XLA would compute it in the loop in one program, before the loop in another, and fuse what
        follows differently: their bits would differ.
        """
        ...

    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """Return the output for whole rows [B, T, D]."""
        ...

    def prefill(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: PrefillLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """Return the output for a chunk of prompts [B, T, D], and what it adds to the cache."""
        ...

    def decode(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: DecodeLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """Return the output for one token per slot [S, D], and what has changed in the cache."""
        ...


class FeedForward(Part, Protocol):
    """A part that maps each position by itself."""

    def apply(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """Return the output for positions [..., D]."""
        ...
