"""The interface of a launcher, which starts engines elsewhere than on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pydantic import BaseModel

from skyrl_tx.backends.registry import find_spec, list_installed
from skyrl_tx.contract.capabilities import Capabilities

if TYPE_CHECKING:
    from skyrl_tx.launch.engine_process import EngineEnd, EngineLaunch, EngineLocation

GROUP = "skyrl_tx.launchers"
BUILT_IN = ("flags", "lws")
"""Launchers of this package: engines are children of this process."""


class RunningEngine(Protocol):
    """One life of an engine, which has been started, such as `EngineProcess`."""

    @property
    def location(self) -> EngineLocation | None:
        """The machine and process in which it runs; None as long as that is open."""
        ...

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Wait for its end and return the reason; calls `on_ready` when it is ready."""
        ...

    def request_stop(self) -> None:
        """Ask it to finish its step, take its snapshots and end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


EngineStarts: TypeAlias = "Sequence[Callable[[], RunningEngine]]"
"""One function for each engine, which starts it. The supervisor calls it again after the engine has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSpec:
    """The object that an entry point of the group `skyrl_tx.launchers` refers to; importing it must be fast."""

    config: type[BaseModel]
    """Its fields become flags below the launcher's name, such as `--ray.address`, each with a default."""
    load: Callable[[], Callable[[Any, EngineLaunch, int], AbstractContextManager[EngineStarts]]]
    """Imports and returns a function of the config, the arguments of an engine, and the number of engines.

    Its context lasts as long as engines may be started. It raises CannotServe if the launcher cannot be used."""


def find_launcher(name: str) -> LauncherSpec:
    """Return the spec of a launcher. Raises UserError, with the installed names, if there is none of that name."""
    return find_spec(GROUP, "launcher", name, LauncherSpec)


def list_launchers() -> Mapping[str, LauncherSpec]:
    """Return the specs of all installed launchers by name."""
    return {name: find_launcher(name) for name in list_installed(GROUP)}
