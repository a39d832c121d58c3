"""Measurements of the process and of the machine: time, compilations, memory, matmul rate and memory bandwidth."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # jax._src.dispatch.BACKEND_COMPILE_EVENT
MATMUL_SIZE = 1024
BANDWIDTH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall time, and CPU time of all cores together; on a shared machine the CPU time varies less."""

    wall_s: float
    cpu_s: float


def measure_cost(work: Callable[[], object]) -> Cost:
    """Run `work`, which must wait for its own results, and return its cost."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


@dataclass(slots=True)
class CompileCounter:
    """The durations of all XLA compilations since its construction."""

    seconds: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.seconds.append(duration_secs)

    def take(self) -> dict[str, float | int]:
        """Return number and seconds of the compilations since the last call."""
        taken, self.seconds = self.seconds, []
        return {"compiles": len(taken), "compile_s": round(sum(taken), 2)}


class MatmulRate:
    """The rate of matrix products in XLA, the reference for all shares of the machine's arithmetic."""

    def __init__(self, size: int = MATMUL_SIZE, dtype: Any = jnp.float32) -> None:
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        self._size = size
        self._matrices = (x, x.T.copy())
        self._multiply = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest"))
        self.sample()

    def sample(self) -> Cost:
        """Return the seconds per FLOP, averaged over a few products."""
        repeats = 8
        cost = measure_cost(lambda: jax.block_until_ready([self._multiply(*self._matrices) for _ in range(repeats)]))
        flops = repeats * 2 * self._size**3
        return Cost(cost.wall_s / flops, cost.cpu_s / flops)


class Bandwidth:
    """The rate at which XLA reads an array that exceeds the processor's caches."""

    def __init__(self, num_bytes: int = BANDWIDTH_BYTES) -> None:
        self._array = jnp.ones(num_bytes // 4, jnp.float32)
        self._sum = jax.jit(jnp.sum)
        self.sample()

    def sample(self) -> Cost:
        """Return the seconds per byte, averaged over a few reads."""
        repeats = 4
        cost = measure_cost(lambda: jax.block_until_ready([self._sum(self._array) for _ in range(repeats)]))
        num_bytes = repeats * self._array.nbytes
        return Cost(cost.wall_s / num_bytes, cost.cpu_s / num_bytes)


def reset_peak_memory() -> None:
    """Reset the process's peak of resident memory (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> int:
    """Return the peak memory of the first device if it reports one, else the process's peak of resident memory."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] >> 20
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
