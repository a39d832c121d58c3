"""Functions for devices and hosts that know nothing about models.

- Check that the devices still compute.
- Track compilation, which may take much longer than a computation.
- Convert errors of exhausted memory.
- Join other hosts, and move arrays to and from the devices of all hosts.

**Exhausted memory.** On one host, only the request that needs the memory fails. On multiple hosts,
the other hosts may already be in the program that this host could not start, and wait for it there.
This module therefore does not retry on multiple hosts. Rank 0 collects the errors of all hosts, and
repeats the call only if all of them ran out of memory in the same way.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from skyrl_tx.contract.backend import HostRank
from skyrl_tx.contract.errors import BackendLost, CapacityError
from skyrl_tx.process.memory import trim_allocator

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 10
"""JAX ends the process of a host that has not heard from another host for this long."""
_SHUTDOWN_TIMEOUT_S = 10

_PROBE_SIZE = 8
"""How many numbers each device adds in `check_devices`."""
_COMPILATION = "/jax/core/compile/"
"""Prefix of the JAX events for tracing, lowering and compiling a program."""
_COMPILED = _COMPILATION + "backend_compile_duration"
"""The JAX event of the compiler. It also occurs if the program is read from the compilation cache.
"""
_TRIM_DELAY_S = 1.0
"""How long after a compilation the allocator returns free memory to the system.

A compilation takes hundreds of MiB of host memory. JAX frees a part of this memory only after the
event that reports the end of the compilation.
"""
_MIB = 2**20


# Health of the devices


def check_devices(mesh: Mesh) -> None:
    """Add numbers on all devices of a mesh. Raises BackendLost if that fails or gives a wrong sum.

    After most driver errors, for example CUDA_ERROR_ILLEGAL_ADDRESS, or a GPU that has fallen off
    the bus, every later operation of the process fails too. On a single host, exhausted memory is
    ignored, because later operations may succeed. On multiple hosts it raises BackendLost, because
    the other hosts wait for this sum.
    """
    numbers = np.arange(_PROBE_SIZE * mesh.size, dtype=np.float32)
    try:
        placed = put(numbers, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        total = float(_sum(placed))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error) and not is_distributed():
            return
        raise BackendLost(f"the devices do not compute any more: {error}") from error
    if total != numbers.sum():
        raise BackendLost(
            f"the devices compute wrong numbers: the sum of {numbers.size} numbers is {total}, not {numbers.sum()}"
        )


@jax.jit
def _sum(numbers: jax.Array) -> jax.Array:
    return numbers.sum()


# Compilation


class CompilationMonitor:
    """Count the programs that this process is compiling and has compiled. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0  # tracing, lowering and compiling may be nested
        self._num_waiting = 0
        self._num_computing = 0
        self._last_end = -math.inf
        self._trim_at: float | None = None
        self._this_thread = threading.local()
        self.num_compiled = 0
        self.seconds = 0.0
        """Total time in the compiler, without tracing and lowering."""

    @property
    def is_compiling(self) -> bool:
        """Whether any call is waiting until a program is traced, lowered or compiled."""
        return self._num_running > 0

    @property
    def seconds_since_call(self) -> float:
        """How long the cores that compile have been free, in seconds; 0 while a call uses them.

        A call uses them if it compiles a program on its own thread, or if it is `computing`. A call
        that waits for a background thread does not use them.
        """
        is_busy = self._num_computing > 0 or self._num_running > self._num_waiting
        return 0.0 if is_busy else time.monotonic() - self._last_end

    def exclude_this_thread(self) -> None:
        """Mark this thread as a background compiler.

        Its programs are counted, but no call waits for them.
        """
        self._this_thread.is_excluded = True

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Mark that this thread waits for a program that another thread compiles."""
        self._change(1, 1)
        try:
            yield
        finally:
            self._change(-1, -1)

    @contextmanager
    def computing(self) -> Generator[None]:
        """Mark that this thread computes on the cores that also compile."""
        self._change(computing=1)
        try:
            yield
        finally:
            self._change(computing=-1)
            self._last_end = time.monotonic()

    def on_start(self, event: str, value: float, **_: str | int) -> None:
        """Record that tracing, lowering or compiling has started.

        JAX calls this listener for scalar events. At the start, it reports the time as a scalar.
        """
        self._count(event, 1)

    def on_end(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Record that tracing, lowering or compiling has ended, successfully or not.

        JAX calls this listener for durations.
        """
        self._count(event, -1)
        if event == _COMPILED:
            with self._lock:
                self.num_compiled += 1
                self.seconds += duration_secs
                self._trim_at = self._trim_at or time.monotonic() + _TRIM_DELAY_S

    def return_memory(self) -> None:
        """Give memory that compilations have freed back to the system, after `_TRIM_DELAY_S`."""
        if self._trim_at is not None and time.monotonic() >= self._trim_at:
            self._trim_at = None
            trim_allocator()

    def _count(self, event: str, change: int) -> None:
        if event.startswith(_COMPILATION) and not getattr(self._this_thread, "is_excluded", False):
            self._change(change)
            self._last_end = time.monotonic()

    def _change(self, running: int = 0, waiting: int = 0, computing: int = 0) -> None:
        with self._lock:
            self._num_running += running
            self._num_waiting += waiting
            self._num_computing += computing


