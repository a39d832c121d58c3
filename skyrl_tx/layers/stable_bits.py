"""Bit-stable operations for XLA on CPU: results must not depend on the number of rows or on fusion.

**Order of sums.** XLA on CPU sums in one of two orders: operations on fewer than 4,096 numbers use
a different order than larger ones. `apply_batch_invariant` pads small operations with rows of
zeros, so that all of them are large. The matrix products of a decode step have one order without
padding (see `models.unstack_params`).

**Fusion.** XLA fuses a result into the loops that read it, unless another part of the program needs
it in memory, as a gradient does. Different instructions then compute the same numbers, and a pass
with a gradient differs from a pass without one in the last bits. An optimization barrier does not
help, because XLA on CPU removes it before it fuses loops. The `..._unfused` functions prevent the
fusion.

Legend: S rows.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata


@jax.custom_vjp
def add_unfused(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` + `y`, of equal shapes, without fusing the sum into its readers.

    The loop of a norm that computed a sum of four arrays itself was seen to round squares
    differently from a loop that read the sum.
    """
    return _run_unfused(jax.lax.add, x, y)


def _add_unfused_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return add_unfused(x, y), None


def _add_unfused_backward(_: None, d_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    return d_sum, d_sum


add_unfused.defvjp(_add_unfused_forward, _add_unfused_backward)


def exp_unfused(x: jax.Array) -> jax.Array:
    """Return exp(`x`) without fusing it into its readers.

    If a sum follows, XLA would call a library whose exponential function has different last bits.
    """
    return _run_unfused(jnp.exp, x)


def _run_unfused(function: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(*arguments, cpu=partial(_call_not_inlined, function), default=function)


def _call_not_inlined(function: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return jax.jit(function)(*arguments)


MIN_STABLE_SIZE = 4096
"""Operations on at least this many numbers sum in the same order."""


def apply_batch_invariant(function: Callable[..., Any], *arrays: jax.Array, width: int | None = None) -> Any:
    """Apply a function to arrays [S, ...] that are padded to a stable size.

    The function must compute each row independently. `width` is the size of a row in the operation
    that sums (default: of the first array).
    """
    num_rows = arrays[0].shape[0]
    width = math.prod(arrays[0].shape[1:]) if width is None else width
    if num_rows * width >= MIN_STABLE_SIZE or num_rows * width == 0:
        return function(*arrays)
    missing = -(-MIN_STABLE_SIZE // width) - num_rows
    padded = (jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1))) for array in arrays)
    return jax.tree.map(lambda leaf: leaf[:num_rows], function(*padded))


def sum_last_dim(x: jax.Array) -> jax.Array:
    """Return the sum over the last dim."""
    return apply_batch_invariant(lambda x: x.sum(axis=-1), x)


def sum_exp(x: jax.Array, included: jax.Array | None = None) -> jax.Array:
    """Return the sum of exp(`x`) over the last dim, of all numbers or of the included ones.

    XLA on CPU computes large sums of exp with a library whose exponential function has different
    last bits. The choice must depend on the width of a row, not on the number of rows.
    """
    exp = jnp.exp if 2 * math.prod(x.shape[1:]) >= MIN_STABLE_SIZE else exp_unfused
    weights = exp(x)
    return sum_last_dim(weights if included is None else jnp.where(included, weights, 0.0))
