"""The random numbers for a key equal JAX's, for any key and number."""

import jax
import numpy as np

from skyrl_tx.backends.jax.sample.draw import fold_in, uniform

ROWS = 1000


def test_keys_and_numbers_are_those_of_jax() -> None:
    draw = np.random.default_rng(0)
    words = draw.integers(0, 2**32, (ROWS, 2), dtype=np.uint32)
    numbers = draw.integers(0, 2**32, ROWS, dtype=np.uint32)
    words[:4] = [[0, 0], [0, 2**32 - 1], [2**32 - 1, 0], [2**32 - 1, 2**32 - 1]]
    numbers[:2] = 0, 2**32 - 1
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(words, impl="threefry2x32"), numbers)
    found = jax.jit(fold_in)(words, numbers)
    np.testing.assert_array_equal(found, jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.jit(uniform)(found), jax.vmap(jax.random.uniform)(keys))
