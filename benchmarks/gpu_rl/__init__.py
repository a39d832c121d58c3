"""Phases of `benchmarks.bench_gpu_rl`. None of them imports JAX: the server alone holds the GPU's memory."""
