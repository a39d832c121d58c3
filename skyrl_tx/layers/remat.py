"""Activation checkpointing: which activations of a layer are kept for the backward pass.

Recomputing norms, rotations and activation functions takes less time than writing them to memory
and reading them back. Recomputing matrix products takes more. The inputs of layers can be offloaded
to host memory: XLA copies the input of a layer to the host while it computes later layers, and
copies it back before it computes the gradient of the layer.
"""

from collections.abc import Callable
from enum import Enum
from typing import Concatenate, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

P = ParamSpec("P")
R = TypeVar("R")

MATMUL = "matmul"
"""The name that `mark_matmul` gives to arrays."""
_INPUT = "layer_input"
HOST_MEMORY = "pinned_host"
"""JAX's name for host memory that devices can copy to and from. On CPU, nothing is copied."""


class RematPolicy(Enum):
    """Which part of a layer the backward pass recomputes, by falling memory and rising arithmetic."""

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
    """Wrap a layer, whose first argument is its input, in a remat policy."""

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
