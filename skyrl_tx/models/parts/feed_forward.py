"""Feed-forward parts: a dense feed-forward, and a mixture of experts (MoE).

Most feed-forwards have a gate (SwiGLU: Shazeer 2020, arXiv:2002.05202). A feed-forward without a
gate applies a squared ReLU (So et al. 2021, arXiv:2109.08668).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.experts import BIAS_AXES, MAP_NAMES, Clamp, ExpertWeights, Routing, count_visits
from skyrl_tx.layers.moe import apply_mixture, estimate_backward_bytes
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.stable_bits import add_unfused, sum_last_dim
from skyrl_tx.models.parts.base import FeedForward, Layer, ShardedSize, StackedParam, Target, UnsupportedModel

Activation = Literal["silu", "gelu_tanh"]
"""The activation of the gate.

"gelu_tanh" is the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415).
"""
_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(FeedForward):
    """A dense feed-forward."""

    hidden_size: int
    mlp_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    """Whether there is a gate, whose activation multiplies the up map.

    Otherwise the up map passes a squared ReLU.
    """

    @override
    def targets(self) -> dict[str, Target]:
        D, F = self.hidden_size, self.mlp_size
        into = Target(inputs=D, outputs=F, axes=("embed", "mlp"), group="mlp")
        down = Target(inputs=F, outputs=D, axes=("mlp", "embed"), group="mlp")
        return {**({"gate_proj": into} if self.is_gated else {}), "up_proj": into, "down_proj": down}

    @override
    def describe(self) -> dict[str, Parameter]:
        return {name: target.describe() for name, target in self.targets().items()}

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        yield "mlp", "intermediate_size", self.mlp_size

    @override
    def apply(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array | None]:
        return self.apply_maps(x, layer), None

    def apply_maps(self, x: jax.Array, layer: Layer, prefix: str = "", weight: jax.Array | None = None) -> jax.Array:
        """Return the output for positions [..., D].

        `prefix` begins the names of the maps. `weight` [..., 1] multiplies the output of each
        position.
        """
        if self.is_gated:
            gate, up = (layer.apply_map(x, prefix + name) for name in ("gate_proj", "up_proj"))
            inner = _ACTIVATIONS[self.activation](gate) * up
        else:
            inner = jnp.square(jax.nn.relu(layer.apply_map(x, prefix + "up_proj")))
        return layer.apply_map(inner if weight is None else inner * weight, prefix + "down_proj")


EXPERT_PREFIX = "expert_"
"""First part of the names of experts' maps.

