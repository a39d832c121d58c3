"""The actor of a host in a Ray cluster: a process there that runs the engine process of its rank."""

import asyncio
import importlib
import logging
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_tx import __version__
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.launch.engine_process import EngineEnd, EngineLaunch, EngineLocation, EngineProcess

BEAT_S = 5.0
"""Period in which the command calls each of its hosts."""
SILENCE_S = 60.0
"""Time without a call after which a host ends.

Its command has ended or cannot reach it, and Ray, which ends the actors of an ended command, has not done so: it cannot
without the head of the cluster."""
_LOOK_S = 1.0
_MAX_TRIES = 100

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of a host that the command has to know before it starts the engine there."""

    version: str
    """The version of skyrl_tx."""
    name: str
    ip: str
    port: int
    """The first of two neighbouring ports that are reserved until the actor ends."""


class RayHost:
    """One host of an engine. Its engine process ends with this one, however that ends; see `EngineProcess`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._ports: list[socket.socket] = []
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Capabilities] | None = None
        self._end: asyncio.Task[EngineEnd] | None = None
        self._called_at = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Return what Ray writes before each line of this process's log."""
        return f"host {self._rank}"

    async def facts(self) -> HostFacts:
        """Reserve ports, and say where this is."""
        ip = importlib.import_module("ray.util").get_node_ip_address()
        self._ports = reserve_ports(ip)
        port = self._ports[0].getsockname()[1]
        return HostFacts(version=__version__, name=socket.gethostname(), ip=ip, port=port)

    async def start(self, launch: EngineLaunch, directory: str) -> EngineLocation:
        """Start the engine process, in a working directory if there is such a one here.

        It knows its cluster, in which a sampler may start servers.
        """
        if Path(directory).is_dir():
            os.chdir(directory)
        self._ready = asyncio.get_running_loop().create_future()
        cluster = {"RAY_ADDRESS": importlib.import_module("ray").get_runtime_context().gcs_address}
        self._process = EngineProcess(replace(launch, environment={**launch.environment, **cluster}))
        self._end = asyncio.create_task(self._process.wait(self._ready.set_result))
        self._called_at = time.monotonic()
        self._watch = asyncio.create_task(self._end_without_command())
        return self._process.location

    async def beat(self) -> None:
        """Note that the command is there."""
        self._called_at = time.monotonic()

    async def _end_without_command(self) -> None:
        while (silence_s := time.monotonic() - self._called_at) < SILENCE_S:
            await asyncio.sleep(_LOOK_S)
        _log.critical("host %d: the command has not called for %.0f s; this host ends", self._rank, silence_s)
        await self.kill()
        os._exit(1)

    async def ready(self) -> Capabilities:
        """Wait until the engine process is ready. Never returns if it ends before."""
        assert self._ready is not None
        return await self._ready

    async def end(self) -> EngineEnd:
        """Wait for the end of the engine process."""
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        """Ask the engine to finish its step, take its snapshots and end."""
        assert self._process is not None
        self._process.request_stop()

    async def kill(self) -> None:
        """Kill the engine process, and return when its devices are free."""
        if self._process is not None:
            self._process.kill()
            await self.end()


def reserve_ports(ip: str) -> list[socket.socket]:
    """Bind two neighbouring ports without listening on them.

    As long as these sockets exist the system gives the ports to no one who asks for any port, but one who asks for
    them with SO_REUSEADDR, as rank 0 and JAX do, may listen (Linux, socket(7)).
    """
    for _ in range(_MAX_TRIES):
        first = _bind_socket(ip, 0)
        try:
            return [first, _bind_socket(ip, first.getsockname()[1] + 1)]
        except (OSError, OverflowError):  # the next port is in use, or there is none
            first.close()
    raise OSError(f"{ip} has no two neighbouring ports that are free")


def _bind_socket(ip: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ip, port))
    except BaseException:
        bound.close()
        raise
    return bound
