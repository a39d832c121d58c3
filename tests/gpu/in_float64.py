"""Run a program on the CPU with float64 instead of float32, as the reference for rounding errors.

    python in_float64.py PROGRAM ARGUMENT...

The JAX backend names its dtypes `jnp.float32` and `np.float32`, so replacing these names is enough
for training. Sampling does not work: it uses the bits of random numbers.
"""

import importlib
import runpy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def replace_dtypes() -> None:
    # Modules of the backend have constants, so `jnp.float32` is replaced before they are imported. One of them needs
    # the bits of `np.float32`, which is replaced afterwards.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    names: list[Any] = [jnp, np]
    names[0].float32 = jnp.float64
    importlib.import_module("skyrl_tx.backends.jax.backend")
    names[1].float32 = np.float64

    mesh: Any = importlib.import_module("skyrl_tx.backends.jax.mesh")
    mesh.choose_dtype = lambda *_: jnp.dtype(jnp.float64)


if __name__ == "__main__":
    replace_dtypes()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
