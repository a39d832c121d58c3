"""The state of the devices: whether they still compute, whether a program is being compiled, exhausted memory.

On one host exhausted memory is the error of one request. On multiple hosts a host that ran out of memory did
not start the program that the other hosts may be in, and they wait for it. Therefore nothing is tried again
here with multiple hosts: rank 0 decides when it knows how the call ended on all hosts.
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

log = logging.getLogger(__name__)


_PROBE_SIZE = 8
"""Numbers that each device adds up."""
_COMPILATION = "/jax/core/compile/"
"""The beginning of the names of JAX's events for tracing, lowering and compiling a program."""
_COMPILED = _COMPILATION + "backend_compile_duration"
"""The event of the compiler itself, also where its result is read from a cache."""


def check_devices(mesh: Mesh) -> None:
    """Add up numbers on all devices of a mesh together. Raises BackendLost if that fails or gives another sum.

    After most errors of a driver (CUDA_ERROR_ILLEGAL_ADDRESS, a GPU that has fallen off the bus) every later operation
    of the process fails too. Exhausted memory is not such an error, unless other hosts wait for this sum.
    """
    numbers = np.arange(_PROBE_SIZE * mesh.size, dtype=np.float32)
    try:
        placed = put(numbers, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        found = float(_sum(placed))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error) and not is_distributed():
            return
        raise BackendLost(f"the devices do not compute any more: {error}") from error
    if found != numbers.sum():
        raise BackendLost(f"the devices compute wrong numbers: the sum of {numbers.size} numbers is {found}")


@jax.jit
def _sum(numbers: jax.Array) -> jax.Array:
    return numbers.sum()


class CompilationMonitor:
    """Counts the programs that this process compiles and has compiled. Its methods are called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0  # tracing, lowering and compiling may be nested
        self._num_waiting = 0
        self._last_end = -math.inf
        self._this_thread = threading.local()
        self.num_compiled = 0
        self.seconds = 0.0
        """Time of the compiler, without tracing and lowering."""

    @property
    def is_compiling(self) -> bool:
        """Whether a call waits for a program to be traced, lowered or compiled."""
        return self._num_running > 0

    @property
    def seconds_since_call(self) -> float:
        """Seconds since a call compiled a program itself; 0 while one does. Waits for other threads do not count."""
        return 0.0 if self._num_running > self._num_waiting else time.monotonic() - self._last_end

    def exclude_this_thread(self) -> None:
        """Count programs of this thread as compiled, but not as waited for: it compiles in the background."""
        self._this_thread.is_left_out = True

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Mark that this thread waits for a program that another one compiles."""
        self._change(1, 1)
        try:
            yield
        finally:
            self._change(-1, -1)

    def on_start(self, event: str, value: float, **_: str | int) -> None:
        """Count an event that starts; a listener of JAX for scalars."""
        self._count(event, 1)

    def on_end(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Count an event that ends, also with an error; a listener of JAX for durations."""
        self._count(event, -1)
        if event == _COMPILED:
            with self._lock:
                self.num_compiled += 1
                self.seconds += duration_secs

    def _count(self, event: str, change: int) -> None:
        if event.startswith(_COMPILATION) and not getattr(self._this_thread, "is_left_out", False):
            self._change(change)
            self._last_end = time.monotonic()

    def _change(self, running: int, waiting: int = 0) -> None:
        with self._lock:
            self._num_running += running
            self._num_waiting += waiting


@functools.cache
def get_compilation_monitor() -> CompilationMonitor:
    """Return the monitor of this process, which listens from the first call on. Call it while nothing compiles."""
    monitor = CompilationMonitor()
    jax.monitoring.register_scalar_listener(monitor.on_start)
    jax.monitoring.register_event_duration_secs_listener(monitor.on_end)
    return monitor


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device, or the host on its behalf, ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def make_capacity_error(purpose: str, error: Exception) -> CapacityError:
    """Return the client's error for an exhausted device, and log the device's own message."""
    log.error("no memory left for %s: %s", purpose, error)
    return CapacityError(
        f"the device has no memory left for {purpose}. State is unchanged. Restart with a lower "
        "--backend-config.max-lora-adapters, --backend-config.max-lora-rank or --backend-config.max-sample-tokens "
        "to free memory"
    )


@contextmanager
def convert_memory_errors(purpose: str) -> Generator[None]:
    """Raise the error of `make_capacity_error` when the device runs out of memory inside the context.

    With several hosts that is BackendLost: the others may have had enough memory, and wait for this one.
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
    """Raise BackendLost for an error of a device if there are several hosts.

    The others may not have it. Then they wait for this host in the same program, and it must start no other one.
    """
    if is_distributed() and isinstance(error, jax.errors.JaxRuntimeError):
        advice = (
            ". Restart with a lower --backend-config.micro-batch-tokens, --backend-config.max-lora-adapters or "
            "--backend-config.max-sample-tokens if this happens again"
        )
        raise BackendLost(
            f"a device of this host failed, and other hosts may wait for it: {error}"
            + (advice if is_out_of_memory(error) else "")
        ) from error


def drain_devices() -> None:
    """Wait until the devices of this host have computed all that was dispatched.

    That never returns if another host has not dispatched the same, which a watchdog of the hosts ends. Memory that was
    exhausted is no error here: the call that needs what could not be computed gets it.
    """
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise


HEARTBEAT_TIMEOUT_S = 10
"""Time after which JAX's own service ends the process of a host that has lost another one."""
_SHUTDOWN_TIMEOUT_S = 10
_MIB = 2**20


def join(rank: HostRank) -> None:
    """Join the other hosts; returns when all have joined. Call it before JAX looks for devices."""
    started = time.monotonic()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of CPUs only
    # Its notifier would take SIGTERM, and the process would not end.
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
    """Leave the other hosts, which all do at the same time. Does nothing on one host."""
    if is_distributed():
        jax.distributed.shutdown()


def is_distributed() -> bool:
    """Return whether this process has joined other hosts. Looks for no devices."""
    return jax.distributed.is_initialized()


def make_fingerprint() -> dict[str, str]:
    """Return what results depend on with several hosts: their number, and on CPU the library that adds up."""
    if not is_distributed():
        return {}
    library = " (gloo)" if jax.default_backend() == "cpu" else ""
    return {"hosts": f"{jax.process_count()}{library}"}


def list_local_devices(devices: Collection[Any]) -> list[Any]:
    """Return the devices of this host in order of their ids; a set has another order in each process."""
    ordered = sorted(devices, key=lambda device: device.id)
    if not is_distributed():
        return ordered
    return [device for device in ordered if device.process_index == jax.process_index()]


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Return an array with a sharding over the devices of all hosts. Each host has the whole value."""
    if not is_distributed() or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    # `device_put` would send the value between all hosts, to compare it.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
    """Return a tree of arrays on the host, whole on each. Array by array, so that few programs serve all trees."""
    if is_distributed():
        tree = jax.tree.map(_replicate_leaf, tree)
    return jax.device_get(tree)


def fetch_one_by_one(tree: Any) -> Any:
    """As `fetch`, but each device holds one whole array at a time."""
    return jax.tree.map(fetch, tree)


def agree_on_minimum(num_bytes: int) -> int:
    """Return the least of the hosts' numbers of bytes, in whole MiB if there are several: JAX has no int64 here."""
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
