"""Random numbers by key: Threefry 2x32 with 20 rounds.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". The numbers equal
the numbers of `jax.random`. On CPU, `jax.random` runs the rounds as loops, which are 48 of the 248
kernels of a program that draws tokens. Here the rounds are plain arithmetic, which XLA compiles to
one kernel per use.

Legend: S rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
"""The constant for the third word of a key, from Skein (Ferguson et al. 2010)."""
_ONE = np.float32(1).view(np.uint32)
_MANTISSA_BITS = 23


def fold_in(key_S2: jax.Array, number_S: jax.Array) -> jax.Array:
    """Return a new key from each key and a number, uint32 [S, 2]."""
    number_S = number_S.astype(jnp.uint32)
    return jnp.stack(_threefry(key_S2, jnp.zeros_like(number_S), number_S), axis=-1)


def uniform(key_S2: jax.Array) -> jax.Array:
    """Return one number in [0, 1) for each key, float32 [S]."""
    zero_S = jnp.zeros(key_S2.shape[:-1], jnp.uint32)
    high_S, low_S = _threefry(key_S2, zero_S, zero_S)
    between_1_and_2_S = (high_S ^ low_S) >> (32 - _MANTISSA_BITS) | _ONE
    return jax.lax.bitcast_convert_type(between_1_and_2_S, jnp.float32) - 1.0


def _threefry(key_S2: jax.Array, x_S: jax.Array, y_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an encrypted block of two words."""
    first_S, second_S = key_S2[..., 0], key_S2[..., 1]
    words = first_S, second_S, first_S ^ second_S ^ _PARITY
    x_S, y_S = x_S + words[0], y_S + words[1]
    for number in range(1, 6):
        for rotation in _ROTATIONS[(number - 1) % 2]:
            x_S = x_S + y_S
            y_S = (y_S << rotation | y_S >> (32 - rotation)) ^ x_S
        x_S, y_S = x_S + words[number % 3], y_S + words[(number + 1) % 3] + np.uint32(number)
    return x_S, y_S
