"""The Mamba-2 layer (Dao and Gu 2024, arXiv:2405.21060), as a mixer.

Each head has an input x. Each group of heads has two vectors: b writes to its state, and c reads
from it. x, b and c each pass a short convolution. The output is gated and then normalised within
each group.

Legend: G groups, H heads of a group, N state dim, P dims of a head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.lora import linear, multiply
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.recurrent_rules import state_space, state_space_step
from skyrl_tx.models.parts.base import Layer, LayerContext, ShardedSize, Target, UnsupportedModel
from skyrl_tx.models.parts.recurrent import RecurrentMixer, Rule, mask_padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(RecurrentMixer):
    """The Mamba-2 layer of Nemotron-H."""

    conv_names: ClassVar[tuple[str, ...]] = ("x", "b", "c")
    step: ClassVar[Rule] = staticmethod(state_space_step)

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    """Number of dimensions of b and c."""
    conv_width: int
    has_conv_bias: bool
    norm_epsilon: float
    least_step: float = 0.0
    """Lower bound of the time step."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModel(
                f"config.json has mamba_num_heads = {self.num_heads}; it must be a multiple of "
                f"n_groups = {self.num_groups}"
            )

    @override
    def targets(self) -> dict[str, Target]:
        """Return the maps.

        As on the hosted service, the maps of b, c and time steps have no adapters.
        """
        D, channels = self.hidden_size, self.num_heads * self.head_dim
        into = Target(inputs=D, outputs=channels, axes=("embed", "heads"), group="attn")
        out = Target(inputs=channels, outputs=D, axes=("heads", "embed"), group="attn")
        return {"in_proj_z": into, "in_proj_x": into, "out_proj": out}

    @override
    def describe(self) -> dict[str, Parameter]:
        parameters = {name: target.describe() for name, target in self.targets().items()}
        sizes = self._get_channels()

        # Maps without adapters are stored as in checkpoints, [out, in].
        for name, size in (("b", sizes["b"]), ("c", sizes["c"]), ("dt", self.num_heads)):
            parameters[f"in_proj_{name}"] = Parameter((size, self.hidden_size), ("heads", "embed"))

        for name, size in sizes.items():
            parameters[f"{name}_conv"] = Parameter((size, 1, self.conv_width), ("heads", "head_dim", "head_dim"))
            if self.has_conv_bias:
                parameters[f"{name}_conv_bias"] = Parameter((size,), ("heads",), "zeros")
        for name in ("decay_log", "dt_bias", "skip"):
            init = "ones" if name == "skip" else "zeros"
            parameters[name] = Parameter((self.num_heads,), ("heads",), init, is_float32=True)
        return parameters | {"out_norm": Parameter((sizes["x"],), ("heads",), "ones", is_float32=True)}

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the number of groups. A group and its heads are not divided."""
        yield "heads", "n_groups", self.num_groups

    @property
    @override
    def _state_shape(self) -> tuple[int, int, int, int]:
        return self.num_groups, self._heads_per_group, self.state_dim, self.head_dim

    @override
    def _get_channels(self) -> dict[str, int]:
        groups = self.num_groups * self.state_dim
        return {"x": self.num_heads * self.head_dim, "b": groups, "c": groups}

    @override
    def _project(self, x: jax.Array, layer: Layer) -> dict[str, jax.Array]:
        projected = {name: linear(x, layer.params[f"in_proj_{name}"].T, None) for name in ("b", "c")}
        return projected | {name: layer.apply_map(x, f"in_proj_{name}") for name in ("x", "z")}

    @override
    def _get_rule_inputs(
        self, x: jax.Array, convolved: Mapping[str, jax.Array], layer: Layer, is_token: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Return c and b of groups [..., G, N], inputs [..., G, H, P], and the decay [..., G, H].

        The inputs of heads are multiplied by their time steps. The output map also reads them as
        they are. Time steps and the logarithms of decays are the rates, float32.
        """
        params, by_head = layer.params, (*x.shape[:-1], self.num_groups, self._heads_per_group)
        if self.has_conv_bias:
            convolved = {name: channels + params[f"{name}_conv_bias"] for name, channels in convolved.items()}
        heads, b, c = (jax.nn.silu(convolved[name]) for name in self.conv_names)
        c, b = (vector.reshape(*by_head[:-1], self.state_dim) for vector in (c, b))
        heads = heads.reshape(*by_head, self.head_dim)

        step = jax.nn.softplus(multiply(x, params["in_proj_dt"].T) + params["dt_bias"])
        step = jnp.maximum(step, self.least_step) if self.least_step else step
        step, decay = step.reshape(by_head), (-jnp.exp(params["decay_log"]) * step).reshape(by_head)
        step, decay = mask_padding(step, is_token), mask_padding(decay, is_token)
        return (c, b, step[..., None] * heads, decay), heads

    @override
    def _get_rule(self, context: LayerContext) -> Rule:
        return state_space

    @override
    def _project_output(self, mixed: jax.Array, skipped: jax.Array | None, z: jax.Array, layer: Layer) -> jax.Array:
        """Add the heads' inputs to the results [..., G, H, P], gate, normalise, map to outputs."""
        assert skipped is not None
        params = layer.params
        mixed = mixed + params["skip"].reshape(self.num_groups, self._heads_per_group, 1) * skipped
        by_group = (self.num_groups, -1)
        gated = (mixed.reshape(z.shape) * jax.nn.silu(z)).reshape(*z.shape[:-1], *by_group)
        normalised = rms_norm(gated, params["out_norm"].reshape(by_group), self.norm_epsilon)
        return layer.apply_map(normalised.reshape(z.shape), "out_proj")

    @property
    def _heads_per_group(self) -> int:
        return self.num_heads // self.num_groups
