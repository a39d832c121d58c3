"""Results that XLA on CPU computes by themselves, and not again in each loop that reads them.

It fuses a result into the loops that read it, unless another part of the program needs it in memory, as a gradient
does. The same numbers then come from other instructions, so that a pass with a gradient differs from one without in the
last bits. An optimization barrier does not help: XLA on CPU removes it before it fuses loops.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata


@jax.custom_vjp
def add_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` + `y`, of equal shapes.

    The loop of a norm that computes a sum of four arrays by itself was seen to round squares otherwise than one that
    reads it.
    """
    return _apart(jax.lax.add, x, y)


def _add_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return add_apart(x, y), None


def _add_backward(_: None, d_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    return d_sum, d_sum


add_apart.defvjp(_add_forward, _add_backward)


def exp_apart(x: jax.Array) -> jax.Array:
    """Return exp(`x`).

    With a sum that follows, XLA leaves it to a library whose exponential function has other last bits.
    """
    return _apart(jnp.exp, x)


def _apart(function: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(*arguments, cpu=partial(_call, function), default=function)


def _call(function: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return jax.jit(function)(*arguments)
