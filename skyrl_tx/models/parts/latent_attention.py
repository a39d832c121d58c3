"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434), as a part of a block.

Keys and values of all heads follow from one latent for each position. Training computes them. Prompts and steps keep
the latents alone: a query is mapped to their space, where all heads share one key, and what a head has mixed of the
latents is mapped to its value. Both maps are the same for all adapters, which change what comes before and after.

Legend: B batch, T tokens, N heads, C dims of a latent, R rotated dims, P plain dims of a key, V dims of a value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.kernels.registry import Heads
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import linear
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.remat import mark_matmul
from skyrl_tx.layers.rope import Rope, rotate, rotate_pairs
from skyrl_tx.models.parts.attention import attend_rows
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

LATENT_EPSILON = 1e-6
"""The epsilon of the norms of latents, whatever that of other norms is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """See Mixer."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    """The dims of the latent of keys and values."""
    query_latent_dim: int | None
    """The dims of the latent of queries; None if they are mapped from the hidden state."""
    plain_dim: int
    """The dims of a query and a key that are not rotated, and follow from latents."""
    rotary_dim: int
    """The rotated dims, which all heads share in keys."""
    value_dim: int
    rope: Rope
    has_paired_rope: bool = True
    """Whether neighbouring dims are rotated together, not those of two halves."""
    cached_dim: int | None = None
    """The dims of a position in the cache, zeros after the latent and the rotated dims; None for no zeros."""

    def __post_init__(self) -> None:
        if self.rotary_dim % 2:
            raise UnsupportedModel(f"the rotated dims of a head must be an even number, not {self.rotary_dim}")

    @property
    def rotation(self) -> Rotation:
        """See Mixer."""
        return self.rope, self.rotary_dim

    @property
    def position_dim(self) -> int:
        """The dims of what is kept of a position: the latent and the rotated key."""
        return self.latent_dim + self.rotary_dim

    @property
    def heads(self) -> Heads:
        """See Mixer."""
        return Heads(self.plain_dim + self.rotary_dim, self.value_dim, is_latent=True)

    @property
    def cache_heads(self) -> Heads:
        """See Mixer."""
        return self.heads

    def targets(self) -> dict[str, Target]:
        """See Part. The maps from latents are not among them, as on the hosted service."""
        D, latents = self.hidden_size, self.position_dim
        query, size, axis = "q_proj", self._query_size, "heads"
        if self.query_latent_dim is not None:
            query, size, axis = "q_a_proj", self.query_latent_dim, "head_dim"
        return {
            query: Target(inputs=D, outputs=size, axes=("embed", axis), group="attn"),
            "kv_a_proj": Target(inputs=D, outputs=latents, axes=("embed", "head_dim"), group="attn"),
            "o_proj": Target(inputs=self.num_heads * self.value_dim, outputs=D, axes=("heads", "embed"), group="attn"),
        }

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        found = {name: Parameter((each.inputs, each.outputs), each.axes) for name, each in self.targets().items()}
        if self.query_latent_dim is not None:
            found["q_a_norm"] = Parameter((self.query_latent_dim,), ("head_dim",), "ones", is_float32=True)
            found["q_b_proj"] = Parameter((self.query_latent_dim, self._query_size), ("embed", "heads"))
        found["kv_a_norm"] = Parameter((self.latent_dim,), ("head_dim",), "ones", is_float32=True)
        for name, dim in (("k_b", self.plain_dim), ("v_b", self.value_dim)):  # [out, in], to be read head by head
            shape = self.num_heads * dim, self.latent_dim
            found[name] = Parameter(shape, ("heads", "embed"), num_heads=self.num_heads)
        return found

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part. A head stays whole, and so do latents."""
        yield "heads", "num_attention_heads", self.num_heads

    def with_cached_dims(self, multiple: int) -> Self:
        """See Mixer."""
        dim = -(-self.position_dim // multiple) * multiple
        return self if dim == self.position_dim else replace(self, cached_dim=dim)

    def describe_cache(self) -> CacheSpec:
        """See Mixer. The rotated dims of the key follow the latent. Both are the value, of which the latent counts."""
        each = Parameter((1, self.cached_dim or self.position_dim), ("head_dim", "head_dim"), "zeros")
        return CacheSpec(positions=KeyValues(k=each, v=None))  # type: ignore[arg-type]

    def prepare(self, start_BT: jax.Array | None) -> None:
        """See Mixer. Attention compares starts in each of its tiles."""

    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See Mixer."""
        dtype = params["o_proj"].dtype
        plain_BTNP, rotated_BTNR = self._project_queries(x, params, adapters, at)
        latent_BTC, shared_BT1R = self._project_latents(x, params, adapters, at)
        keys_BTNP, v_BTNV = (self._split_heads(linear(latent_BTC, params[name].T, None)) for name in ("k_b", "v_b"))
        shared_BTNR = jnp.broadcast_to(shared_BT1R, rotated_BTNR.shape)
        q_BTNH = jnp.concatenate([plain_BTNP, rotated_BTNR], axis=-1) * self.rope.score_factor
        k_BTNH = jnp.concatenate([keys_BTNP, shared_BTNR], axis=-1).astype(dtype)
        mixed_BTNV = attend_rows(q_BTNH.astype(dtype), k_BTNH, v_BTNV.astype(dtype), None, self.heads, at)
        return self._project_output(mixed_BTNV, params, adapters)

    def prefill(
        self,
        x: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        held: PrefillLayerCache | DecodeLayerCache,
        at: LayerContext,
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer. How latents are kept, and how many tokens each row has, are the cache's business."""
        dtype = params["o_proj"].dtype
        plain, rotated = self._project_queries(x, params, adapters, at)
        latent, shared = self._project_latents(x, params, adapters, at)
        q = jnp.concatenate(
            [_multiply_by_head("...np,npc->...nc", plain, params["k_b"], self.num_heads), rotated], axis=-1
        )
        k = jnp.concatenate([latent[..., None, :], shared], axis=-1)
        if (missing := (self.cached_dim or self.position_dim) - self.position_dim) > 0:
            q, k = (jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, missing)]) for z in (q, k))
        # Attention divides by the root of the dims that it sees, and those are the latent's here.
        stretch = math.sqrt(q.shape[-1] / (self.plain_dim + self.rotary_dim))
        q, past = q * (self.rope.score_factor * stretch), at.kernels.get_past_kernel(self.heads, at.layout)
        mixed, kept = held.attend(q.astype(dtype), k.astype(dtype), None, kernel=past)
        mixed = at.layout.constrain(mixed[..., : self.latent_dim], "batch", *[None] * (mixed.ndim - 3), "heads", None)
        values = _multiply_by_head("...nc,nvc->...nv", mixed, params["v_b"], self.num_heads)
        return self._project_output(values, params, adapters), LayerCache(positions=kept)

    decode = prefill

    @property
    def _query_size(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotary_dim)

    def _project_queries(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Return the plain dims of queries [..., N, P], and the rotated ones [..., N, R]."""
        if self.query_latent_dim is None:
            q = linear(x, params["q_proj"], adapters.maps.get("q_proj"))
        else:
            latent = linear(x, params["q_a_proj"], adapters.maps.get("q_a_proj"))
            q = linear(rms_norm(latent, params["q_a_norm"], LATENT_EPSILON), params["q_b_proj"], None)
        q = self._split_heads(q)
        return q[..., : self.plain_dim], self._rotate(q[..., self.plain_dim :], at)

    def _project_latents(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Return the latents of keys and values [..., C], and the rotated key that all heads share [..., 1, R]."""
        both = linear(x, params["kv_a_proj"], adapters.maps.get("kv_a_proj"))
        latent = rms_norm(both[..., : self.latent_dim], params["kv_a_norm"], LATENT_EPSILON)
        return latent, self._rotate(both[..., None, self.latent_dim :], at)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _rotate(self, x: jax.Array, at: LayerContext) -> jax.Array:
        return (rotate_pairs if self.has_paired_rope else rotate)(x, *at.angles[self.rotation])

    def _project_output(self, mixed: jax.Array, params: LayerParams, adapters: LayerAdapters) -> jax.Array:
        x = mixed.reshape(*mixed.shape[:-2], -1)
        return linear(x, params["o_proj"], adapters.maps.get("o_proj"))


def _multiply_by_head(equation: str, x: jax.Array, weight: jax.Array, num_heads: int) -> jax.Array:
    """Return the product of each head's vector with its own part of a weight [N * dim, C], accumulated in float32."""
    by_head = weight.reshape(num_heads, -1, weight.shape[-1])
    return mark_matmul(jnp.einsum(equation, x.astype(weight.dtype), by_head, preferred_element_type=jnp.float32))
