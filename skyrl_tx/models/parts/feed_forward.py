"""The feed-forward parts of a block: a dense one, or a mixture of experts.

Most dense feed-forwards have a gate (SwiGLU: Shazeer 2020, arXiv:2002.05202). Those without a gate square a
relu (So et al. 2021, arXiv:2109.08668).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from skyrl_tx.layers.experts import BIAS_AXES, MAP_NAMES, Clamp, ExpertWeights
from skyrl_tx.layers.grouped_experts import Routing
from skyrl_tx.layers.lora import linear
from skyrl_tx.layers.moe import apply_mixture, estimate_backward_bytes
from skyrl_tx.layers.parameter import Axis, Parameter
from skyrl_tx.layers.stable_bits import add_unfused, sum_last_dim
from skyrl_tx.models.parts.base import (
    LayerAdapters,
    LayerContext,
    LayerParams,
    ShardedSize,
    StackedParam,
    Target,
    UnsupportedModel,
)

Activation = Literal["silu", "gelu_tanh"]
"""The function of the gate. The second is GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), approximated by tanh."""
_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """See FeedForward."""

    hidden_size: int
    mlp_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether the map up is multiplied by the activation of a gate, or else squared where it is above 0."""

    def targets(self) -> dict[str, Target]:
        """See Part."""
        D, F = self.hidden_size, self.mlp_size
        gate = {"gate_proj": Target(inputs=D, outputs=F, axes=("embed", "mlp"), group="mlp")} if self.is_gated else {}
        return gate | {
            "up_proj": Target(inputs=D, outputs=F, axes=("embed", "mlp"), group="mlp"),
            "down_proj": Target(inputs=F, outputs=D, axes=("mlp", "embed"), group="mlp"),
        }

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        return {name: Parameter((each.inputs, each.outputs), each.axes) for name, each in self.targets().items()}

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part."""
        yield "mlp", "intermediate_size", self.mlp_size

    def apply(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See FeedForward."""
        return apply_dense(x, params, adapters, activation=self.activation)


def apply_dense(
    x: jax.Array,
    params: LayerParams,
    adapters: LayerAdapters,
    prefix: str = "",
    weight: jax.Array | None = None,
    activation: Activation = "silu",
) -> jax.Array:
    """Return the output of the feed-forward whose maps have this prefix, times a weight of each position [..., 1].

    It has a gate if `params` have one.
    """

    def apply_map(x: jax.Array, name: str) -> jax.Array:
        return linear(x, params[prefix + name], adapters.maps.get(prefix + name))

    if prefix + "gate_proj" in params:
        gate, up = apply_map(x, "gate_proj"), apply_map(x, "up_proj")
        inner = _ACTIVATIONS[activation](gate) * up
    else:
        inner = jnp.square(jax.nn.relu(apply_map(x, "up_proj")))
    return apply_map(inner if weight is None else inner * weight, "down_proj")


