"""A mixture of experts in place of a dense feed-forward, as a part of a block."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from skyrl_tx.layers.moe import BIASES, MAPS, Clamp, ExpertWeights, Routing, mixture
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.parts.base import LayerAdapters, LayerParams, ShardedSize, Target, UnsupportedModel

EXPERT_PREFIX = "expert_"
"""Begins the names of the experts' maps, which lie next to those of dense feed-forwards in adapters."""


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
    config_keys: tuple[str, str] = ("moe_intermediate_size", "num_experts")
    """The names of the experts' width and number in config.json."""

    def __post_init__(self) -> None:
        chosen, experts = self.routing.num_chosen, self.routing.num_experts
        if not 1 <= chosen <= experts:
            raise UnsupportedModel(f"a token cannot go to {chosen!r} of {experts!r} experts")

    @property
    def marks_matmuls(self) -> bool:
        """See FeedForward."""
        return False

    def targets(self) -> dict[str, Target]:
        """See Part."""
        D, F, E = self.hidden_size, self.mlp_size, self.routing.num_experts
        ends = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
        return {
            EXPERT_PREFIX + name: Target(
                inputs=ends[name][0],
                outputs=ends[name][1],
                axes=("mlp", "embed") if name == "down_proj" else ("embed", "mlp"),
                group="mlp",
                num_experts=E,
            )
            for name in MAPS
        }

    def describe(self) -> dict[str, Parameter]:
        """See Part."""
        E = self.routing.num_experts
        found = {"router": Parameter((E, self.hidden_size), ("expert", "embed"))}
        for name, each in self.targets().items():
            found[name] = Parameter((E, each.inputs, each.outputs), ("expert", *each.axes))
        if self.has_bias:
            found["router_bias"] = Parameter((E,), ("expert",), "zeros")
            for bias, name in zip(BIASES, MAPS, strict=True):
                each = self.targets()[EXPERT_PREFIX + name]
                found[EXPERT_PREFIX + bias] = Parameter((E, each.outputs), ("expert", each.axes[1]), "zeros")
        return found

    def sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part."""
        width, number = self.config_keys
        yield "mlp", width, self.mlp_size
        yield "expert", number, self.routing.num_experts

    def apply(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, layout: Layout) -> jax.Array:
        """See FeedForward."""
        maps = (params[EXPERT_PREFIX + name] for name in MAPS)
        biases = (params.get(EXPERT_PREFIX + name) for name in BIASES)
        weights = ExpertWeights(*maps, *biases, clamp=self.clamp)
        bias_E = params.get("router_bias")
        return mixture(x, params["router"], weights, adapters.experts, self.routing, layout, bias_E)
