"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434), as a mixer.

The keys and values of all heads are linear maps of one small latent per position. Training computes
keys and values from the latents. Prefill and decoding cache only the latents: queries are mapped to
the space of the latents, where all heads share one key, and the mixed latents of each head are then
mapped to its value. Adapters do not change these two maps, so they are the same for all rows.

Legend: B batch, T tokens, N heads, C dims of a latent, R rotated dims, P plain dims of a key, V
dims of a value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.kernels.registry import Heads
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import linear
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.remat import mark_matmul
from skyrl_tx.layers.rope import Rope, rotate, rotate_pairs
from skyrl_tx.models.parts.attention import attend_rows
from skyrl_tx.models.parts.base import CacheSpec, Layer, Mixer, Rotation, ShardedSize, Target, UnsupportedModel

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents. It does not depend on the epsilon of the other norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Mixer):
    """Multi-head latent attention of DeepSeek-V3."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    """Number of dimensions of the latent of keys and values."""
    query_latent_dim: int | None
    """Number of dimensions of the latent of queries.

    None means that queries are mapped from the hidden state.
    """
    plain_dim: int
    """Number of dimensions of a query or key that are not rotated.

    They are computed from latents.
    """
    rotary_dim: int
    """Number of rotated dimensions of a query or key. In keys, all heads share them."""
    value_dim: int
    rope: Rope
    has_paired_rope: bool = True
    """Whether RoPE rotates neighbouring dimensions together. Otherwise it pairs the two halves."""
    cached_dim: int | None = None
    """Number of dimensions per position in the cache if it is padded with zeros, else None."""

    def __post_init__(self) -> None:
        if self.rotary_dim % 2:
            raise UnsupportedModel(f"the number of rotated dims of a head must be even, not {self.rotary_dim}")

    @property
    @override
    def rotation(self) -> Rotation:
        return self.rope, self.rotary_dim

    @property
    def position_dim(self) -> int:
        """Number of dimensions that are cached per position: the latent and the rotated key."""
        return self.latent_dim + self.rotary_dim

    @property
    @override
    def heads(self) -> Heads:
        return Heads(self.plain_dim + self.rotary_dim, self.value_dim, is_latent=True)

    @override
    def targets(self) -> dict[str, Target]:
        """Return the maps before the latents and the output map.

        As on the hosted service, maps from latents have no adapters.
        """
        D, latents = self.hidden_size, self.position_dim
        query, size, axis = "q_proj", self._query_size, "heads"
        if self.query_latent_dim is not None:
            query, size, axis = "q_a_proj", self.query_latent_dim, "head_dim"
        return {
            query: Target(inputs=D, outputs=size, axes=("embed", axis), group="attn"),
            "kv_a_proj": Target(inputs=D, outputs=latents, axes=("embed", "head_dim"), group="attn"),
            "o_proj": Target(inputs=self.num_heads * self.value_dim, outputs=D, axes=("heads", "embed"), group="attn"),
        }

    @override
    def describe(self) -> dict[str, Parameter]:
        parameters = {name: target.describe() for name, target in self.targets().items()}
        if self.query_latent_dim is not None:
            parameters["q_a_norm"] = Parameter((self.query_latent_dim,), ("head_dim",), "ones", is_float32=True)
            parameters["q_b_proj"] = Parameter((self.query_latent_dim, self._query_size), ("embed", "heads"))
        parameters["kv_a_norm"] = Parameter((self.latent_dim,), ("head_dim",), "ones", is_float32=True)

        # These maps are stored as [out, in], because they are applied head by head.
        for name, dim in (("k_b", self.plain_dim), ("v_b", self.value_dim)):
            shape = self.num_heads * dim, self.latent_dim
            parameters[name] = Parameter(shape, ("heads", "embed"), num_heads=self.num_heads)
        return parameters

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the number of heads. Heads and latents are not divided."""
        yield "heads", "num_attention_heads", self.num_heads

    @override
    def with_cached_dims(self, multiple: int) -> Self:
        dim = -(-self.position_dim // multiple) * multiple
        return self if dim == self.position_dim else replace(self, cached_dim=dim)

    @override
    def describe_cache(self) -> CacheSpec:
        """Return one array that contains the latent, then the rotated dimensions of the key.

        Attention uses the array as key and as value. Of the mixed values, only the latent is used.
        """
        array = Parameter((1, self.cached_dim or self.position_dim), ("head_dim", "head_dim"), "zeros")
        return CacheSpec(positions=KeyValues(k=array, v=None))  # type: ignore[arg-type]

    @override
    def forward(self, x: jax.Array, layer: Layer) -> jax.Array:
        """Compute keys and values from the latents, and attend to them."""
        params, dtype = layer.params, layer.params["o_proj"].dtype
        plain_BTNP, rotated_BTNR = self._project_queries(x, layer)
        latent_BTC, shared_BT1R = self._project_latents(x, layer)
        keys_BTNP, v_BTNV = (self._split_heads(linear(latent_BTC, params[name].T, None)) for name in ("k_b", "v_b"))
        shared_BTNR = jnp.broadcast_to(shared_BT1R, rotated_BTNR.shape)
        q_BTNH = jnp.concatenate([plain_BTNP, rotated_BTNR], axis=-1) * self.rope.score_factor
        k_BTNH = jnp.concatenate([keys_BTNP, shared_BTNR], axis=-1).astype(dtype)
        mixed_BTNV = attend_rows(q_BTNH.astype(dtype), k_BTNH, v_BTNV.astype(dtype), None, self.heads, layer.context)
        return _project_output(mixed_BTNV, layer)

    @override
    def prefill(
        self, x: jax.Array, layer: Layer, cache: PrefillLayerCache | DecodeLayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Attend to latents. The cache stores them and knows how many tokens each row has."""
        params, context, dtype = layer.params, layer.context, layer.params["o_proj"].dtype
        plain, rotated = self._project_queries(x, layer)
        latent, shared = self._project_latents(x, layer)

        # Map queries to the space of the latents.
        q = jnp.concatenate(
            [_multiply_by_head("...np,npc->...nc", plain, params["k_b"], self.num_heads), rotated], axis=-1
        )
        k = jnp.concatenate([latent[..., None, :], shared], axis=-1)
        if (missing := (self.cached_dim or self.position_dim) - self.position_dim) > 0:
            q, k = (jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, missing)]) for z in (q, k))
        # Attention divides scores by the root of the size of `q`. This factor restores the size of
        # plain queries.
        stretch = math.sqrt(q.shape[-1] / (self.plain_dim + self.rotary_dim))
        q, past = q * (self.rope.score_factor * stretch), context.kernels.get_past_kernel(self.heads, context.layout)

        mixed, kept = cache.attend(q.astype(dtype), k.astype(dtype), None, kernel=past)
        mixed = context.layout.constrain(
            mixed[..., : self.latent_dim], "batch", *[None] * (mixed.ndim - 3), "heads", None
        )
        values = _multiply_by_head("...nc,nvc->...nv", mixed, params["v_b"], self.num_heads)
        return _project_output(values, layer), LayerCache(positions=kept)

    decode = prefill

    @property
    def _query_size(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotary_dim)

    def _project_queries(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
        """Return the plain dimensions [..., N, P] and rotated dimensions [..., N, R] of queries."""
        if self.query_latent_dim is None:
            q = layer.apply_map(x, "q_proj")
        else:
            latent = layer.apply_map(x, "q_a_proj")
            q = layer.apply_map(rms_norm(latent, layer.params["q_a_norm"], LATENT_EPSILON), "q_b_proj")
        q = self._split_heads(q)
        return q[..., : self.plain_dim], self._rotate(q[..., self.plain_dim :], layer)

    def _project_latents(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
        """Return the latents [..., C], and the rotated key that all heads share [..., 1, R]."""
        both = layer.apply_map(x, "kv_a_proj")
        latent = rms_norm(both[..., : self.latent_dim], layer.params["kv_a_norm"], LATENT_EPSILON)
        return latent, self._rotate(both[..., None, self.latent_dim :], layer)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _rotate(self, x: jax.Array, layer: Layer) -> jax.Array:
        return (rotate_pairs if self.has_paired_rope else rotate)(x, *layer.context.angles[self.rotation])


def _project_output(mixed: jax.Array, layer: Layer) -> jax.Array:
    return layer.apply_map(mixed.reshape(*mixed.shape[:-2], -1), "o_proj")


def _multiply_by_head(equation: str, x: jax.Array, weight: jax.Array, num_heads: int) -> jax.Array:
    """Multiply each head's vector by its part of a weight [N * dim, C]. Accumulates in float32."""
    by_head = weight.reshape(num_heads, -1, weight.shape[-1])
    return mark_matmul(jnp.einsum(equation, x.astype(weight.dtype), by_head, preferred_element_type=jnp.float32))
