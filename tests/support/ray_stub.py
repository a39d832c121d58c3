"""A stub of the module `ray` as `RayEngine` uses it: actors are scripts, and nodes are as many as a test says."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skyrl_tx import __version__
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.integrations.ray.engine import HostFacts
from skyrl_tx.launch.engine_process import EngineLaunch
from skyrl_tx.launch.launcher import EngineEnd, EngineLocation

STOPPED = EngineEnd(message="stopped", is_final=False, is_crash=False, was_killed=True)


class RayError(Exception):
    """Stands for all errors of Ray."""


@dataclass
class StubActor:
    """A host whose engine process ends as a test says, or when it is stopped or killed."""

    rank: int
    options: dict[str, Any]
    version: str = __version__
    fails_to_start: RayError | None = None
    launch: EngineLaunch | None = None
    ended: asyncio.Future[EngineEnd] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_ready: asyncio.Future[Capabilities] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(self._make(name, *arguments)))

    async def _make(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if "die" in self.calls:
            raise RayError("it is\ndead")
        match name:
            case "facts":
                return HostFacts(version=self.version, name=f"node{self.rank}", ip=f"10.0.0.{self.rank}", port=4000)
            case "start" if self.fails_to_start is not None:
                raise self.fails_to_start
            case "start":
                self.launch = arguments[0]
                return EngineLocation(f"node{self.rank}", 100 + self.rank, f"run{self.rank}")
            case "beat":
                return None
            case "ready":
                return await self.is_ready
            case "stop" | "kill":
                self.finish(STOPPED)
            case _:
                return await self.ended

    def finish(self, end: EngineEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def die(self) -> None:
        self.calls.append("die")
        if not self.ended.done():
            self.ended.set_exception(RayError("it is\ndead"))
            self.ended.exception()  # it may have no reader


class StubRay:
    """The module."""

    def __init__(self, *, version: str = __version__, is_placed: Callable[[], bool] = lambda: True) -> None:
        self.actors: list[StubActor] = []
        self.groups: list[Any] = []
        self.removed: list[Any] = []
        self.fails_to_start: RayError | None = None
        self.is_node_alive = True
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "here")
        self.exceptions = SimpleNamespace(RayError=RayError)

        def placement_group(bundles: list[dict[str, float]], strategy: str) -> Any:
            group = SimpleNamespace(bundles=bundles, strategy=strategy, wait=lambda _: is_placed())
            self.groups.append(group)
            return group

        def actor(rank: int, options: dict[str, Any]) -> StubActor:
            self.actors.append(StubActor(rank, options, version, self.fails_to_start))
            return self.actors[-1]

        self.remote = lambda _: SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda rank: actor(rank, options))
        )
        self.util = SimpleNamespace(
            placement_group=placement_group,
            remove_placement_group=self.removed.append,
            get_node_ip_address=lambda: "10.0.0.9",
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=SimpleNamespace),
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "here", "Alive": self.is_node_alive}, {"NodeID": "there", "Alive": False}]

    def kill(self, actor: StubActor) -> None:
        actor.die()

    async def wait_for_starts(self, number: int) -> None:
        """Wait until that many engine processes have been started."""
        await self._until(lambda: sum(actor.launch is not None for actor in self.actors) == number)

    async def _until(self, look: Callable[[], bool]) -> None:
        while not look():
            await asyncio.sleep(0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test, with a limit that only a failure reaches."""
    asyncio.run(asyncio.wait_for(work(), 60))