@functools.cache
def get_compilation_monitor() -> CompilationMonitor:
    """Return the monitor of this process.

    The first call registers it, and must come before anything is compiled.
    """
    monitor = CompilationMonitor()
    jax.monitoring.register_scalar_listener(monitor.on_start)
    jax.monitoring.register_event_duration_secs_listener(monitor.on_end)
    return monitor


# Exhausted memory


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device, or the host on behalf of a device, ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def make_capacity_error(purpose: str, error: Exception) -> CapacityError:
    """Log the error of an exhausted device, and return the error for the client.

    `purpose` is what the memory was for, for example "another model in training".
    """
    log.error("no memory left for %s: %s", purpose, error)
    return CapacityError(
        f"the device has no memory left for {purpose}. State is unchanged. To free memory, restart the server "
        "with a lower --backend-config.max-lora-adapters, --backend-config.max-lora-rank or "
        "--backend-config.max-sample-tokens"
    )


@contextmanager
def convert_memory_errors(purpose: str) -> Generator[None]:
    """Raise CapacityError if the device runs out of memory in the `with` block.

    On multiple hosts, raise BackendLost instead, because other hosts may have had enough memory and
    wait for this host. `purpose` is described in `make_capacity_error`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        capacity = make_capacity_error(purpose, error)
        check_single_host(error)
        raise capacity from error


def check_single_host(error: Exception) -> None:
    """Raise BackendLost if `error` is a device error and there are multiple hosts.

    The other hosts may not have this error. They then wait for this host in the program that failed
    here, so this host must not start another program.
    """
    if is_distributed() and isinstance(error, jax.errors.JaxRuntimeError):
        advice = (
            ". Restart with a lower --backend-config.micro-batch-tokens, --backend-config.max-lora-adapters or "
            "--backend-config.max-sample-tokens if this happens again"
        )
        raise BackendLost(
            f"a device of this host failed while other hosts may wait for it: {error}"
            + (advice if is_out_of_memory(error) else "")
        ) from error


def drain_devices() -> None:
    """Wait until the devices of this host have run all programs that were dispatched to them.

    If another host has not dispatched the same programs, this waits until a time limit of
    `hosts.leader` ends the process. Exhausted memory is ignored here, because the call that reads
    the missing result raises that error.
    """
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise


# Multiple hosts


def join(rank: HostRank) -> None:
    """Join the other hosts, and return when all have joined.

    Call it before JAX looks for devices.
    """
    started = time.monotonic()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # has no effect on accelerators
    # JAX's preemption service would handle SIGTERM, and the process would not end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        rank.coordinator,
        num_processes=rank.size,
        process_id=rank.rank,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
    )
    log.info("host %d of %d joined in %.1f s", rank.rank, rank.size, time.monotonic() - started)


def leave() -> None:
    """Leave the other hosts.

    All hosts must leave at the same time. Does nothing on a single host.
    """
    if is_distributed():
        jax.distributed.shutdown()


def is_distributed() -> bool:
    """Return whether this process has joined other hosts. Does not initialize the devices."""
    return jax.distributed.is_initialized()


def make_fingerprint() -> dict[str, str]:
    """Return what multiple hosts add to `Capabilities.fingerprint`.

    It is the number of hosts, and on CPU also the library that computes sums across hosts. On a
    single host it is empty.
    """
    if not is_distributed():
        return {}
    library = " (gloo)" if jax.default_backend() == "cpu" else ""
    return {"hosts": f"{jax.process_count()}{library}"}


def list_local_devices(devices: Collection[Any]) -> list[Any]:
    """Return the devices of this host, ordered by their ids. Sets have no fixed order."""
    ordered = sorted(devices, key=lambda device: device.id)
    if not is_distributed():
        return ordered
    return [device for device in ordered if device.process_index == jax.process_index()]


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Put a value on the devices of all hosts with a sharding.

    Each host must have the whole value.
    """
    if not is_distributed() or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    # `device_put` would send the value to all hosts to check that it is equal.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
    """Copy a tree of arrays to host memory. Each host gets the whole arrays.

    On multiple hosts there is one program to gather an array, which is compiled once per mesh and
    shape. A program for a whole tree would be compiled again for each kind of tree.
    """
    if is_distributed():
        tree = jax.tree.map(_replicate_leaf, tree)
    return jax.device_get(tree)


def fetch_one_by_one(tree: Any) -> Any:
    """Copy a tree as `fetch` does, but gather an array only after the previous one was copied.

    Each device then holds only one whole array at a time.
    """
    return jax.tree.map(fetch, tree)


def agree_on_minimum(num_bytes: int) -> int:
    """Return the smallest `num_bytes` of all hosts.

    On multiple hosts it is rounded down to MiB, because JAX exchanges int32 and not int64.
    """
    if not is_distributed():
        return num_bytes
    return int(np.min(multihost_utils.process_allgather(np.int32(num_bytes // _MIB)))) * _MIB


def _replicate_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    assert isinstance(leaf.sharding, NamedSharding)
    assert isinstance(leaf.sharding.mesh, Mesh)
    return _make_replicate_program(leaf.sharding.mesh)(leaf)


@cache
def _make_replicate_program(mesh: Mesh) -> Any:
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))
