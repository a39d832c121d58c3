"""Runs of an engine as its supervisor sees them: where they start, and why they end.

A launcher starts engines on other machines. The devices of this machine are divided among its engines.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pydantic import BaseModel

from skyrl_tx.artifacts import ArtifactsUnreachable
from skyrl_tx.backends.registry import find_spec, list_specs
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import RequestError, UserError
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.process.signals import EXIT_STATUS
from skyrl_tx.store import StoreError, StoreInUse, StoreUnreachable

if TYPE_CHECKING:
    from skyrl_tx.launch.engine_process import EngineLaunch

_log = logging.getLogger(__name__)

GROUP = "skyrl_tx.launchers"
BUILT_IN = ("flags", "lws")
"""With these values of `--launcher`, the engines are child processes of the server."""


_CRASH_SIGNALS = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that a process causes itself.

Other signals come from outside, except SIGKILL if memory was exhausted.
"""

_EXPECTED_ERRORS = (RequestError, StoreError, StoreInUse, OSError, ValueError)
"""Errors caused by a wrong path, model or setting.

Their message is sufficient without a traceback.
"""


class EngineLost(Exception):
    """The backend or the database was lost. A new process continues from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """Why an engine process ended."""

    message: str
    is_final: bool
    """Whether a restart would fail in the same way, for example because a setting is wrong."""
    is_crash: bool
    """Whether the engine's own work caused the end.

    False for a kill from outside and for a lost database.
    """
    was_killed: bool = False
    """Whether a signal from outside ended the process."""
    was_unreachable: bool = False
    """Whether the database or the object store could not be reached.

    A restart may succeed later.
    """

    @classmethod
    def from_exit_code(cls, exit_code: int, was_memory_exhausted: bool) -> EngineEnd:
        """Return why a process ended, if the process itself could not report the reason.

        A negative exit code is the number of a signal, for example -9 for SIGKILL.
        """
        if exit_code == EXIT_STATUS:
            message = "one of its threads ended; its log says why"
            return cls(message=message, is_final=False, is_crash=False)
        if exit_code == 0:
            return cls(message="stopped by a signal", is_final=False, is_crash=False, was_killed=True)
        if exit_code > 0:
            return cls(message=f"exited with status {exit_code}", is_final=False, is_crash=True)

        number = signal.Signals(-exit_code)
        is_memory = number is signal.SIGKILL and was_memory_exhausted
        message = f"killed by {number.name}" + (
            ", because the machine or its cgroup had no free memory" if is_memory else ""
        )
        is_crash = is_memory or number in _CRASH_SIGNALS
        return cls(message=message, is_final=False, is_crash=is_crash, was_killed=not is_crash)

    @classmethod
    def from_error(cls, error: Exception) -> EngineEnd:
        """Return the end that an error causes, with a message of one line.

        Logs unexpected errors with their traceback.
        """
        message = explain_os_error(error) if isinstance(error, OSError) else " ".join(str(error).split())
        if isinstance(error, _EXPECTED_ERRORS) and message:
            _log.debug("the engine failed", exc_info=error)
        else:
            _log.error("the engine failed", exc_info=error)
            message = message if isinstance(error, CannotServe) else f"{type(error).__name__}: {message}"
        return cls(
            message=message,
            is_final=not isinstance(error, EngineLost),
            is_crash=not isinstance(error.__cause__ or error, (StoreError, StoreInUse, OSError)),
            was_unreachable=isinstance(error.__cause__, (StoreUnreachable, ArtifactsUnreachable)),
        )


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """The machine and process of an engine, and the id of this run.

    A restarted container may have the same host name and process id as before, so `boot_id`
    distinguishes the runs.
    """

    host: str
    pid: int
    boot_id: str


class RunningEngine(Protocol):
    """One run of an engine that has been started, for example an `EngineProcess`."""

    @property
    def location(self) -> EngineLocation | None:
        """The machine and process in which it runs. None until that is known."""
        ...

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Wait until the engine ends, and return why. Calls `on_ready` when it is ready."""
        ...

    def request_stop(self) -> None:
        """Ask the engine to finish its batch, take snapshots and end."""
        ...

    def kill(self) -> None:
        """End the engine immediately."""
        ...


EngineStarts: TypeAlias = "Sequence[Callable[[], RunningEngine]]"
"""For each engine, a function that starts it.

The supervisor calls it again after the engine has ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSpec:
    """The target of an entry point of the group `skyrl_tx.launchers`. Importing it must be fast."""

    config: type[BaseModel]
    """The launcher's settings.

    A field becomes a flag with the launcher's name, for example `--ray.address`.

    Each field must have a default."""
    load: Callable[[], Callable[[Any, EngineLaunch, int], AbstractContextManager[EngineStarts]]]
    """Imports and returns a function of the config, the engine's arguments and `--engines`.

    That function returns a context manager. Engines may be started inside its context. It raises
    CannotServe if the launcher cannot be used."""


def find_launcher(name: str) -> LauncherSpec:
    """Return the spec of a launcher.

    Raises UserError with the installed names if there is no such launcher.
    """
    return find_spec(GROUP, "launcher", name, LauncherSpec)


def list_launchers(on_broken: Callable[[UserError], object] = lambda _: None) -> Mapping[str, LauncherSpec]:
    """Return the specs of all installed launchers by name, see `list_specs`."""
    return list_specs(GROUP, "launcher", LauncherSpec, on_broken)


_GPUS, _CHIPS = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"
_ONE_CHIP = {
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables of a process that uses one of multiple TPU chips.

Source: docs.cloud.google.com/tpu, and libtpu.
"""


def assign_devices(num_engines: int, environment: Mapping[str, str], devices: Path) -> list[Mapping[str, str]]:
    """Divide the accelerators of this machine. Returns environment variables for each engine.

    For example, 4 GPUs and 2 engines give CUDA_VISIBLE_DEVICES=0,1 and 2,3. Without accelerators
    there are no variables. `devices` is the directory `/dev`. Raises CannotServe if the
    accelerators cannot be divided equally.
    """
    if num_engines == 1:
        return [{}]

    # GPUs: an equal number for each engine.
    if gpus := _list_visible_devices(environment.get(_GPUS), devices, r"nvidia(\d+)"):
        size, rest = divmod(len(gpus), num_engines)
        if not size or rest:
            raise CannotServe(
                f"--engines {num_engines}: {len(gpus)} GPUs cannot be divided equally; choose a number of engines that "
                f"divides {len(gpus)}"
            )
        return [{_GPUS: ",".join(gpus[start : start + size])} for start in range(0, len(gpus), size)]

    # TPU chips: one for each engine.
    if chips := _list_visible_devices(environment.get(_CHIPS), devices, r"accel(\d+)") or _list_visible_devices(
        None, devices / "vfio", r"(\d+)"
    ):
        if len(chips) != num_engines:
            raise CannotServe(
                f"--engines {num_engines}: there are {len(chips)} TPU chips, and each engine gets one; set --engines "
                f"{len(chips)}"
            )
        return [{_CHIPS: chip, **_ONE_CHIP} for chip in chips]
    return [{} for _ in range(num_engines)]


def _list_visible_devices(chosen: str | None, devices: Path, pattern: str) -> list[str]:
    """Return the devices that an environment variable chose.

    By default, the numbers of all devices in `/dev`.
    """
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    matches = [re.fullmatch(pattern, path.name) for path in devices.iterdir()] if devices.is_dir() else []
    return sorted((match[1] for match in matches if match), key=int)
