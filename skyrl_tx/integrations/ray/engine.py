"""An engine on nodes of a Ray cluster: a placement group, and an actor for each host."""

import asyncio
import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.backends.hosts.settings import HostsSettings, join_address, split_address
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.integrations.ray import RaySettings
from skyrl_tx.launch.engine_end import EngineEnd
from skyrl_tx.launch.engine_process import EngineLaunch, EngineLocation, EngineProcess
from skyrl_tx.launch.launcher import EngineStarts
from skyrl_tx.process.setup import CannotServe

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


_CONNECT_S = 10.0


_OTHERS_S = 15.0
"""Time for the other hosts to end by themselves when one has ended, which rank 0 notices within 5 s."""


_KILL_S = 10.0


_PASSED = ("JAX_", "XLA_", "NCCL_", "HF_", "AWS_", "GOOGLE_", "AZURE_")
"""Beginnings of the environment variables that every host gets from this process: of devices, models and storage."""


_ON_THIS_NODE = 0.001
"""Ray's nodes have 1 of a resource with their address, of which a bundle takes some to be there."""


_STOPPED = EngineEnd(message="stopped before it was placed", is_final=False, is_crash=False, was_killed=True)


@contextmanager
def connect(settings: RaySettings) -> Generator[Any]:
    """Connect this process with the cluster, and yield the module `ray`.

    Raises CannotServe without Ray or a cluster. The cluster ends all actors of this process when it ends.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two hosts are two lines
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise CannotServe(f"--launcher ray: Ray is not installed: pip install '{DISTRIBUTION}[ray]'") from error
    try:
        if settings.address != "auto":  # Ray tries for many minutes without a word
            socket.create_connection(split_address(settings.address), _CONNECT_S).close()
        ray.init(address=settings.address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:  # no cluster, other versions, no node of it
        reason = str(error).strip().splitlines()[0]
        raise CannotServe(f"--ray.address {settings.address}: {reason}; `ray start --head` starts a cluster") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def start_engines(settings: RaySettings, launch: EngineLaunch, num_engines: int) -> Generator[EngineStarts]:
    """Connect with the cluster, and yield what starts each engine. Raises CannotServe."""
    with connect(settings) as ray:
        yield [partial(RayEngine, ray, launch, settings.resources) for _ in range(num_engines)]


@dataclass(frozen=True, slots=True)
class EndedHost:
    """A host that has ended."""

    rank: int
    end: EngineEnd


class RayEngine:
    """One life of an engine on the hosts of a placement group.

    When one host ends, all end. Nothing is placed before `wait`, and nothing is left in the cluster after it.
    """

    def __init__(self, ray: Any, launch: EngineLaunch, resources: Mapping[str, float]) -> None:
        """`ray` is the module, connected; `resources` are what the engine takes of each host."""
        self._ray = ray
        self._launch = launch
        self._resources = resources
        self._stopping = asyncio.Event()
        self._is_ready = False
        self._actors: list[Any] = []
        self.location: EngineLocation | None = None
        """The machine and the process in which rank 0 runs, once it is started."""

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Place and start all hosts, wait until they have ended, and return the reason.

        `on_ready` is called when rank 0 is ready, and with it all.
        """
        group = self._ray.util.placement_group(self._make_bundles(), strategy="STRICT_SPREAD")
        try:
            if not await self._is_placed(group):
                return _STOPPED
            self._actors = [self._start_actor(group, rank) for rank in range(self._launch.hosts.size)]
            return await self._run(on_ready)
        finally:
            await asyncio.gather(*map(self._free, self._actors))
            self._ray.util.remove_placement_group(group)

    def request_stop(self) -> None:
        """Let rank 0 finish its step, take its snapshots and end; the others follow. Before it is ready, end all."""
        self._stopping.set()
        if self._is_ready:
            self._actors[0].stop.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """End all actors, and with them the engine processes."""
        self._stopping.set()
        for actor in self._actors:
            self._ray.kill(actor)

    def _make_bundles(self) -> list[dict[str, float]]:
        bundles = [dict(self._resources) for _ in range(self._launch.hosts.size)]
        if self._launch.settings.store_url is None:
            bundles[0][f"node:{self._ray.util.get_node_ip_address()}"] = _ON_THIS_NODE
        return bundles

    async def _is_placed(self, group: Any) -> bool:
        """Wait until the cluster has the resources; return False if stopped before."""
        was_logged = False
        while not await asyncio.to_thread(group.wait, _LOOK_S):
            if self._stopping.is_set():
                return False
            if not was_logged:
                _log.info("waiting for %s", self._describe_resources())
            was_logged = True
        return not self._stopping.is_set()

    def _describe_resources(self) -> str:
        size = self._launch.hosts.size
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
        text = f"{size} node{'s' * (size > 1)} of the Ray cluster, which has {len(nodes)}, with {amounts} free on each"
        if self._launch.settings.store_url is None:
            text += "; one is this machine, because the database is a file here: see --database-url"
        return text

    def _start_actor(self, group: Any, rank: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank
        )
        resources = dict(self._resources)
        return (
            self._ray.remote(RayHost)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(rank)
        )

    async def _run(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Start the engine processes, and wait until the first has ended, and the others for a time."""
        errors = self._ray.exceptions.RayError
        try:
            facts: Sequence[HostFacts] = await asyncio.gather(*(actor.facts.remote() for actor in self._actors))
            if (refusal := _check_version(facts)) is not None:
                return refusal
            await self._start(facts)
        except errors as error:
            return EngineEnd(message=f"a host cannot start: {_format_error(error)}", is_final=False, is_crash=False)
        ready = asyncio.create_task(self._wait_ready(on_ready))
        calls = [asyncio.create_task(self._call_again(actor)) for actor in self._actors]
        ended: list[EndedHost] = []

        async def wait_for(rank: int) -> None:
            try:
                ended.append(EndedHost(rank, await self._actors[rank].end.remote()))
            except errors as error:
                reason = f"its actor has ended: {_format_error(error)}"
                end = EngineEnd(message=reason, is_final=False, is_crash=False, was_killed=True)
                ended.append(EndedHost(rank, end))

        waiting = {asyncio.create_task(wait_for(rank)) for rank in range(len(self._actors))}
        _, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        by_itself = list(ended)
        if others:
            _, others = await asyncio.wait(others, timeout=_OTHERS_S)
            by_itself = list(ended)
        for task in (ready, *calls, *others):
            task.cancel()
        return find_cause(by_itself, num_hosts=len(self._actors))

    async def _start(self, facts: Sequence[HostFacts]) -> None:
        launch, given = self._launch, self._launch.hosts
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        address = join_address(facts[0].ip, facts[0].port) if given.size > 1 else None
        key = SecretStr(given.key_bytes.decode() or secrets.token_hex(32))
        starting: list[Coroutine[Any, Any, EngineLocation]] = []
        for rank, actor in enumerate(self._actors):
            hosts = HostsSettings(size=given.size, rank=rank, address=address, key=key, silence_s=given.silence_s)
            own = replace(launch, hosts=hosts, environment={**environment, **launch.environment})
            starting.append(actor.start.remote(own, os.getcwd()))
        places = await asyncio.gather(*starting)
        self.location = places[0]
        for rank, (place, fact) in enumerate(zip(places, facts, strict=True)):
            _log.info("host %d: engine process %d started on %s (%s)", rank, place.pid, place.host, fact.ip)

    async def _call_again(self, actor: Any) -> None:
        """Tell a host that the command is there, until the host has ended."""
        with suppress(self._ray.exceptions.RayError):
            while True:
                await actor.beat.remote()
                await asyncio.sleep(BEAT_S)

    async def _wait_ready(self, on_ready: Callable[[Capabilities], None]) -> None:
        ready = await self._actors[0].ready.remote()
        self._is_ready = True
        on_ready(ready)

    async def _free(self, actor: Any) -> None:
        """End an actor after its engine process, so that nothing uses its devices when they are placed again."""
        with suppress(self._ray.exceptions.RayError, TimeoutError):  # it has ended, with its engine process
            await asyncio.wait_for(actor.kill.remote(), _KILL_S)
        self._ray.kill(actor)


def _check_version(facts: Sequence[HostFacts]) -> EngineEnd | None:
    for rank, fact in enumerate(facts):
        if fact.version != __version__:
            reason = (
                f"host {rank}, {fact.name} ({fact.ip}), has skyrl_tx {fact.version}, and this machine {__version__}"
            )
            return EngineEnd(message=reason, is_final=True, is_crash=False)
    return None


def find_cause(ended: Sequence[EndedHost], *, num_hosts: int) -> EngineEnd:
    """Return the end that explains those of all hosts, given in order of time.

    When a host is killed or crashes, the others end because of it, and rank 0 does so as with a lost device. A kill
    therefore explains all else, then the first crash, then what rank 0 says.
    """
    cause = next(
        (each for each in ended if each.end.was_killed),
        next((each for each in ended if each.end.is_crash), min(ended, key=lambda each: each.rank)),
    )
    if num_hosts == 1:
        return cause.end
    return replace(cause.end, message=f"host {cause.rank}: {cause.end.message}")


def _format_error(error: Exception) -> str:
    """Return an error of Ray in one line: of an exception in an actor that one, without its traceback."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(error)
    return " ".join(text.split())
