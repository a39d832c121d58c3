"""Runs an engine on the nodes of a Ray cluster.

`RayEngine` runs in the process of the command. It creates a placement group with one bundle per host of the engine,
and one `RayHost` actor in each bundle. The actor starts the engine process of its host, and ends together with this
process.
"""

import asyncio
import importlib
import logging
import os
import secrets
import socket
import threading
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
from skyrl_tx.launch.engine_process import EngineLaunch, EngineProcess
from skyrl_tx.launch.launcher import EngineEnd, EngineLocation, EngineStarts
from skyrl_tx.process.setup import CannotServe

_log = logging.getLogger(__name__)
BEAT_S = 5.0
"""The command calls each of its hosts at this interval, so that the host knows that the command still runs."""
SILENCE_S = 60.0
"""A host ends when the command has not called it for this long.

Normally Ray ends the actors of a command that has ended, but it cannot do so after the head node is lost."""
_LOOK_S = 1.0
_MAX_TRIES = 100
_CONNECT_S = 10.0
_OTHERS_S = 15.0
"""After one host has ended, the other hosts may take this long to end. Rank 0 notices a lost host within 5 seconds."""
_KILL_S = 10.0
_NODES_S = 30.0
"""How long the cluster may take to list its nodes."""
_STOP_S = 60.0
"""The command ends this long after a signal, even if calls of Ray do not return."""
_PASSED_PREFIXES = ("JAX_", "XLA_", "NCCL_", "HF_", "AWS_", "GOOGLE_", "AZURE_")
"""Prefixes of the environment variables that the command passes on to every host."""
_ON_THIS_NODE = 0.001
"""Ray gives each node 1.0 of the resource `node:<address>`. A bundle that takes a small share runs on that node."""
_NODE_LOST = (
    "--launcher ray: Ray on this machine has ended, or the cluster cannot be reached: start it again with `ray start`, "
    "then start this command again"
)
_STOPPED = EngineEnd(message="stopped before it was placed", is_final=False, is_crash=False, was_killed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about a host that the command needs before it starts the engine there."""

    version: str
    """The version of skyrl_tx."""
    name: str
    ip: str
    port: int
    """The first of two consecutive ports that the actor reserves until it ends."""


class RayHost:
    """The Ray actor for one host of an engine. The engine process ends with the actor, even if Ray kills the actor."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._ports: list[socket.socket] = []
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Capabilities] | None = None
        self._end: asyncio.Task[EngineEnd] | None = None
        self._called_at = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Return the prefix that Ray puts before each log line of this process."""
        return f"host {self._rank}"

    async def facts(self) -> HostFacts:
        """Reserve two ports, and return them with the address of this host."""
        ip = importlib.import_module("ray.util").get_node_ip_address()
        self._ports = reserve_ports(ip)
        port = self._ports[0].getsockname()[1]
        return HostFacts(version=__version__, name=socket.gethostname(), ip=ip, port=port)

    async def start(self, launch: EngineLaunch, directory: str) -> EngineLocation:
        """Start the engine process, in the working directory of the command if this host has the same directory.

        The process gets the address of the Ray cluster, because a sampler may start vLLM servers there.
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
        """Record that the command is still running."""
        self._called_at = time.monotonic()

    async def _end_without_command(self) -> None:
        while (silence_s := time.monotonic() - self._called_at) < SILENCE_S:
            await asyncio.sleep(_LOOK_S)
        _log.critical("host %d: no call from the command for %.0f s; stopping this host", self._rank, silence_s)
        await self.kill()
        os._exit(1)

    async def ready(self) -> Capabilities:
        """Wait until the engine process is ready. Does not return if the process ends before it is ready."""
        assert self._ready is not None
        return await self._ready

    async def end(self) -> EngineEnd:
        """Wait for the end of the engine process."""
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        """Ask the engine to finish its current work, take its snapshots and end."""
        assert self._process is not None
        self._process.request_stop()

    async def kill(self) -> None:
        """Kill the engine process and wait until it has ended, so that its devices are free."""
        if self._process is not None:
            self._process.kill()
            await self.end()


def reserve_ports(ip: str) -> list[socket.socket]:
    """Bind two consecutive ports without listening on them.

    While these sockets exist, Linux does not give the ports to a program that asks for any free port. A program that
    asks for exactly these ports with SO_REUSEADDR may still listen on them, as rank 0 and JAX do (see socket(7)).
    """
    for _ in range(_MAX_TRIES):
        first = _bind_socket(ip, 0)
        try:
            return [first, _bind_socket(ip, first.getsockname()[1] + 1)]
        except (OSError, OverflowError):  # the next port is in use, or the first one was the last port
            first.close()
    raise OSError(f"found no two consecutive free ports on {ip} in {_MAX_TRIES} tries")


