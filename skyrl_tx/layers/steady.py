"""Sums of rows whose bits do not depend on how many rows there are.

XLA on CPU adds in one of two orders: operations on fewer than 4,096 numbers have another than larger ones. With rows of
zeros added to small ones, all are larger. The products of a step have one order by themselves (`models.by_layer`).

Legend: S rows.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_tx.layers.apart import exp_apart

FEWEST_NUMBERS = 4096


def steady(function: Callable[..., Any], *arrays: jax.Array, width: int | None = None) -> Any:
    """Return a function of the arrays [S, ...], which must compute each row by itself.

    `width` is the size of a row of the operation that adds, which is that of the first array if it is None.
    """
    num_rows = arrays[0].shape[0]
    width = math.prod(arrays[0].shape[1:]) if width is None else width
    if num_rows * width >= FEWEST_NUMBERS or num_rows * width == 0:
        return function(*arrays)
    missing = -(-FEWEST_NUMBERS // width) - num_rows
    padded = (jnp.pad(each, ((0, missing), *[(0, 0)] * (each.ndim - 1))) for each in arrays)
    return jax.tree.map(lambda leaf: leaf[:num_rows], function(*padded))


def sum_last(x: jax.Array) -> jax.Array:
    """Return the sum over the last dim."""
    return steady(lambda x: x.sum(axis=-1), x)


def sum_exp(x: jax.Array, included: jax.Array | None = None) -> jax.Array:
    """Return the sum of exp(`x`) over the last dim, of all or of those included.

    XLA on CPU leaves large sums of exp to a library, whose exponential function has other last bits. Which it is must
    follow from the width of a row, not from the number of rows.
    """
    exp = jnp.exp if 2 * math.prod(x.shape[1:]) >= FEWEST_NUMBERS else exp_apart
    weights = exp(x)
    return sum_last(weights if included is None else jnp.where(included, weights, 0.0))
