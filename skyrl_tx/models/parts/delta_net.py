"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as a part of a block.

Queries, keys and values pass a short convolution each. The output is normalised within a head and gated.

Legend: B batch, T tokens, S slots, K key heads, G value heads of each key head, D key dim, E value dim, I channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.lora import linear, multiply
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.recurrence import delta_rule, delta_step, get_last_inputs, short_conv, short_conv_step
from skyrl_tx.layers.stable_bits import sum_last_dim
from skyrl_tx.models.parts.base import (
    CacheSpec,
    LayerAdapters,
    LayerContext,
    LayerParams,
    Masks,
    Rotation,
    ShardedSize,
    Target,
    UnsupportedModel,
    describe_recurrent_cache,
    gather_rows,
    get_conv_kernel,
    make_empty_state,
    make_masks,
    run_rule,
    shard_rows,
)

_QKV = "q", "k", "v"
_NORM_EPSILON = 1e-6  # of queries and keys, in transformers' modeling_qwen3_5.py; no key of config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """See Mixer."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_epsilon: float

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UnsupportedModel(
                f"linear_num_value_heads = {self.num_value_heads} cannot share linear_num_key_heads = "
                f"{self.num_key_heads} evenly"
            )

    @property
    def rotation(self) -> Rotation | None:
        """See Mixer. Positions are not rotated."""
        return None

    @property
    def heads(self) -> None:
        """See Mixer."""

    @property
    def cache_heads(self) -> None:
        """See Mixer."""

    def targets(self) -> dict[str, Target]:
        """See Part. Decays and learning rates have no adapters, as on the hosted service."""
        D, sizes = self.hidden_size, self._get_channels()
        into = {f"in_proj_{name}": size for name, size in (*sizes.items(), ("z", sizes["v"]))}
        found = {
            name: Target(inputs=D, outputs=size, axes=("embed", "heads"), group="attn") for name, size in into.items()
        }
        return found | {"out_proj": Target(inputs=sizes["v"], outputs=D, axes=("heads", "embed"), group="attn")}

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        K = self.num_key_heads
        found = {
            name: Parameter((each.inputs, each.outputs), each.axes, num_heads=1 if name == "out_proj" else K)
            for name, each in self.targets().items()
        }
        for name in ("a", "b"):  # as they lie in checkpoints, [out, in]: no maps that adapters change
            shape = self.num_value_heads, self.hidden_size
            found[f"in_proj_{name}"] = Parameter(shape, ("heads", "embed"), num_heads=K)
        for name, size in self._get_channels().items():
            found[f"{name}_conv"] = Parameter((size, 1, self.conv_width), ("heads", "head_dim", "head_dim"))
        for name in ("decay_log", "dt_bias"):
            found[name] = Parameter((self.num_value_heads,), ("heads",), "zeros", is_float32=True)
        return found | {"out_norm": Parameter((self.value_dim,), ("head_dim",), "ones", is_float32=True)}

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part. A key head stays whole, with its value heads."""
        yield "heads", "linear_num_key_heads", self.num_key_heads

    def with_cached_dims(self, multiple: int) -> Self:
        """See Mixer. The cache has no positions."""
        return self

    def describe_cache(self) -> CacheSpec:
        """See Mixer: the state, and the last inputs of each convolution."""
        shape = (self.num_key_heads, self._heads_per_group, self.key_dim, self.value_dim)
        return describe_recurrent_cache(shape, self._get_channels(), self.conv_width)

    def prepare(self, start_BT: jax.Array | None) -> Masks | None:
        """See Mixer: what the first positions of a sequence do not read."""
        return make_masks(start_BT, self.conv_width)

    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See Mixer."""
        empty = make_empty_state(self.describe_cache(), x.shape[0], params["in_proj_q"].dtype)
        mixed, _ = self._mix_rows(x, params, adapters, empty, at, masks=at.prepared[self])
        return mixed

    def prefill(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: PrefillLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer. Tokens from `at.size` on are padding and leave no trace."""
        mixed, fixed = self._mix_rows(x, params, adapters, held.fixed, at, size=at.size)
        return mixed, LayerCache(fixed=fixed)

    def decode(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: DecodeLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer."""
        projected, fixed, convolved = self._project(x, params, adapters), {}, {}
        for name in _QKV:
            tail = held.fixed[f"{name}_take_tail"]
            convolved[name], fixed[f"{name}_take_tail"] = short_conv_step(
                projected[name], get_conv_kernel(params, name), tail
            )
        q, k, v = self._split_heads(convolved)
        mixed, fixed["state"] = delta_step(q, k, v, *self._compute_rates(x, params), held.fixed["state"])
        return self._project_output(mixed, projected["z"], params, adapters), LayerCache(fixed=fixed)

    def _mix_rows(
        self,
        x_BTD: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        fixed: dict[str, jax.Array],
        at: LayerContext,
        *,
        masks: Masks | None = None,
        size: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output for rows whose state before was `fixed`, and the state after the first `size` tokens."""
        layout, projected = at.layout, self._project(x_BTD, params, adapters)
        projected |= {name: gather_rows(projected[name], layout) for name in _QKV}
        conv, chunks = (None, None) if masks is None else masks
        convolved = {
            name: short_conv(projected[name], get_conv_kernel(params, name), fixed[f"{name}_take_tail"], conv)
            for name in _QKV
        }
        q, k, v = self._split_heads(convolved)
        beta, decay = self._compute_rates(x_BTD, params)
        length = x_BTD.shape[1]
        if size is not None:
            is_token_BT11 = (jnp.arange(length) < size[..., None])[..., None, None]
            beta, decay = jnp.where(is_token_BT11, beta, 0.0), jnp.where(is_token_BT11, decay, 0.0)
        rule = partial(delta_rule, together=at.kernels.chunks_together)
        mixed, state = run_rule(rule, (q, k, v, beta, decay), fixed["state"], chunks, layout)
        mixed = shard_rows(mixed, layout)
        last = length if size is None else size
        tails = {
            f"{name}_take_tail": get_last_inputs(projected[name], fixed[f"{name}_take_tail"], last) for name in _QKV
        }
        return self._project_output(mixed, projected["z"], params, adapters), {"state": state, **tails}

    def _project(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters) -> dict[str, jax.Array]:
        """Return the inputs of the convolutions and of the gate."""
        names = {name: f"in_proj_{name}" for name in (*_QKV, "z")}
        return {short: linear(x, params[name], adapters.maps.get(name)) for short, name in names.items()}

    def _split_heads(self, convolved: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries and keys [..., K, D] of unit length, queries divided by sqrt(D), and values [..., K, G, E]."""
        q, k, v = (jax.nn.silu(convolved[name]) for name in _QKV)
        leading = q.shape[:-1]
        q, k = (_normalize(each.reshape(*leading, self.num_key_heads, self.key_dim)) for each in (q, k))
        v = v.reshape(*leading, self.num_key_heads, self._heads_per_group, self.value_dim)
        return q * self.key_dim**-0.5, k, v

    def _compute_rates(self, x: jax.Array, params: LayerParams) -> tuple[jax.Array, jax.Array]:
        """Return beta and the decay, float32 [..., K, G]."""
        a, b = (multiply(x, params[f"in_proj_{name}"].T) for name in ("a", "b"))
        decay = -jnp.exp(params["decay_log"]) * jax.nn.softplus(a + params["dt_bias"])
        shape = (*x.shape[:-1], self.num_key_heads, self._heads_per_group)
        return jax.nn.sigmoid(b).reshape(shape), decay.reshape(shape)

    def _project_output(
        self, mixed: jax.Array, z: jax.Array, params: LayerParams, adapters: LayerAdapters
    ) -> jax.Array:
        """Return the output map of the normalised and gated heads [..., K, G, E]."""
        gate = jax.nn.silu(z).reshape(mixed.shape)
        mixed = rms_norm(mixed, params["out_norm"], self.norm_epsilon) * gate
        return linear(mixed.reshape(z.shape), params["out_proj"], adapters.maps.get("out_proj"))

    @property
    def _heads_per_group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    def _get_channels(self) -> dict[str, int]:
        keys = self.num_key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.num_value_heads * self.value_dim}


def _normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(sum_last_dim(jnp.square(x))[..., None] + _NORM_EPSILON)
