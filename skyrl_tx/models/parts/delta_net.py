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

from skyrl_tx.layers.cache_state import ChunkHeld, Held, StepHeld
from skyrl_tx.layers.delta_rule import delta_rule, delta_step
from skyrl_tx.layers.lora import linear, multiply
from skyrl_tx.layers.norm import rms_norm
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.recurrence import conv_step, last_inputs, short_conv
from skyrl_tx.layers.stable_bits import sum_last
from skyrl_tx.models.parts.base import (
    LayerAdapters,
    LayerParams,
    Place,
    Room,
    Rotation,
    ShardedSize,
    Target,
    UnsupportedModel,
)
from skyrl_tx.models.parts.recurrence import (
    Masks,
    apply_rule,
    empty_state,
    kernel_of,
    masks_of,
    recurrent_room,
    split_rows,
    whole_rows,
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
    def cached_heads(self) -> None:
        """See Mixer."""

    def targets(self) -> dict[str, Target]:
        """See Part. Decays and learning rates have no adapters, as on the hosted service."""
        D, sizes = self.hidden_size, self._channels()
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
        for name, size in self._channels().items():
            found[f"{name}_conv"] = Parameter((size, 1, self.conv_width), ("heads", "head_dim", "head_dim"))
        for name in ("decay_log", "dt_bias"):
            found[name] = Parameter((self.num_value_heads,), ("heads",), "zeros", is_float32=True)
        return found | {"out_norm": Parameter((self.value_dim,), ("head_dim",), "ones", is_float32=True)}

    def sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part. A key head stays whole, with its value heads."""
        yield "heads", "linear_num_key_heads", self.num_key_heads

    def with_cached_dims(self, multiple: int) -> Self:
        """See Mixer. The cache has no positions."""
        return self

    def room(self) -> Room:
        """See Mixer: the state, and the last inputs of each convolution."""
        shape = (self.num_key_heads, self._group, self.key_dim, self.value_dim)
        return recurrent_room(shape, self._channels(), self.conv_width)

    def prepare(self, start_BT: jax.Array | None) -> Masks | None:
        """See Mixer: what the first positions of a sequence do not read."""
        return masks_of(start_BT, self.conv_width)

    def rows(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: Place) -> jax.Array:
        """See Mixer."""
        empty = empty_state(self.room(), x.shape[0], params["in_proj_q"].dtype)
        mixed, _ = self._mix_rows(x, params, adapters, empty, at, masks=at.prepared[self])
        return mixed

    def extend(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: ChunkHeld, at: Place
    ) -> tuple[jax.Array, Held]:
        """See Mixer. Tokens from `at.size` on are padding and leave no trace."""
        mixed, fixed = self._mix_rows(x, params, adapters, held.fixed, at, size=at.size)
        return mixed, Held(fixed=fixed)

    def step(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: StepHeld, at: Place
    ) -> tuple[jax.Array, Held]:
        """See Mixer."""
        projected, fixed, convolved = self._project(x, params, adapters), {}, {}
        for name in _QKV:
            tail = held.fixed[f"{name}_tail"]
            convolved[name], fixed[f"{name}_tail"] = conv_step(projected[name], kernel_of(params, name), tail)
        q, k, v = self._heads(convolved)
        mixed, fixed["state"] = delta_step(q, k, v, *self._rates(x, params), held.fixed["state"])
        return self._finish(mixed, projected["z"], params, adapters), Held(fixed=fixed)

    def _mix_rows(
        self,
        x_BTD: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        fixed: dict[str, jax.Array],
        at: Place,
        *,
        masks: Masks | None = None,
        size: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output for rows whose state before was `fixed`, and the state after the first `size` tokens."""
        layout, projected = at.layout, self._project(x_BTD, params, adapters)
        projected |= {name: whole_rows(projected[name], layout) for name in _QKV}
        conv, chunks = (None, None) if masks is None else masks
        convolved = {
            name: short_conv(projected[name], kernel_of(params, name), fixed[f"{name}_tail"], conv) for name in _QKV
        }
        q, k, v = self._heads(convolved)
        beta, decay = self._rates(x_BTD, params)
        length = x_BTD.shape[1]
        if size is not None:
            is_token_BT11 = (jnp.arange(length) < size[..., None])[..., None, None]
            beta, decay = jnp.where(is_token_BT11, beta, 0.0), jnp.where(is_token_BT11, decay, 0.0)
        rule = partial(delta_rule, together=at.kernels.chunks_together)
        mixed, state = apply_rule(rule, (q, k, v, beta, decay), fixed["state"], chunks, layout)
        mixed = split_rows(mixed, layout)
        last = length if size is None else size
        tails = {f"{name}_tail": last_inputs(projected[name], fixed[f"{name}_tail"], last) for name in _QKV}
        return self._finish(mixed, projected["z"], params, adapters), {"state": state, **tails}

    def _project(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters) -> dict[str, jax.Array]:
        """Return the inputs of the convolutions and of the gate."""
        names = {name: f"in_proj_{name}" for name in (*_QKV, "z")}
        return {short: linear(x, params[name], adapters.maps.get(name)) for short, name in names.items()}

    def _heads(self, convolved: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries and keys [..., K, D] of unit length, queries divided by sqrt(D), and values [..., K, G, E]."""
        q, k, v = (jax.nn.silu(convolved[name]) for name in _QKV)
        leading = q.shape[:-1]
        q, k = (_unit(each.reshape(*leading, self.num_key_heads, self.key_dim)) for each in (q, k))
        v = v.reshape(*leading, self.num_key_heads, self._group, self.value_dim)
        return q * self.key_dim**-0.5, k, v

    def _rates(self, x: jax.Array, params: LayerParams) -> tuple[jax.Array, jax.Array]:
        """Return beta and the decay, float32 [..., K, G]."""
        a, b = (multiply(x, params[f"in_proj_{name}"].T) for name in ("a", "b"))
        decay = -jnp.exp(params["decay_log"]) * jax.nn.softplus(a + params["dt_bias"])
        shape = (*x.shape[:-1], self.num_key_heads, self._group)
        return jax.nn.sigmoid(b).reshape(shape), decay.reshape(shape)

    def _finish(self, mixed: jax.Array, z: jax.Array, params: LayerParams, adapters: LayerAdapters) -> jax.Array:
        """Return the output map of the normalised and gated heads [..., K, G, E]."""
        gate = jax.nn.silu(z).reshape(mixed.shape)
        mixed = rms_norm(mixed, params["out_norm"], self.norm_epsilon) * gate
        return linear(mixed.reshape(z.shape), params["out_proj"], adapters.maps.get("out_proj"))

    @property
    def _group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    def _channels(self) -> dict[str, int]:
        keys = self.num_key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.num_value_heads * self.value_dim}


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(sum_last(jnp.square(x))[..., None] + _NORM_EPSILON)
