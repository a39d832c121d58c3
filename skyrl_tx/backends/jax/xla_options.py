"""Options of XLA's compiler for GPUs, by kind of program. Compilers for other devices know them, and ignore them.

XLA refuses options that it does not know, and drops some as it grows: these are known to exist up to JAX 0.11.
"""

import jax

_Options = dict[str, bool | int | str] | None

_ARE_KNOWN = jax.__version_info__ < (0, 12)

TRAINING: _Options = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True} if _ARE_KNOWN else None
"""The arrays in which a loop over layers keeps what the backward pass reads are not filled with zeros first.

Measured on an H200: 36 of 2,273 ms of a step of Qwen3-8B, and 10 of 379 ms of 0.6B.
"""

_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"

DECODING: _Options = (
    {"xla_gpu_dot_merger_threshold_mb": 4, "xla_gpu_enable_command_buffer": _IN_GRAPHS} if _ARE_KNOWN else None
)
"""Which products are joined, and what is a part of CUDA graphs.

Products of the same rows are joined into one only if their weights are narrow, as the first factors of adapters are.
The product of Qwen3-4B's gate and up, which XLA joins up to 64 MB, took 92 microseconds on an H200 for 256 rows.

XLA's choice has no loops and conditionals in graphs: then the host starts each step after it has read whether there is
one more, and is busy with a slice until that has ended. With them a step of 256 samples by eight layers of
Qwen3-0.6B takes 3.53 in place of 4.05 ms on an H200. A training step takes as long.
"""
