"""A dense feed-forward, as a part of a block.

Most have a gate (SwiGLU: Shazeer 2020, arXiv:2002.05202); those without square a relu (So et al. 2021,
arXiv:2109.08668).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from skyrl_tx.layers.lora import linear
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.models.parts.base import LayerAdapters, LayerParams, Place, ShardedSize, Target

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

    def sharded_sizes(self) -> Iterator[ShardedSize]:
        """See Part."""
        yield "mlp", "intermediate_size", self.mlp_size

    def apply(self, x: jax.Array, params: LayerParams, adapters: LayerAdapters, at: Place) -> jax.Array:
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

    def apply(x: jax.Array, name: str) -> jax.Array:
        return linear(x, params[prefix + name], adapters.maps.get(prefix + name))

    if prefix + "gate_proj" in params:
        gate, up = apply(x, "gate_proj"), apply(x, "up_proj")
        inner = _ACTIVATIONS[activation](gate) * up
    else:
        inner = jnp.square(jax.nn.relu(apply(x, "up_proj")))
    return apply(inner if weight is None else inner * weight, "down_proj")
