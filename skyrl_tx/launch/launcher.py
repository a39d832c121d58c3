"""The interface of a launcher, which starts engines elsewhere than on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pydantic import BaseModel

from skyrl_tx.backends.registry import find_spec, list_installed
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.process.setup import CannotServe

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


_GPUS, _CHIPS = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"
_ONE_CHIP = {
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables of a process that uses one chip of several (docs.cloud.google.com/tpu, libtpu)."""


def assign_devices(num_engines: int, environment: Mapping[str, str], devices: Path) -> list[Mapping[str, str]]:
    """Return the environment variables of each engine that let it see its own accelerators only.

    A machine without any shares nothing out. `devices` is `/dev`. Raises CannotServe if there are no equal parts.
    """
    if num_engines == 1:
        return [{}]
    if gpus := _list_visible_devices(environment.get(_GPUS), devices, r"nvidia(\d+)"):
        size, rest = divmod(len(gpus), num_engines)
        if not size or rest:
            raise CannotServe(f"--engines {num_engines}: {len(gpus)} GPUs are not shared out in equal parts")
        return [{_GPUS: ",".join(gpus[start : start + size])} for start in range(0, len(gpus), size)]
    if chips := _list_visible_devices(environment.get(_CHIPS), devices, r"accel(\d+)") or _list_visible_devices(
        None, devices / "vfio", r"(\d+)"
    ):
        if len(chips) != num_engines:
            raise CannotServe(f"--engines {num_engines}: there are {len(chips)} TPU chips, and an engine gets one")
        return [{_CHIPS: chip, **_ONE_CHIP} for chip in chips]
    return [{} for _ in range(num_engines)]


def _list_visible_devices(chosen: str | None, devices: Path, pattern: str) -> list[str]:
    """Return the names of the devices that were chosen by a variable, by default the numbers of those that exist."""
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    found = [re.fullmatch(pattern, path.name) for path in devices.iterdir()] if devices.is_dir() else []
    return sorted((match[1] for match in found if match), key=int)
