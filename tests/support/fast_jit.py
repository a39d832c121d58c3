"""Compilation with little optimization: programs compile in an eighth of the time, and run slowly.

For tests that compare numbers with a tolerance, or count programs. Tests of equal bits use the product's options.

    XLA_FLAGS="$(python -m tests.support.fast_jit)" pytest -m "slow and tolerance"
"""

import os
from functools import partial
from importlib.metadata import entry_points

import jax

_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # parts of a program that threads compile; each costs time
    **(
        {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    ),  # newer versions have no other emitters
}

FAST_COMPILE_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items())
"""The value of XLA_FLAGS for a process that compiles all its programs with little optimization."""

IS_ON_CPU = os.environ.get("JAX_PLATFORMS") == "cpu" or not entry_points(group="jax_plugins")
"""Whether programs are for CPUs; the options are theirs. To ask JAX would start its backends."""


def compiles_as_the_product() -> bool:
    """Return whether programs are compiled with the product's options, so that their bits can be compared."""
    return FAST_COMPILE_FLAGS not in os.environ.get("XLA_FLAGS", "")


fast_jit = partial(jax.jit, compiler_options=_OPTIONS if IS_ON_CPU else None)

if __name__ == "__main__":
    print(FAST_COMPILE_FLAGS)
