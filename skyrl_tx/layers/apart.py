"""A sum that is computed apart from what reads it."""

import jax
from jax.experimental.xla_metadata import set_xla_metadata


@jax.custom_vjp
def add_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` + `y`, of equal shapes, which XLA on CPU computes in a function of its own.

    It would compute the sum again in each loop that reads it, unless a gradient needs it in memory. The loop of a norm
    that computes a sum of four arrays by itself was seen to round squares otherwise than one that reads it, so that a
    pass with a gradient differed from one without in the last bits. An optimization barrier does not help: XLA on CPU
    removes it before it fuses loops.
    """
    return jax.lax.platform_dependent(x, y, cpu=_call, default=jax.lax.add)


def _call(x: jax.Array, y: jax.Array) -> jax.Array:
    with set_xla_metadata(inlineable="false"):
        return jax.jit(jax.lax.add)(x, y)


def _add_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return add_apart(x, y), None


def _add_backward(_: None, d_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    return d_sum, d_sum


add_apart.defvjp(_add_forward, _add_backward)
