"""The two kinds of parts of a decoder block, mixers and feed-forwards, and what the decoder passes to them.

A part is frozen data with all its sizes: part of `ModelConfig`, hence hashable. Its methods are pure functions. The
names of its parameters and linear maps are unique within a block; adapters and checkpoints use the same names.

Legend: B batch, T tokens, S slots, D embed, n layers of a stack.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.experts import ExpertAdapters
from skyrl_tx.layers.kernels.registry import NO_KERNELS, Heads, Kernels
from skyrl_tx.layers.lora import RowAdapter
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.recurrence import ChunkMasks, make_conv_masks
from skyrl_tx.layers.rope import Rope
from skyrl_tx.layers.sharding import Layout, shard_before_exchange

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


Masks = tuple[jax.Array, ChunkMasks]
"""The positions that the first ones of a sequence do not read: in the convolutions, and in the rule."""


def describe_recurrent_cache(
    state: tuple[int, int, int, int], channels: Mapping[str, int], conv_width: int
) -> CacheSpec:
    """Return the room of a state, whose first dim is cut like heads, and of the last inputs of each convolution."""
    axes: tuple[Axis, ...] = ("heads", "head_dim", "head_dim", "head_dim")
    tails = {
        f"{name}_take_tail": Parameter((conv_width - 1, size), ("head_dim", "heads"), "zeros")
        for name, size in channels.items()
    }
    return CacheSpec(fixed={"state": Parameter(state, axes, "zeros", is_float32=True), **tails})


def make_empty_state(room: CacheSpec, num_rows: int, dtype: Any) -> dict[str, jax.Array]:
    """Return what `room` keeps of rows that begin, [B, ...]; `dtype` is that of the weights."""
    return {
        name: jnp.zeros((num_rows, *each.shape), jnp.float32 if each.is_float32 else dtype)
        for name, each in room.fixed.items()
    }


def make_masks(start_BT: jax.Array | None, conv_width: int) -> Masks | None:
    """Return the masks of rows of several sequences; None if a row holds one."""
    return None if start_BT is None else (make_conv_masks(start_BT, conv_width), ChunkMasks.from_starts(start_BT))


def get_conv_kernel(params: LayerParams, name: str) -> jax.Array:
    """Return the weights of a convolution, [W, I]."""
    return params[f"{name}_conv"][:, 0].T


def gather_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, T, ...], by heads or channels, so that a device has all tokens of its rows, of a part of the heads."""
    if not layout.shards_rows:
        return x
    return layout.constrain(shard_before_exchange(x, layout), "batch", None, "row_heads", *[None] * (x.ndim - 3))


def shard_rows(x: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, T, ...], by heads or channels, so that a device has its part of a row again."""
    return layout.constrain(x, "batch", "tokens", "heads", *[None] * (x.ndim - 3)) if layout.shards_rows else x


def run_rule(
    rule: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    state: jax.Array,
    masks: ChunkMasks | None,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Return `rule(*inputs, state, masks)`, computed without communication between devices.

    Inputs and outputs are [B, T, heads, ...], states [B, heads, ...].
    """
    if not layout.is_sharded:
        return rule(*inputs, state, masks)
    assert layout.mesh is not None
    rows: tuple[Axis | None, ...] = ("batch", None, "row_heads")

    def get_spec(x: jax.Array, axes: tuple[Axis | None, ...]) -> Any:
        return layout.spec((*axes, *[None] * (x.ndim - len(axes))), x.shape)

    of_state = get_spec(state, ("batch", "row_heads"))
    in_specs = (
        *(get_spec(each, rows) for each in inputs),
        of_state,
        jax.tree.map(lambda m: get_spec(m, (None, "batch")), masks),
    )
    outputs, _ = jax.eval_shape(rule, *inputs, state, masks)
    out_specs = get_spec(outputs, rows), of_state
    alone = jax.shard_map(rule, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return alone(*inputs, state, masks)
