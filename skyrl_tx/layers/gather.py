"""Base weights of one layer as it reads them, so that XLA copies none of all layers.

A loop over layers reads slices of parameters. XLA keeps a copy of a whole parameter, all layers of it, in the order of
dims that suits the slices best, unless a slice has an order of its own.

XLA for GPUs gathers an array along its slowest dim only. Here the parts of a weight that is on several devices are the
slowest dim, and the layer in work puts its own weights in order. On TPU the maps of experts have the order in which
they are stored, as products with the transposed maps would have them otherwise.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as DimOrder
from jax.experimental.layout import with_layout_constraint

from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.sharding import Layout


def gather(weight: jax.Array, axes: tuple[Axis, ...], layout: Layout) -> jax.Array:
    """Return a weight of one layer: with whole "embed" dim where XLA would copy it otherwise, else the same array.

    The other dims stay sharded by their `axes`.
    """
    by_platform: dict[str, Callable[[jax.Array], jax.Array]] = {}
    if layout.num_shards("embed") > 1 and "embed" in axes and len(axes) > 1:
        by_platform["cuda"] = partial(_by_parts, axes=axes, layout=layout)
    if "expert" in axes and len(axes) == 3:
        by_platform["tpu"] = _as_stored
    return jax.lax.platform_dependent(weight, **by_platform, default=lambda x: x) if by_platform else weight


def _as_stored(weight: jax.Array) -> jax.Array:
    return with_layout_constraint(weight, DimOrder(major_to_minor=tuple(range(weight.ndim))))


def exchanged(x: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, T, ...], by heads or channels, of which devices will have whole rows of a part: its parts of rows.

    On GPU, where with gathered weights XLA would else exchange more in the backward pass: not the gradient of `x`, but
    sums of the hidden size, of which each device computes a part for all tokens.
    """

    def parts(x: jax.Array) -> jax.Array:
        return layout.constrain(x, "batch", "tokens", "heads", *[None] * (x.ndim - 3))

    return jax.lax.platform_dependent(x, cuda=parts, default=lambda x: x)


def _by_parts(weight: jax.Array, *, axes: tuple[Axis, ...], layout: Layout) -> jax.Array:
    number, dim = layout.num_shards("embed"), axes.index("embed")
    if weight.shape[dim] % number:
        return weight
    before, after = axes[:dim], axes[dim + 1 :]
    parts = weight.reshape(*weight.shape[:dim], number, -1, *weight.shape[dim + 1 :])
    parts = jnp.moveaxis(layout.constrain(parts, *before, "embed", None, *after), dim, 0)
    parts = layout.constrain(parts, "embed", *before, None, *after)
    whole = layout.constrain(parts, None, *before, None, *after)
    return jnp.moveaxis(whole, 0, dim).reshape(weight.shape)
