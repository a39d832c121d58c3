"""`jax.jit` with little optimization: its programs compile in an eighth of the time, and run slowly.

For tests that compare numbers with a tolerance. Tests of equal bits use `jax.jit`, whose programs are the product's.
"""

from functools import partial

import jax

fast_jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
)