EXPERT_PREFIX = "expert_"
"""Begins the names of the experts' maps, which lie next to those of dense feed-forwards in adapters."""
SHARED_PREFIX = "shared_"
"""Begins the names of the maps of the expert that all tokens share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """See FeedForward."""

    hidden_size: int
    mlp_size: int
    """The width of each expert."""
    routing: Routing
    has_bias: bool = False
    """Whether the router and the experts' maps have a bias."""
    clamp: Clamp | None = None
    """The activation of the experts, if it is not silu(gate) * up."""
    has_correction: bool = False
    """Whether a correction of each expert's score takes part in the choice of experts. It is not trained."""
    shared_size: int | None = None
    """The width of one more expert, to which all tokens go. None: there is none."""
    is_gated: bool = True
    """Whether experts have gates, the shared one too. Without, they square what is above 0."""
    latent_size: int | None = None
    """The width of what experts read and return, if maps lead from the hidden size to it and back."""
    has_shared_gate: bool = True
    """Whether a gate weights the output of that expert for each token."""
    config_keys: tuple[str, str] = ("moe_intermediate_size", "num_experts")
    """The names of the experts' width and number in config.json."""

    def __post_init__(self) -> None:
        chosen, experts = self.routing.num_chosen, self.routing.num_experts
        if not 1 <= chosen <= experts:
            raise UnsupportedModel(f"a token cannot go to {chosen!r} of {experts!r} experts")
        groups, chosen_groups = self.routing.num_groups, self.routing.num_chosen_groups
        if experts % groups or (groups > 1 and experts < 2 * groups):
            raise UnsupportedModel(f"{experts} experts cannot be in {groups} groups of two or more each")
        if not 1 <= chosen_groups <= groups or chosen > experts // groups * chosen_groups:
            raise UnsupportedModel(f"a token cannot go to {chosen} experts in {chosen_groups!r} of {groups!r} groups")

    def targets(self) -> dict[str, Target]:
        """See Part."""
        D, F, E = self.latent_size or self.hidden_size, self.mlp_size, self.routing.num_experts
        ends = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
        found = {
            EXPERT_PREFIX + name: Target(
                inputs=ends[name][0],
                outputs=ends[name][1],
                axes=("mlp", "embed") if name == "down_proj" else ("embed", "mlp"),
                group="mlp",
                num_experts=E,
            )
            for name in self._map_names
        }
        if self.latent_size is not None:
            ends = {"fc1_latent_proj": (self.hidden_size, D), "fc2_latent_proj": (D, self.hidden_size)}
            axes: dict[str, tuple[Axis, Axis]] = {
                "fc1_latent_proj": ("embed", "head_dim"),  # latents are whole on each device
                "fc2_latent_proj": ("head_dim", "embed"),
            }
            found |= {
                name: Target(inputs=inputs, outputs=outputs, axes=axes[name], group="mlp")
                for name, (inputs, outputs) in ends.items()
            }
        shared = {} if self._shared_expert is None else self._shared_expert.targets()
        return found | {SHARED_PREFIX + name: each for name, each in shared.items()}

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        E = self.routing.num_experts
        # Models with sigmoid scores compute them in float32: rounded ones would often be equal, near 1.
        is_float32 = self.routing.scores == "sigmoid"
        found = {"router": Parameter((E, self.hidden_size), ("expert", "embed"), is_float32=is_float32)}
        if self.has_correction:
            found["router_correction"] = Parameter((E,), ("expert",), "zeros", is_float32=True)
        for name, each in self.targets().items():
            if each.num_experts is not None:
                found[name] = Parameter((E, each.inputs, each.outputs), ("expert", *each.axes))
            elif not name.startswith(SHARED_PREFIX):
                found[name] = Parameter((each.inputs, each.outputs), each.axes)
        if self._shared_expert is not None:
            found |= {SHARED_PREFIX + name: each for name, each in self._shared_expert.describe().items()}
        if self._shared_expert is not None and self.has_shared_gate:
            found["shared_gate"] = Parameter((1, self.hidden_size), ("head_dim", "embed"))
        if self.has_bias:
            found["router_bias"] = Parameter((E,), ("expert",), "zeros")
            for bias, name in zip(BIAS_AXES, MAP_NAMES, strict=True):
                each = self.targets()[EXPERT_PREFIX + name]
                found[EXPERT_PREFIX + bias] = Parameter((E, each.outputs), ("expert", each.axes[1]), "zeros")
        return found

    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part."""
        width, number = self.config_keys
        yield "mlp", width, self.mlp_size
        yield "expert", number, self.routing.num_experts
        if self.latent_size is not None:
            yield "embed", "moe_latent_size", self.latent_size
        if self.shared_size is not None:
            yield "mlp", "shared_expert_intermediate_size", self.shared_size

    def apply(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: LayerContext) -> jax.Array:
        """See FeedForward."""
        maps, layer = [params.get(EXPERT_PREFIX + name) for name in MAP_NAMES], None
        if isinstance(down := maps[-1], StackedParam):
            maps, layer = [each and each.stack for each in maps], down.layer
        gate, up, down = maps
        assert up is not None and down is not None, "experts have these maps"
        biases = (params.get(EXPERT_PREFIX + name) for name in BIAS_AXES)
        weights = ExpertWeights(gate, up, down, *biases, layer=layer, clamp=self.clamp)
        own = params.get("router_bias"), params.get("router_correction")
        latent = None if self.latent_size is None else _apply_map(x, "fc1_latent_proj", params, adapters)
        settings = self.routing, at.layout, *own, latent, at.kernels
        y = apply_mixture(x, params["router"], weights, adapters.experts, *settings)
        if self.latent_size is not None:
            y = _apply_map(y, "fc2_latent_proj", params, adapters)
        if self.shared_size is None:
            return y
        # The weight is multiplied in before the last map. A product next to the sum would be rounded apart from it or
        # not, as XLA fuses them: a pass with a gradient would differ from one without.
        weight = _compute_shared_gate(x, params["shared_gate"]) if self.has_shared_gate else None
        return add_unfused(y, apply_dense(x, params, adapters, SHARED_PREFIX, weight))

    def estimate_backward_bytes(self, num_tokens: int, rank: int, ep: int, tp: int, itemsize: int) -> int:
        """Return the bytes that the backward pass of one layer takes on a device through which `num_tokens` pass.

        See `skyrl_tx.layers.moe.estimate_backward_bytes`; weights have `itemsize`.
        """
        return estimate_backward_bytes(
            num_visits=num_tokens * self.routing.num_chosen,
            num_experts=self.routing.num_experts // ep,
            hidden_size=self.latent_size or self.hidden_size,
            mlp_size=self.mlp_size // tp,
            rank=rank,
            itemsize=itemsize,
            num_maps=len(self._map_names),
        )

    @property
    def _map_names(self) -> tuple[str, ...]:
        return MAP_NAMES if self.is_gated else MAP_NAMES[1:]

    @property
    def _shared_expert(self) -> Dense | None:
        if self.shared_size is None:
            return None
        return Dense(hidden_size=self.hidden_size, mlp_size=self.shared_size, is_gated=self.is_gated)


def _apply_map(x: jax.Array, name: str, params: LayerParams, adapters: LayerAdapters) -> jax.Array:
    return linear(x, params[name], adapters.maps.get(name))


def _compute_shared_gate(x: jax.Array, weight_1D: jax.Array) -> jax.Array:
    """Return the weight of the shared expert for each token, [..., 1].

    As a sum, not as a product with a matrix of one column: there the bits of a token depend on its row, because XLA on
    CPU computes the last rows by other code.
    """
    product = x.astype(weight_1D.dtype).astype(jnp.float32) * weight_1D[0].astype(jnp.float32)
    return jax.nn.sigmoid(sum_last_dim(product)[..., None])
