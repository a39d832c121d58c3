"""Softmax attention with grouped heads and rotary positions, as a part of a block.

Legend: B batch, T tokens, S slots, D embed, N heads, K kv heads, H head dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp

from skyrl_tx.layers.attention import causal_attention
from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.kernels.registry import Heads
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import linear
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.rope import Rope, rotate
from skyrl_tx.layers.sharding import shard_before_exchange
from skyrl_tx.models.parts.base import (
    CacheSpec,
    LayerAdapters,
    LayerContext,
    LayerParams,
    Rotation,
    ShardedSize,
    Target,
    UnsupportedModel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """See Mixer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: positions are not rotated, and order is seen by the mask alone."""
    has_bias: bool = False
    """Whether queries, keys and values have a bias."""
    norm_epsilon: float | None = None
    """The epsilon of the norms of queries and keys; None if they have none."""
    rotary_dims: int | None = None
    """How many dims of each head, the first ones, are rotated; None is all."""
    is_gated: bool = False
    """Whether the query map also returns a gate of the output: in each head the query, then the gate."""
    query_factor: float = 1.0
    """A factor of queries, for scores that are not products divided by the root of the dims of a head."""
    window: int | None = None
    """How many positions each attends to, itself included; None if to all before it."""
    has_output_bias: bool = False
    has_sinks: bool = False
    """Whether each head has a sink: the score of one more key, whose value is 0."""
    cached_dim: int | None = None
    """The dims with which keys and values are in the cache, more than those of a head with zeros; None if as many."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.rotation is not None and self.rotation[1] % 2:
            raise UnsupportedModel(f"the rotated dims of a head must be an even number, not {self.rotation[1]}")

    @property
    def rotation(self) -> Rotation | None:
        """See Mixer."""
        if self.rope is None:
            return None
        return self.rope, self.head_dim if self.rotary_dims is None else self.rotary_dims

    @property
    def heads(self) -> Heads:
        """See Mixer."""
        return Heads(self.head_dim, self.head_dim, self.window, self.has_sinks)

    @property
    def cache_heads(self) -> Heads:
        """See Mixer."""
        dim = self.cached_dim or self.head_dim
        return Heads(dim, dim, self.window, self.has_sinks)

    def targets(self) -> dict[str, Target]:
        """See Part."""
        D, NH, KH = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": Target(inputs=D, outputs=NH * (1 + self.is_gated), axes=("embed", "heads"), group="attn"),
            "k_proj": Target(inputs=D, outputs=KH, axes=("embed", "kv_heads"), group="attn"),
            "v_proj": Target(inputs=D, outputs=KH, axes=("embed", "kv_heads"), group="attn"),
            "o_proj": Target(inputs=NH, outputs=D, axes=("heads", "embed"), group="attn"),
        }

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        maps = self.targets()
        found = {name: Parameter((each.inputs, each.outputs), each.axes) for name, each in maps.items()}
        if self.has_bias:
            for name in ("q", "k", "v"):
                each = maps[f"{name}_proj"]
                found[f"{name}_bias"] = Parameter((each.outputs,), each.axes[1:], "zeros")
        if self.has_output_bias:
            found["o_bias"] = Parameter((self.hidden_size,), ("embed",), "zeros")
        if self.has_sinks:
            found["sinks"] = Parameter((self.num_heads,), ("heads",), "zeros", is_float32=True)
        if self.norm_epsilon is not None:
            for name in ("q_norm", "k_norm"):
                found[name] = Parameter((self.head_dim,), ("head_dim",), "ones", is_float32=True)
        return found

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part. A head stays whole."""
        yield "heads", "num_attention_heads", self.num_heads
        yield "kv_heads", "num_key_value_heads", self.num_kv_heads

    def with_cached_dims(self, multiple: int) -> Self:
        """See Mixer."""
        dim = -(-self.head_dim // multiple) * multiple
        return self if dim == self.head_dim else replace(self, cached_dim=dim)

    def describe_cache(self) -> CacheSpec:
        """See Mixer."""
        each = Parameter((self.num_kv_heads, self.cached_dim or self.head_dim), ("kv_heads", "head_dim"), "zeros")
        return CacheSpec(positions=KeyValues(k=each, v=each))  # type: ignore[arg-type]

    def prepare(self, start_BT: jax.Array | None) -> None:
        """See Mixer. Attention compares starts in each of its tiles."""

    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See Mixer."""
        q_BTNH, k_BTKH, v_BTKH, gate = self._project(x, params, adapters, at)
        mixed_BTNH = attend_rows(q_BTNH, k_BTKH, v_BTKH, params.get("sinks"), self.heads, at)
        return _project_output(mixed_BTNH, gate, params, adapters)

    def prefill(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: PrefillLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer."""
        return self._attend_cache(x, params, adapters, held.attend, at)

    def decode(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: DecodeLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer."""
        attend = partial(held.attend, step=at.kernels.get_step_kernel(self.cache_heads, at.layout))
        return self._attend_cache(x, params, adapters, attend, at)

    def _attend_cache(
        self,
        x: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        attend: Callable[..., tuple[jax.Array, KeyValues]],
        at: LayerContext,
    ) -> tuple[jax.Array, LayerCache]:
        """How keys and values are kept, and how many tokens each row has, are the cache's business."""
        q, k, v, gate = self._project(x, params, adapters, at)
        kernel = at.kernels.get_past_kernel(self.cache_heads, at.layout)
        if (dim := self.cached_dim or self.head_dim) > self.head_dim:
            # Attention divides by the root of the dims that it sees.
            q = (q.astype(jnp.float32) * math.sqrt(dim / self.head_dim)).astype(q.dtype)
            q, k, v = (jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, dim - self.head_dim)]) for z in (q, k, v))
        mixed, kept = attend(q, k, v, params.get("sinks"), window=self.window, kernel=kernel)
        mixed = at.layout.constrain(mixed, "batch", *[None] * (mixed.ndim - 3), "heads", None)
        return _project_output(mixed[..., : self.head_dim], gate, params, adapters), LayerCache(positions=kept)

    def _project(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return rotated queries [..., N, H] and keys [..., K, H], and values, in the weights' type, and the gate."""

        def project_heads(name: str, num_heads: int) -> jax.Array:
            weight, adapter, bias = params[f"{name}_proj"], adapters.maps.get(f"{name}_proj"), f"{name}_bias"
            z = linear(x, weight, adapter, params.get(bias))
            return z.reshape(*z.shape[:-1], num_heads, -1)

        q, k, v = (
            project_heads("q", self.num_heads),
            project_heads("k", self.num_kv_heads),
            project_heads("v", self.num_kv_heads),
        )
        q, gate = jnp.split(q, 2, axis=-1) if self.is_gated else (q, None)
        dtype = params["q_proj"].dtype
        kernel = self._get_rotation_kernel(at)
        if kernel is not None:
            assert self.rotation is not None
            angles = at.angles[self.rotation]
            q, k = (kernel(x.astype(dtype), params[f"{name}_norm"], *angles) for name, x in (("q", q), ("k", k)))
            return q, k, v.astype(dtype), gate
        if self.norm_epsilon is not None:
            q = rms_norm(q, params["q_norm"], self.norm_epsilon)
            k = rms_norm(k, params["k_norm"], self.norm_epsilon)
        q = q if self.query_factor == 1.0 else q * self.query_factor
        if self.rotation is not None:
            angles = at.angles[self.rotation]
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), gate

    def _get_rotation_kernel(self, at: LayerContext) -> Callable[..., jax.Array] | None:
        """Return the kernel for norm and rotation, for products that are in the weights' type; None for plain JAX."""
        if self.norm_epsilon is None or self.rotation is None or self.has_bias or self.query_factor != 1.0:
            return None
        kernel = at.kernels.get_rotation_kernel(self.head_dim, self.rotation[1], at.layout)
        return None if kernel is None else partial(kernel, epsilon=self.norm_epsilon)


