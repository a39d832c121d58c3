"""The Mamba-2 layer (Dao and Gu 2024, arXiv:2405.21060), as a part of a block.

A head's input, and what its group writes and reads (B and C), pass a short convolution each. The output is gated, and
then normalised within a group.

Legend: B batch, T tokens, S slots, G groups, H heads of a group, N dims of what is written and read, P dims of a head,
I channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from skyrl_tx.layers.cache_state import DecodeLayerCache, LayerCache, PrefillLayerCache
from skyrl_tx.layers.lora import linear, multiply
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.recurrence import get_last_inputs, short_conv, short_conv_step, state_space, state_space_step
from skyrl_tx.layers.sharding import Layout
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

_XBC = "x", "b", "c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """See Mixer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    """How many dims the groups write and read."""
    conv_width: int
    has_conv_bias: bool
    norm_epsilon: float
    least_step: float = 0.0
    """The least of the numbers by which a position's decay and input are multiplied."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModel(f"mamba_num_heads = {self.num_heads} cannot be in n_groups = {self.num_groups}")

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
        """See Part. What groups write and read, and steps, have no adapters, as on the hosted service."""
        D, channels = self.hidden_size, self.num_heads * self.head_dim
        into = Target(inputs=D, outputs=channels, axes=("embed", "heads"), group="attn")
        out = Target(inputs=channels, outputs=D, axes=("heads", "embed"), group="attn")
        return {"in_proj_z": into, "in_proj_x": into, "out_proj": out}

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        found = {name: Parameter((each.inputs, each.outputs), each.axes) for name, each in self.targets().items()}
        sizes = self._get_channels()
        for name, size in (("b", sizes["b"]), ("c", sizes["c"]), ("dt", self.num_heads)):
            # As they lie in checkpoints, [out, in]: no maps that adapters change.
            found[f"in_proj_{name}"] = Parameter((size, self.hidden_size), ("heads", "embed"))
        for name, size in sizes.items():
            found[f"{name}_conv"] = Parameter((size, 1, self.conv_width), ("heads", "head_dim", "head_dim"))
            if self.has_conv_bias:
                found[f"{name}_conv_bias"] = Parameter((size,), ("heads",), "zeros")
        for name in ("decay_log", "dt_bias", "skip"):
            init = "ones" if name == "skip" else "zeros"
            found[name] = Parameter((self.num_heads,), ("heads",), init, is_float32=True)
        return found | {"out_norm": Parameter((sizes["x"],), ("heads",), "ones", is_float32=True)}

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part. A group stays whole, with its heads."""
        yield "heads", "n_groups", self.num_groups

    def with_cached_dims(self, multiple: int) -> Self:
        """See Mixer. The cache has no positions."""
        return self

    def describe_cache(self) -> CacheSpec:
        """See Mixer: the state, and the last inputs of each convolution."""
        shape = (self.num_groups, self._heads_per_group, self.state_dim, self.head_dim)
        return describe_recurrent_cache(shape, self._get_channels(), self.conv_width)

    def prepare(self, start_BT: jax.Array | None) -> Masks | None:
        """See Mixer: what the first positions of a sequence do not read."""
        return make_masks(start_BT, self.conv_width)

    def forward(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See Mixer."""
        empty = make_empty_state(self.describe_cache(), x.shape[0], params["in_proj_x"].dtype)
        mixed, _ = self._mix_rows(x, params, adapters, empty, at.layout, masks=at.prepared[self])
        return mixed

    def prefill(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: PrefillLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer. Tokens from `at.size` on are padding and leave no trace."""
        mixed, fixed = self._mix_rows(x, params, adapters, held.fixed, at.layout, size=at.size)
        return mixed, LayerCache(fixed=fixed)

    def decode(
        self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, held: DecodeLayerCache, at: LayerContext
    ) -> tuple[jax.Array, LayerCache]:
        """See Mixer."""
        projected, fixed, convolved = self._project(x, params, adapters), {}, {}
        for name in _XBC:
            tail = held.fixed[f"{name}_take_tail"]
            convolved[name], fixed[f"{name}_take_tail"] = short_conv_step(
                projected[name], get_conv_kernel(params, name), tail
            )
        inputs, c, b = self._split_heads(convolved, params)
        step, decay = self._compute_time_steps(x, params)
        mixed, fixed["state"] = state_space_step(c, b, step[..., None] * inputs, decay, held.fixed["state"])
        return self._project_output(mixed, inputs, projected["z"], params, adapters), LayerCache(fixed=fixed)

    def _mix_rows(
        self,
        x_BTD: jax.Array,
        params: LayerParams,
        adapters: LayerAdapters,
        fixed: dict[str, jax.Array],
        layout: Layout,
        *,
        masks: Masks | None = None,
        size: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output for rows whose state before was `fixed`, and the state after the first `size` tokens."""
        projected = self._project(x_BTD, params, adapters)
        projected |= {name: gather_rows(projected[name], layout) for name in _XBC}
        conv, chunks = (None, None) if masks is None else masks
        convolved = {
            name: short_conv(projected[name], get_conv_kernel(params, name), fixed[f"{name}_take_tail"], conv)
            for name in _XBC
        }
        inputs, c, b = self._split_heads(convolved, params)
        step, decay = self._compute_time_steps(x_BTD, params)
        length = x_BTD.shape[1]
        if size is not None:
            is_token_BT11 = (jnp.arange(length) < size[..., None])[..., None, None]
            step, decay = jnp.where(is_token_BT11, step, 0.0), jnp.where(is_token_BT11, decay, 0.0)
        mixed, state = run_rule(state_space, (c, b, step[..., None] * inputs, decay), fixed["state"], chunks, layout)
        mixed, inputs = shard_rows(mixed, layout), shard_rows(inputs, layout)
        last = length if size is None else size
        tails = {
            f"{name}_take_tail": get_last_inputs(projected[name], fixed[f"{name}_take_tail"], last) for name in _XBC
        }
        return self._project_output(mixed, inputs, projected["z"], params, adapters), {"state": state, **tails}

    def _project(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters) -> dict[str, jax.Array]:
        """Return the inputs of the convolutions and of the gate."""
        found = {name: linear(x, params[f"in_proj_{name}"].T, None) for name in ("b", "c")}
        for name in ("x", "z"):
            found[name] = linear(x, params[f"in_proj_{name}"], adapters.maps.get(f"in_proj_{name}"))
        return found

    def _split_heads(
        self, convolved: dict[str, jax.Array], params: LayerParams
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the inputs of heads [..., G, H, P], and what groups read and write [..., G, N]."""
        if self.has_conv_bias:
            convolved = {name: each + params[f"{name}_conv_bias"] for name, each in convolved.items()}
        x, b, c = (jax.nn.silu(convolved[name]) for name in _XBC)
        leading = x.shape[:-1]
        c, b = (each.reshape(*leading, self.num_groups, self.state_dim) for each in (c, b))
        return x.reshape(*leading, self.num_groups, self._heads_per_group, self.head_dim), c, b

    def _compute_time_steps(self, x: jax.Array, params: LayerParams) -> tuple[jax.Array, jax.Array]:
        """Return the step and the decay of each position, float32 [..., G, H]."""
        step = jax.nn.softplus(multiply(x, params["in_proj_dt"].T) + params["dt_bias"])
        step = jnp.maximum(step, self.least_step) if self.least_step else step
        shape = (*x.shape[:-1], self.num_groups, self._heads_per_group)
        return step.reshape(shape), (-jnp.exp(params["decay_log"]) * step).reshape(shape)

    def _project_output(
        self, mixed: jax.Array, inputs: jax.Array, z: jax.Array, params: LayerParams, adapters: LayerAdapters
    ) -> jax.Array:
        """Return the output map of the heads [..., G, H, P] with their inputs, gated and normalised."""
        mixed = mixed + params["skip"].reshape(self.num_groups, self._heads_per_group, 1) * inputs
        by_group = (self.num_groups, -1)
        gated = (mixed.reshape(z.shape) * jax.nn.silu(z)).reshape(*z.shape[:-1], *by_group)
        normalised = rms_norm(gated, params["out_norm"].reshape(by_group), self.norm_epsilon)
        return linear(normalised.reshape(z.shape), params["out_proj"], adapters.maps.get("out_proj"))

    @property
    def _heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    def _get_channels(self) -> dict[str, int]:
        groups = self.num_groups * self.state_dim
        return {"x": self.num_heads * self.head_dim, "b": groups, "c": groups}
