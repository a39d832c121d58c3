"""What the backward pass keeps of a layer: the results of products, from which the rest is soon computed anew.

Norms, rotations and activations take less time to compute than to write out, for each layer, and to read again.
"""

from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

P = ParamSpec("P")
R = TypeVar("R")

_PRODUCT = "product"


class Kept(Enum):
    """How much is kept, from most memory to most arithmetic."""

    ALL = "whatever the gradient names"
    PRODUCTS = "what `product` marks"
    INPUTS = "what the layer was given: all of it is computed twice"


def product(x: jax.Array) -> jax.Array:
    """Mark the result of a product, to be kept."""
    return checkpoint_name(x, _PRODUCT)


def keeping(kept: Kept, layer: Callable[P, R]) -> Callable[P, R]:
    """Return the layer, whose gradient keeps so much."""
    if kept is Kept.ALL:
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(_PRODUCT) if kept is Kept.PRODUCTS else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)  # a scan already keeps the two computations apart
