"""The remat policy: the activations of a layer that the forward pass keeps for the backward pass.

Norms, rotations and activation functions take less time to recompute than to write to memory, per layer, and to read
again. Matrix products take more.
"""

from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

P = ParamSpec("P")
R = TypeVar("R")

MATMUL = "matmul"
"""The name of what `mark_matmul` marks."""


class RematPolicy(Enum):
    """The part of a layer that the backward pass recomputes, in order of falling memory and rising arithmetic."""

    NONE = "keep every activation that the gradient needs"
    SAVE_MATMULS = "keep the results that `mark_matmul` marks"
    FULL = "keep the layer's input only"


def mark_matmul(x: jax.Array) -> jax.Array:
    """Mark `x` as the result of a matrix product, which SAVE_MATMULS keeps."""
    return checkpoint_name(x, MATMUL)


def with_remat(policy: RematPolicy, layer: Callable[P, R]) -> Callable[P, R]:
    """Return the layer with a remat policy for its gradient."""
    if policy is RematPolicy.NONE:
        return layer
    saved = jax.checkpoint_policies.save_only_these_names(MATMUL) if policy is RematPolicy.SAVE_MATMULS else None
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)  # a scan already prevents common subexpressions
