"""The remat policy: the activations of a layer that the forward pass keeps for the backward pass.

Norms, rotations and activation functions take less time to recompute than to write to memory, per layer, and to read
again. Matrix products take more. The inputs of layers can be in the host's memory: XLA copies each there while later
layers are computed, and back before the gradient of its layer is.
"""

from collections.abc import Callable
from enum import Enum
from typing import Concatenate, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

P = ParamSpec("P")
R = TypeVar("R")

MATMUL = "matmul"
"""The name of what `mark_matmul` marks."""
_INPUT = "layer_input"
HOST_MEMORY = "pinned_host"
"""JAX's name of the memory that devices copy to, and back. On CPU it is the same memory, and nothing is copied."""


class RematPolicy(Enum):
    """The part of a layer that the backward pass recomputes, in order of falling memory and rising arithmetic."""

    NONE = "keep every activation that the gradient needs"
    SAVE_MATMULS = "keep the results that `mark_matmul` marks"
    FULL = "keep the layer's input only"
    OFFLOAD = "keep the layer's input only, in the host's memory"


def mark_matmul(x: jax.Array) -> jax.Array:
    """Mark `x` as the result of a matrix product, which SAVE_MATMULS keeps."""
    return checkpoint_name(x, MATMUL)


def with_remat(
    policy: RematPolicy, layer: Callable[Concatenate[jax.Array, P], R]
) -> Callable[Concatenate[jax.Array, P], R]:
    """Return the layer, whose first argument is its input, with a remat policy for its gradient."""

    def run_with_named_input(x: jax.Array, *others: P.args, **settings: P.kwargs) -> R:
        return layer(checkpoint_name(x, _INPUT), *others, **settings)

    if policy is RematPolicy.NONE:
        return layer
    run, saved = layer, None
    if policy is RematPolicy.SAVE_MATMULS:
        saved = jax.checkpoint_policies.save_only_these_names(MATMUL)
    elif policy is RematPolicy.OFFLOAD:
        run = run_with_named_input
        saved = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    return jax.checkpoint(run, policy=saved, prevent_cse=False)  # a scan already prevents common subexpressions