It separates them from the maps of dense feed-forwards in adapters.
"""
SHARED_PREFIX = "shared_"
"""First part of the names of the shared expert's maps. All tokens pass the shared expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(FeedForward):
    """A mixture of experts, where a router chooses some experts for each token."""

    hidden_size: int
    mlp_size: int
    """Hidden size of each expert."""
    routing: Routing
    has_bias: bool = False
    """Whether the router and the maps of experts have a bias."""
    clamp: Clamp | None = None
    """The activation of experts, if it is not silu(gate) * up."""
    has_correction: bool = False
    """Whether a constant per expert is added to its score when experts are chosen.

    It is not trained.
    """
    shared_size: int | None = None
    """Hidden size of the shared expert, which all tokens pass. None means that there is none."""
    is_gated: bool = True
    """Whether experts have gates, including the shared one. Otherwise they apply a squared ReLU."""
    latent_size: int | None = None
    """Size of the inputs and outputs of experts, if it is not the hidden size.

    Two additional maps then lead from the hidden size to the latent size and back.
    """
    has_shared_gate: bool = True
    """Whether a gate multiplies the output of the shared expert for each token."""
    config_keys: tuple[str, str] = ("moe_intermediate_size", "num_experts")
    """Keys of config.json with the hidden size and the number of experts."""

    def __post_init__(self) -> None:
        chosen, experts = self.routing.num_chosen, self.routing.num_experts
        if not 1 <= chosen <= experts:
            raise UnsupportedModel(f"a token cannot go to {chosen!r} of {experts!r} experts")
        groups, chosen_groups = self.routing.num_groups, self.routing.num_chosen_groups
        if experts % groups or (groups > 1 and experts < 2 * groups):
            raise UnsupportedModel(f"{experts} experts cannot be divided into {groups} groups of two or more")
        if not 1 <= chosen_groups <= groups or chosen > experts // groups * chosen_groups:
            raise UnsupportedModel(
                f"a token cannot go to {chosen} experts in {chosen_groups!r} of {groups!r} groups with "
                f"{experts // groups} experts each"
            )

    @override
    def targets(self) -> dict[str, Target]:
        D, F, E = self.latent_size or self.hidden_size, self.mlp_size, self.routing.num_experts
        into = Target(inputs=D, outputs=F, axes=("embed", "mlp"), group="mlp", num_experts=E)
        down = Target(inputs=F, outputs=D, axes=("mlp", "embed"), group="mlp", num_experts=E)
        targets = {EXPERT_PREFIX + name: down if name == "down_proj" else into for name in self._map_names}

        # The maps to the latents, which are not sharded, and back.
        if self.latent_size is not None:
            targets |= {
                "fc1_latent_proj": Target(inputs=self.hidden_size, outputs=D, axes=("embed", "head_dim"), group="mlp"),
                "fc2_latent_proj": Target(inputs=D, outputs=self.hidden_size, axes=("head_dim", "embed"), group="mlp"),
            }

        shared = {} if self._shared_expert is None else self._shared_expert.targets()
        return targets | {SHARED_PREFIX + name: target for name, target in shared.items()}

    @override
    def describe(self) -> dict[str, Parameter]:
        # Sigmoid scores are computed in float32. Rounded scores near 1 would often be equal.
        E, is_float32 = self.routing.num_experts, self.routing.scores == "sigmoid"
        parameters = {"router": Parameter((E, self.hidden_size), ("expert", "embed"), is_float32=is_float32)}
        if self.has_correction:
            parameters["router_correction"] = Parameter((E,), ("expert",), "zeros", is_float32=True)

        # Maps of experts, and maps to latents and back.
        for name, target in self.targets().items():
            if target.num_experts is not None:
                parameters[name] = Parameter((E, target.inputs, target.outputs), ("expert", *target.axes))
            elif not name.startswith(SHARED_PREFIX):
                parameters[name] = target.describe()

        if self._shared_expert is not None:
            shared = self._shared_expert.describe()
            parameters |= {SHARED_PREFIX + name: parameter for name, parameter in shared.items()}
            if self.has_shared_gate:
                parameters["shared_gate"] = Parameter((1, self.hidden_size), ("head_dim", "embed"))

        if self.has_bias:
            parameters["router_bias"] = Parameter((E,), ("expert",), "zeros")
            for bias, name in zip(BIAS_AXES, MAP_NAMES, strict=True):
                target = self.targets()[EXPERT_PREFIX + name]
                parameters[EXPERT_PREFIX + bias] = Parameter((E, target.outputs), ("expert", target.axes[1]), "zeros")
        return parameters

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        width, number = self.config_keys
        yield "mlp", width, self.mlp_size
        yield "expert", number, self.routing.num_experts
        if self.latent_size is not None:
            yield "embed", "moe_latent_size", self.latent_size
        if self.shared_size is not None:
            yield "mlp", "shared_expert_intermediate_size", self.shared_size

    @override
    def apply(self, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array | None]:
        # Collect the weights of the experts. A kernel may read them from the stack of all layers.
        params, context = layer.params, layer.context
        maps, number = [params.get(EXPERT_PREFIX + name) for name in MAP_NAMES], None
        if isinstance(down := maps[-1], StackedParam):
            maps, number = [weight and weight.stack for weight in maps], down.layer
        gate, up, down = maps
        assert up is not None and down is not None, "experts have these maps"
        biases = (params.get(EXPERT_PREFIX + name) for name in BIAS_AXES)
        weights = ExpertWeights(gate, up, down, *biases, layer=number, clamp=self.clamp)

        # Run the routed experts, between the maps to latents and back if there are any.
        router_params = params.get("router_bias"), params.get("router_correction")
        latent = None if self.latent_size is None else layer.apply_map(x, "fc1_latent_proj")
        settings = self.routing, context.layout, *router_params, latent, context.kernels
        y, expert_MK = apply_mixture(x, params["router"], weights, layer.adapters.experts, *settings)
        if self.latent_size is not None:
            y = layer.apply_map(y, "fc2_latent_proj")

        # Count the tokens of each expert.
        count_E = None
        if context.num_uses_BT is not None:
            count_E = count_visits(expert_MK, context.num_uses_BT.reshape(-1), self.routing.num_experts)
        if self._shared_expert is None:
            return y, count_E

        # Add the shared expert. Its gate is multiplied in before the last map: XLA may fuse a
        # product with the sum after it or not, so a pass with gradient would differ in the last
        # bits from a pass without.
        weight = _compute_shared_gate(x, params["shared_gate"]) if self.has_shared_gate else None
        return add_unfused(y, self._shared_expert.apply_maps(x, layer, SHARED_PREFIX, weight)), count_E

    def estimate_backward_bytes(self, num_tokens: int, rank: int, ep: int, tp: int, itemsize: int) -> int:
        """Return the memory in bytes of the backward pass of one layer on a device.

        The device processes `num_tokens` tokens. The experts are divided over `ep` devices and
        their hidden size over `tp`. Weights take `itemsize` bytes each. See
        `skyrl_tx.layers.moe.estimate_backward_bytes`.
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


def _compute_shared_gate(x: jax.Array, weight_1D: jax.Array) -> jax.Array:
    """Return the weight of the shared expert for each token, [..., 1].

    It is computed as a sum. In a product with a matrix of one column, the bits of a token would
    depend on its row, because XLA on CPU computes the last rows with other code.
    """
    product = x.astype(weight_1D.dtype).astype(jnp.float32) * weight_1D[0].astype(jnp.float32)
    return jax.nn.sigmoid(sum_last_dim(product)[..., None])
