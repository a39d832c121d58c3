"""`jax.jit` that compiles fast programs slowly run: for tests that compare numbers with a tolerance.

Tests of equal bits use `jax.jit`, whose programs are those of the product.
"""

from functools import partial

import jax

fast_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)
