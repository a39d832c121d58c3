"""The engine as a child process: how it is told what to do, speaks of itself, and never outlives its parent."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from pydantic import BaseModel

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.engine.process import ExitCode, run_engine
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.garbage import collect_seldom
from skyrl_tx.huge_pages import ask_for_huge_pages
from skyrl_tx.listening import CannotServe
from skyrl_tx.logs import LogLevel, configure_logging
from skyrl_tx.store.errors import StoreError, StoreInUse

log = logging.getLogger(__name__)

_FULL_COLLECTION_AFTER = 20
_MEANING = {
    ExitCode.CANNOT_START: "the engine cannot start, for the reason above",
    ExitCode.LOST: "the engine lost what it worked with",
}
_FORESEEN = (RequestError, StoreError, StoreInUse, OSError, ValueError)
"""What a wrong path, model or setting raises; their text is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """All that the child is told; travels by pickle, so the backend goes by name."""

    settings: EngineSettings
    backend: str
    backend_config: BaseModel
    log_level: LogLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The child's first word: it takes requests now."""

    num_parameters: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """How a life of the engine ended."""

    message: str
    is_final: bool
    """The engine itself said that it cannot start: another try would end the same way."""


class EngineProcess:
    """One life of the engine."""

    def __init__(self, launch: EngineLaunch) -> None:
        """Start the child; its first words come to `live`."""
        ask_for_huge_pages(os.environ)  # what the child starts with
        spawn = multiprocessing.get_context("spawn")
        self._pipe, childs_end = spawn.Pipe()
        self._process = spawn.Process(target=_child, args=(launch, childs_end), name="skyrl-tx engine")
        # A terminal's ^C reaches the whole group. The child is born deaf to it: the parent says when to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # The child alone holds its end now, so that the pipe breaks when either process is gone, however it went.
        childs_end.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process.pid is not None  # it has been started
        return self._process.pid

    async def live(self, on_ready: Callable[[EngineReady], None]) -> EngineEnd:
        """Wait for the end of this life and say how it was."""
        end: EngineEnd | None = None
        while (message := await _receive(self._pipe)) is not None:
            if isinstance(message, EngineReady):
                on_ready(message)
            else:
                end = message
        await asyncio.to_thread(self._process.join)
        self._pipe.close()
        return end or EngineEnd(message=_cause(self._process.exitcode), is_final=False)

    def ask_to_stop(self) -> None:
        """Have the engine finish its step, take its snapshots and exit."""
        with contextlib.suppress(OSError):  # gone already
            self._pipe.send("stop")

    def kill(self) -> None:
        """End it now; what it acknowledged is on disk."""
        self._process.kill()


async def _receive(pipe: Connection) -> EngineReady | EngineEnd | None:
    """Wait for the child's next word; None once it is gone."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exited with status {exit_code}"


def run_alone(launch: EngineLaunch, on_ready: Callable[[EngineReady], None]) -> None:
    """Run the engine in this process until a signal; a second one exits at once. Raises CannotServe."""
    try:
        code = _run(launch, on_ready, second_signal_exits=True)
    except Exception as error:
        raise CannotServe(_told(error)) from error
    if code is not ExitCode.STOPPED:
        raise CannotServe(_MEANING[code])


def _child(launch: EngineLaunch, parent: Connection) -> None:
    """Run the engine as a child; the first function of its process."""
    configure_logging("engine", launch.log_level)
    threading.Thread(target=_follow, args=(parent,), name="follow parent", daemon=True).start()
    try:
        code = _run(launch, parent.send, second_signal_exits=False)
        if code is not ExitCode.STOPPED:
            parent.send(EngineEnd(message=_MEANING[code], is_final=code is ExitCode.CANNOT_START))
    except Exception as error:
        code = ExitCode.LOST
        parent.send(EngineEnd(message=_told(error), is_final=True))
    sys.exit(code)


def _run(launch: EngineLaunch, on_ready: Callable[[EngineReady], None], *, second_signal_exits: bool) -> ExitCode:
    collect_seldom(full_after=_FULL_COLLECTION_AFTER)
    return run_engine(
        launch.settings,
        find_backend(launch.backend),
        launch.backend_config,
        on_ready=lambda can: on_ready(EngineReady(num_parameters=can.num_parameters, devices=can.devices)),
        second_signal_exits=second_signal_exits,
    )


def _told(error: Exception) -> str:
    """Say in one line what went wrong; what nobody foresaw also leaves its traceback in the log."""
    message = " ".join(str(error).split())
    if isinstance(error, _FORESEEN) and message:
        log.debug("the engine failed", exc_info=error)
        return message
    log.error("the engine failed", exc_info=error)
    return f"{type(error).__name__}: {message}"


def _follow(parent: Connection) -> None:
    """Stop when the parent says so; die with it when it dies."""
    try:
        while True:
            parent.recv()
            os.kill(os.getpid(), signal.SIGTERM)
    except (EOFError, OSError):
        os._exit(1)
