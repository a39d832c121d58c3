"""Softmax attention with grouped key/value heads and RoPE, as a mixer.

Legend: B batch, T tokens, S slots, D embed, N heads, K kv heads, H head dim.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.attention import causal_attention
from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.kernels.registry import Heads
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.rope import Rope, rotate
from skyrl_tx.layers.sharding import shard_before_exchange
from skyrl_tx.models.parts.base import (
    CacheSpec,
    Layer,
    LayerContext,
    Mixer,
    Rotation,
    ShardedSize,
    Target,
    UnsupportedModel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Mixer):
    """Multi-head attention.

    With fewer kv heads than heads it is grouped-query or multi-query attention.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None means that positions are not rotated; only the causal mask tells the order of tokens."""
    has_bias: bool = False
    """Whether the maps of queries, keys and values have a bias."""
    norm_epsilon: float | None = None
    """Epsilon of the norms of queries and keys, or None if they are not normalised."""
    rotary_dims: int | None = None
    """Number of rotated dimensions, from the first one of each head. None means all."""
    is_gated: bool = False
    """Whether the query map also computes a gate of the output.

    Each head has its query first, then its gate.
    """
    query_factor: float = 1.0
    """A factor of the queries, if scores are not scaled by 1/sqrt(head_dim)."""
    window: int | None = None
    """Size of the sliding window: how many positions a token attends to, including itself.

    None means all.
    """
    has_output_bias: bool = False
    has_sinks: bool = False
    """Whether each head has an attention sink: the score of one additional key whose value is 0."""
    cached_dim: int | None = None
    """Number of dimensions of cached keys and values if they are padded with zeros, else None."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"config.json has {self.num_heads} attention heads and {self.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if self.rotation is not None and self.rotation[1] % 2:
            raise UnsupportedModel(f"the number of rotated dims of a head must be even, not {self.rotation[1]}")

    @property
    @override
    def rotation(self) -> Rotation | None:
        if self.rope is None:
            return None
        return self.rope, self.head_dim if self.rotary_dims is None else self.rotary_dims

    @property
    @override
    def heads(self) -> Heads:
        return Heads(self.head_dim, self.head_dim, self.window, self.has_sinks)

    @property
    @override
    def cache_heads(self) -> Heads:
        dim = self.cached_dim or self.head_dim
        return Heads(dim, dim, self.window, self.has_sinks)

    @override
    def targets(self) -> dict[str, Target]:
        D, NH, KH = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": Target(inputs=D, outputs=NH * (1 + self.is_gated), axes=("embed", "heads"), group="attn"),
            "k_proj": Target(inputs=D, outputs=KH, axes=("embed", "kv_heads"), group="attn"),
            "v_proj": Target(inputs=D, outputs=KH, axes=("embed", "kv_heads"), group="attn"),
            "o_proj": Target(inputs=NH, outputs=D, axes=("heads", "embed"), group="attn"),
        }

    @override
    def describe(self) -> dict[str, Parameter]:
        maps = self.targets()
        parameters = {name: target.describe() for name, target in maps.items()}
        if self.has_bias:
            for name in ("q", "k", "v"):
                target = maps[f"{name}_proj"]
                parameters[f"{name}_bias"] = Parameter((target.outputs,), target.axes[1:], "zeros")
        if self.has_output_bias:
            parameters["o_bias"] = Parameter((self.hidden_size,), ("embed",), "zeros")
        if self.has_sinks:
            parameters["sinks"] = Parameter((self.num_heads,), ("heads",), "zeros", is_float32=True)
        if self.norm_epsilon is not None:
            for name in ("q_norm", "k_norm"):
                parameters[name] = Parameter((self.head_dim,), ("head_dim",), "ones", is_float32=True)
        return parameters

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the numbers of heads. A head is not divided."""
        yield "heads", "num_attention_heads", self.num_heads
        yield "kv_heads", "num_key_value_heads", self.num_kv_heads

    @override
    def with_cached_dims(self, multiple: int) -> Self:
        dim = -(-self.head_dim // multiple) * multiple
        return self if dim == self.head_dim else replace(self, cached_dim=dim)

    @override
    def describe_cache(self) -> CacheSpec:
        shape = (self.num_kv_heads, self.cached_dim or self.head_dim)
        array = Parameter(shape, ("kv_heads", "head_dim"), "zeros")
        return CacheSpec(positions=KeyValues(k=array, v=array))  # type: ignore[arg-type]

    @override
    def forward(self, x: jax.Array, layer: Layer) -> jax.Array:
        q_BTNH, k_BTKH, v_BTKH, gate = self._project(x, layer)
        mixed_BTNH = attend_rows(q_BTNH, k_BTKH, v_BTKH, layer.params.get("sinks"), self.heads, layer.context)
        return _project_output(mixed_BTNH, gate, layer)

    @override
    def prefill(self, x: jax.Array, layer: Layer, cache: PrefillLayerCache) -> tuple[jax.Array, LayerCache]:
        return self._attend_cache(x, layer, cache.attend)

    @override
    def decode(self, x: jax.Array, layer: Layer, cache: DecodeLayerCache) -> tuple[jax.Array, LayerCache]:
        step = layer.context.kernels.get_step_kernel(self.cache_heads, layer.context.layout)
        return self._attend_cache(x, layer, partial(cache.attend, step=step))

    def _attend_cache(
        self, x: jax.Array, layer: Layer, attend: Callable[..., tuple[jax.Array, KeyValues]]
    ) -> tuple[jax.Array, LayerCache]:
        """Project the inputs and call `attend`, a method of the cache.

        The cache stores keys and values and knows how many tokens each row has.
        """
        q, k, v, gate = self._project(x, layer)
        layout = layer.context.layout
        kernel = layer.context.kernels.get_past_kernel(self.cache_heads, layout)
        if (dim := self.cached_dim or self.head_dim) > self.head_dim:
            # Attention divides scores by the root of the padded size, so the queries are scaled to
            # undo this.
            q = (q.astype(jnp.float32) * math.sqrt(dim / self.head_dim)).astype(q.dtype)
            q, k, v = (jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, dim - self.head_dim)]) for z in (q, k, v))

        mixed, kept = attend(q, k, v, layer.params.get("sinks"), window=self.window, kernel=kernel)
        mixed = layout.constrain(mixed, "batch", *[None] * (mixed.ndim - 3), "heads", None)
        return _project_output(mixed[..., : self.head_dim], gate, layer), LayerCache(positions=kept)

    def _project(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return rotated queries [..., N, H] and keys [..., K, H], values, and the gate, if any.

        All but the gate have the type of the weights.
        """

        def project_heads(name: str, num_heads: int) -> jax.Array:
            z = layer.apply_map(x, f"{name}_proj", f"{name}_bias")
            return z.reshape(*z.shape[:-1], num_heads, -1)

        q = project_heads("q", self.num_heads)
        k, v = (project_heads(name, self.num_kv_heads) for name in ("k", "v"))
        q, gate = jnp.split(q, 2, axis=-1) if self.is_gated else (q, None)

        # A kernel may compute norm and rotation together.
        params, dtype = layer.params, layer.params["q_proj"].dtype
        angles = None if self.rotation is None else layer.context.angles[self.rotation]
        kernel = self._get_rotation_kernel(layer.context)
        if kernel is not None and angles is not None:
            q, k = (kernel(x.astype(dtype), params[f"{name}_norm"], *angles) for name, x in (("q", q), ("k", k)))
            return q, k, v.astype(dtype), gate

        if self.norm_epsilon is not None:
            q = rms_norm(q, params["q_norm"], self.norm_epsilon)
            k = rms_norm(k, params["k_norm"], self.norm_epsilon)
        q = q if self.query_factor == 1.0 else q * self.query_factor
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), gate

    def _get_rotation_kernel(self, context: LayerContext) -> Callable[..., jax.Array] | None:
        """Return the kernel that computes norm and rotation together, or None to use plain JAX.

        The kernel reads queries and keys in the type of the weights.
        """
        if self.norm_epsilon is None or self.rotation is None or self.has_bias or self.query_factor != 1.0:
            return None
        kernel = context.kernels.get_rotation_kernel(self.head_dim, self.rotation[1], context.layout)
        return None if kernel is None else partial(kernel, epsilon=self.norm_epsilon)