def _project_output(
    mixed: jax.Array, gate: jax.Array | None, params: LayerParams, adapters: LayerAdapters
) -> jax.Array:
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    x = mixed.reshape(*mixed.shape[:-2], -1)
    return linear(x, params["o_proj"], adapters.maps.get("o_proj"), params.get("o_bias"))


def attend_rows(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    sinks_N: jax.Array | None,
    heads: Heads,
    at: LayerContext,
) -> jax.Array:
    """Return `causal_attention`, computed without communication between devices.

    If the tokens of a row are sharded, the devices that share it exchange them before and after: each gets whole rows
    of a part of the heads (Jacobs et al. 2023, arXiv:2309.14509). So attention is what it is on one device.
    """
    layout, start_BT = at.layout, at.start_BT
    attend = partial(causal_attention, window=heads.window, kernel=at.kernels.get_attention_kernel(heads))
    if not layout.is_sharded:
        return attend(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N)
    assert layout.mesh is not None
    start_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32) if start_BT is None else start_BT
    if layout.shards_rows:  # more devices than kv heads have copies of them
        num_copies = math.lcm(k_BTKH.shape[2], layout.num_shards("row_heads")) // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(x, num_copies, axis=2) for x in (k_BTKH, v_BTKH))
        q_BTNH, k_BTKH, v_BTKH = (shard_before_exchange(x, layout) for x in (q_BTNH, k_BTKH, v_BTKH))
    query_heads = layout.spec(("batch", None, "row_heads", None), q_BTNH.shape)
    kv_heads = layout.spec(("batch", None, "row_heads", None), k_BTKH.shape)
    sinks = None if sinks_N is None else layout.spec(("row_heads",), sinks_N.shape)
    specs = (query_heads, kv_heads, kv_heads, layout.spec(("batch", None), start_BT.shape), sinks)
    alone = jax.shard_map(attend, mesh=layout.mesh, in_specs=specs, out_specs=query_heads, check_vma=False)
    mixed_BTNH = alone(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N)
    return layout.constrain(mixed_BTNH, "batch", "tokens", "heads", None) if layout.shards_rows else mixed_BTNH
