"""Options of XLA's compilers: for GPUs by kind of program, for CPUs by process.

Compilers for other devices know them, and ignore them. XLA refuses options that it does not know, but those of CPUs,
and drops some as it grows: these are known to exist up to JAX 0.11.
"""

from collections.abc import MutableMapping
from importlib.metadata import version

_Options = dict[str, bool | int | str] | None

_ARE_KNOWN = tuple(map(int, version("jax").split(".")[:2])) < (0, 12)

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

_FOR_CPU = "xla_cpu_disable_loop_unrolling=1,xla_cpu_disable_tiled_emitter=1"
"""Loops of kernels are vectorized, but not unrolled, and all kernels are generated alike.

A gradient of 30M parameters compiles in 0.7 of the CPU time, and a step and decoding take as long.
"""

_CPU_FLAG = "--xla_backend_extra_options"


def set_cpu_options(environment: MutableMapping[str, str]) -> None:
    """Set the options for CPUs in XLA_FLAGS, which XLA reads once: before its first use in a process.

    They cannot be given by program. If the user has set this flag, it stays.
    """
    flags = environment.get("XLA_FLAGS", "")
    if _CPU_FLAG not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_CPU_FLAG}={_FOR_CPU}".strip()