def _project_output(mixed: jax.Array, gate: jax.Array | None, layer: Layer) -> jax.Array:
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    return layer.apply_map(mixed.reshape(*mixed.shape[:-2], -1), "o_proj", "o_bias")


def attend_rows(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    sinks_N: jax.Array | None,
    heads: Heads,
    context: LayerContext,
) -> jax.Array:
    """Return `causal_attention` of whole rows. While it runs, devices do not communicate.

    If the tokens of a row are sharded, its devices exchange data before and after, so that each
    device has whole rows for a part of the heads (Jacobs et al. 2023, arXiv:2309.14509). The
    attention itself is then the same as on one device.
    """
    layout, start_BT = context.layout, context.start_BT
    attend = partial(causal_attention, window=heads.window, kernel=context.kernels.get_attention_kernel(heads))
    if not layout.is_sharded:
        return attend(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N, prefix=context.prefix)

    assert context.prefix is None, "a mesh does not share prefixes"
    assert layout.mesh is not None
    start_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32) if start_BT is None else start_BT
    if layout.shards_rows:  # if there are more devices than kv heads, kv heads are duplicated
        num_copies = math.lcm(k_BTKH.shape[2], layout.num_shards("row_heads")) // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(x, num_copies, axis=2) for x in (k_BTKH, v_BTKH))
        q_BTNH, k_BTKH, v_BTKH = (shard_before_exchange(x, layout) for x in (q_BTNH, k_BTKH, v_BTKH))

    # Run the attention of each device on its rows and heads.
    query_heads = layout.spec(("batch", None, "row_heads", None), q_BTNH.shape)
    kv_heads = layout.spec(("batch", None, "row_heads", None), k_BTKH.shape)
    sinks = None if sinks_N is None else layout.spec(("row_heads",), sinks_N.shape)
    specs = (query_heads, kv_heads, kv_heads, layout.spec(("batch", None), start_BT.shape), sinks)
    alone = jax.shard_map(attend, mesh=layout.mesh, in_specs=specs, out_specs=query_heads, check_vma=False)
    mixed_BTNH = alone(q_BTNH, k_BTKH, v_BTKH, start_BT, sinks_N)
    return layout.constrain(mixed_BTNH, "batch", "tokens", "heads", None) if layout.shards_rows else mixed_BTNH
