"""JAX on several hosts: joining them, arrays on the devices of all, and numbers that all agree on.

Every host runs the same calls in the same order (`skyrl_tx.backends.hosts`), so `put`, `fetch` and `agreed`, in which
the hosts communicate, are called by all of them alike. On one host they communicate nothing.
"""

import logging
import time
from collections.abc import Collection
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from skyrl_tx.contract.backend import HostRank

HEARTBEAT_TIMEOUT_S = 10
"""Time after which JAX's own service ends the process of a host that has lost another one."""
_SHUTDOWN_TIMEOUT_S = 10
_MIB = 2**20

log = logging.getLogger(__name__)


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