def _bind_socket(ip: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ip, port))
    except BaseException:
        bound.close()
        raise
    return bound


@contextmanager
def connect(settings: RaySettings) -> Generator[Any]:
    """Connect this process to the Ray cluster and yield the module `ray`.

    When this process ends, Ray ends all actors that it started. Raises CannotServe if Ray is not installed or if there
    is no cluster.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # Ray would hide equal log lines of two hosts
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise CannotServe(f"--launcher ray: Ray is not installed: pip install '{DISTRIBUTION}[ray]'") from error

    # Connect. First check that the address answers, because Ray would try for many minutes without a message.
    try:
        if settings.address != "auto":
            socket.create_connection(split_address(settings.address), _CONNECT_S).close()
        ray.init(address=settings.address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:  # no cluster, other versions, or this machine is not a node
        reason = str(error).strip().splitlines()[0]
        raise CannotServe(f"--ray.address {settings.address}: {reason}; `ray start --head` starts a cluster") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def start_engines(settings: RaySettings, launch: EngineLaunch, num_engines: int) -> Generator[EngineStarts]:
    """Connect to the cluster and yield a function per engine that creates its `RayEngine`. Raises CannotServe."""
    deadline = threading.Timer(_STOP_S, _end_process)
    deadline.daemon = True

    def on_stop() -> None:
        with suppress(RuntimeError):  # another engine has started the timer
            deadline.start()

    try:
        with connect(settings) as ray:
            yield [partial(RayEngine, ray, launch, settings.resources, on_stop) for _ in range(num_engines)]
    finally:
        deadline.cancel()


def _end_process() -> None:
    _log.critical("Ray did not stop within %.0f s; ending this process", _STOP_S)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class EndedHost:
    """A host that has ended, and why."""

    rank: int
    end: EngineEnd


class RayEngine:
    """One run of an engine, from its start to its end, on the hosts of a placement group.

    When one host ends, all hosts end. `wait` creates the placement group and removes it again.
    """

    def __init__(
        self,
        ray: Any,
        launch: EngineLaunch,
        resources: Mapping[str, float],
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        """`ray` is the connected module; `resources` are the Ray resources that the engine takes on each host.

        `on_stop` is called when the engine shall stop.
        """
        self._ray = ray
        self._on_stop = on_stop
        self._launch = launch
        self._resources = resources
        self._stopping = asyncio.Event()
        self._is_ready = False
        self._actors: list[Any] = []
        self.location: EngineLocation | None = None
        """The host and the process of rank 0, or None before they are started."""

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Place and start all hosts, wait until they have ended, and return the reason.

        `on_ready` is called when rank 0 is ready, because all hosts are ready then. Raises CannotServe if this machine
        is no longer a node of the cluster. This process cannot connect again, but a new process can.
        """
        running = asyncio.create_task(self._place_and_run(on_ready))
        watching = asyncio.create_task(self._watch_own_node())
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if running.done():
            return running.result()
        running.cancel()
        raise CannotServe(_NODE_LOST)

    async def _watch_own_node(self) -> None:
        """Return when this machine is no longer a living node of the cluster, or the cluster does not answer."""
        node_id = self._ray.get_runtime_context().get_node_id()
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                nodes = await asyncio.wait_for(asyncio.to_thread(self._ray.nodes), _NODES_S)
            except (TimeoutError, RuntimeError, self._ray.exceptions.RayError):
                return
            if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
                return

    async def _place_and_run(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
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
        """Ask rank 0 to finish its work, take its snapshots and end; then all hosts end.

        Before rank 0 is ready, all hosts are killed instead.
        """
        self._stopping.set()
        self._on_stop()
        if self._is_ready:
            self._actors[0].stop.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """Kill all actors, and with them the engine processes."""
        self._stopping.set()
        for actor in self._actors:
            self._ray.kill(actor)

    def _make_bundles(self) -> list[dict[str, float]]:
        bundles = [dict(self._resources) for _ in range(self._launch.hosts.size)]
        if self._launch.settings.store_url is None:
            bundles[0][f"node:{self._ray.util.get_node_ip_address()}"] = _ON_THIS_NODE
        return bundles

    async def _is_placed(self, group: Any) -> bool:
        """Wait until the cluster has reserved the resources. Returns False if the engine is stopped before."""
        was_logged = False
        while True:
            try:
                if await asyncio.to_thread(group.wait, _LOOK_S):
                    break
            except (ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
                raise CannotServe(f"{_NODE_LOST} ({_format_error(error)})") from error
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
        text = f"{size} node{'s' * (size > 1)} with {amounts} free on each (the Ray cluster has {len(nodes)} nodes)"
        if self._launch.settings.store_url is None:
            text += "; one of them must be this machine, because the database is a file here (see --database-url)"
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
        """Start the engine processes and wait until they have ended. Returns the reason.

        After the first host has ended, the other hosts have 15 seconds to end and to report why.
        """
        # Start the engine on all hosts.
        errors = self._ray.exceptions.RayError
        try:
            facts: Sequence[HostFacts] = await asyncio.gather(*(actor.facts.remote() for actor in self._actors))
            if (refusal := _check_version(facts)) is not None:
                return refusal
            await self._start(facts)
        except errors as error:
            return EngineEnd(message=f"a host cannot start: {_format_error(error)}", is_final=False, is_crash=False)

        # Call the hosts regularly, and wait for the first one to end.
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
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

        # Give the other hosts time to end and to report why.
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_OTHERS_S)
        ended_in_time = list(ended)
        for task in (ready, *calls, *pending):
            task.cancel()
        return find_cause(ended_in_time, num_hosts=len(self._actors))

    async def _start(self, facts: Sequence[HostFacts]) -> None:
        launch, host_settings = self._launch, self._launch.hosts
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_PREFIXES)}
        address = join_address(facts[0].ip, facts[0].port) if host_settings.size > 1 else None
        key = SecretStr(host_settings.key_bytes.decode() or secrets.token_hex(32))
        starting: list[Coroutine[Any, Any, EngineLocation]] = []
        for rank, actor in enumerate(self._actors):
            hosts = HostsSettings(
                size=host_settings.size, rank=rank, address=address, key=key, silence_s=host_settings.silence_s
            )
            host_launch = replace(launch, hosts=hosts, environment={**environment, **launch.environment})
            starting.append(actor.start.remote(host_launch, os.getcwd()))

        locations = await asyncio.gather(*starting)
        self.location = locations[0]
        for rank, (location, fact) in enumerate(zip(locations, facts, strict=True)):
            _log.info("host %d: engine process %d started on %s (%s)", rank, location.pid, location.host, fact.ip)

    async def _call_again(self, actor: Any) -> None:
        """Tell a host every five seconds that the command is still running, until the host has ended."""
        with suppress(self._ray.exceptions.RayError):
            while True:
                await actor.beat.remote()
                await asyncio.sleep(BEAT_S)

    async def _wait_ready(self, on_ready: Callable[[Capabilities], None]) -> None:
        ready = await self._actors[0].ready.remote()
        self._is_ready = True
        on_ready(ready)

    async def _free(self, actor: Any) -> None:
        """Kill the engine process of an actor, then the actor, so that its devices are free for the next start."""
        with suppress(self._ray.exceptions.RayError, TimeoutError):  # the actor has ended with its engine process
            await asyncio.wait_for(actor.kill.remote(), _KILL_S)
        self._ray.kill(actor)


def _check_version(facts: Sequence[HostFacts]) -> EngineEnd | None:
    for rank, fact in enumerate(facts):
        if fact.version != __version__:
            reason = (
                f"host {rank}, {fact.name} ({fact.ip}), has skyrl_tx {fact.version}, but this machine has "
                f"{__version__}; install the same release on all nodes"
            )
            return EngineEnd(message=reason, is_final=True, is_crash=False)
    return None


def find_cause(ended: Sequence[EndedHost], *, num_hosts: int) -> EngineEnd:
    """Return the end of the host that caused the end of all hosts. `ended` is in the order in which the hosts ended.

    When one host is killed or crashes, the other hosts end because of it, and rank 0 reports a lost device. So a killed
    host is the cause if there is one, else the first host that crashed, else the host with the lowest rank.
    """
    cause = next(
        (host for host in ended if host.end.was_killed),
        next((host for host in ended if host.end.is_crash), min(ended, key=lambda host: host.rank)),
    )
    if num_hosts == 1:
        return cause.end
    return replace(cause.end, message=f"host {cause.rank}: {cause.end.message}")


def _format_error(error: Exception) -> str:
    """Format an error of Ray as one line. For an exception in an actor this is the exception, without its traceback."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(error)
    return " ".join(text.split())
