"""An engine on nodes of a Ray cluster: a placement group, and an actor for each host."""

import asyncio
import importlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import SecretStr

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.backends.hosts.settings import HostsSettings, join_address, split_address
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.integrations.ray import RaySettings
from skyrl_tx.integrations.ray.host import BEAT_S, HostFacts, RayHost
from skyrl_tx.launch.engine_process import EngineEnd, EngineLaunch, EngineLocation
from skyrl_tx.launch.launcher import EngineStarts
from skyrl_tx.process.setup import CannotServe

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_LOOK_S = 1.0
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
