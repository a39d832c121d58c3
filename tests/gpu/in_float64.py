"""Run a program on the CPU with float64 instead of float32, as the reference for rounding errors.

    python in_float64.py PROGRAM ARGUMENT...

Dtypes of the JAX backend are `jnp.float32` and `np.float32`, so replacing these names is enough for
training. Sampling does not work: it uses the bits of random numbers.
"""

import importlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64  # type: ignore[misc,assignment]

importlib.import_module("skyrl_tx.backends.jax.backend")  # constants of modules are float64, too
np.float32 = jnp.float64  # type: ignore[misc,assignment]

import skyrl_tx.backends.jax.backend  # noqa: E402  (constants of modules are float64, too)
from skyrl_tx.backends.jax import mesh  # noqa: E402

np.float32 = np.float64  # type: ignore[misc,assignment]
importlib.import_module("skyrl_tx.backends.jax.mesh").choose_dtype = lambda *_: jnp.dtype(jnp.float64)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
