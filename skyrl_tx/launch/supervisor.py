"""Run the API and engines until a signal, and start an engine again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.launch.command import App, load_server_extensions
from skyrl_tx.launch.launcher import EngineEnd, EngineLocation, RunningEngine
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.process.signals import handle_signals
from skyrl_tx.server.app import ApiServer
from skyrl_tx.store import StoreBlocked, StoreError, StoreUnreachable
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)

STOP_S = 30.0
"""Seconds for the engine to finish its batch and take snapshots."""
GRACE_S = 2
"""Seconds for open calls to get their response when the API stops."""
MAX_STARTS = 5
"""Starts in a row without progress before the server gives up. They take less than four seconds."""
_MAX_DELAY_S = 15.0
_DATABASE_RETRY_S = 0.5


async def run_servers(
    engines: Sequence[EngineSupervisor], api: SupervisedApi | None = None, listener: socket.socket | None = None
) -> None:
    """Run engines until a signal, and the API on `listener` if it is given.

    Raises CannotServe if the API or all engines cannot continue.
    """
    with _stop_on_signal(engines) as stop:
        # Run until a signal, or until the API has ended or all engines have ended.
        stopped = asyncio.create_task(stop.wait())
        serving = [] if api is None or listener is None else [asyncio.create_task(api.serve(sockets=[listener]))]
        supervising = [asyncio.create_task(_supervise(engines))] if engines else []
        await asyncio.wait([stopped, *serving, *supervising], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

        # Stop all at the same time, so that open long polls still receive the results of stopping
        # engines.
        if api is not None:
            api.should_exit = True
        for task in supervising:
            await _stop(task, engines)
        for task in (*serving, *supervising):
            await task
    if api is not None and not api.started:
        raise CannotServe("the API could not start; the log above says why")


@contextlib.contextmanager
def _stop_on_signal(engines: Sequence[EngineSupervisor]) -> Generator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set. A second signal kills the engines and exits."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            for engine in engines:
                engine.kill()
            os._exit(128 + number)
        _log.info("stopping: finishing the running work and accepting no new work; a second signal exits at once")
        stop.set()

    loop = asyncio.get_running_loop()
    with handle_signals({signal.SIGINT, signal.SIGTERM}, lambda number: loop.call_soon_threadsafe(on_signal, number)):
        yield stop


async def _supervise(engines: Sequence[EngineSupervisor]) -> None:
    """Run engines until they stop.

    Raises the error of the last engine if no engine can continue.
    """
    running = {asyncio.create_task(engine.run()) for engine in engines}
    while running:
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if (error := task.exception()) is None:
                continue
            if not running:
                raise error
            _log.error("%s; %d other engines continue", error, len(running))


async def _stop(supervising: asyncio.Task[None], engines: Sequence[EngineSupervisor]) -> None:
    """Stop the engines. Kill them if they do not stop within `STOP_S`."""
    for engine in engines:
        engine.stop()
    _, running = await asyncio.wait({supervising}, timeout=STOP_S)
    if running:
        _log.warning("the engine did not stop within %d s and is killed; no acknowledged request is lost", STOP_S)
        for engine in engines:
            engine.kill()


class SupervisedApi(ApiServer):
    """The API on a socket. The supervisor handles the signals."""

    def __init__(self, settings: ServerSettings, store: Store, apps: Sequence[App] = ()) -> None:
        super().__init__(settings.make_api_settings(), store, load_server_extensions(apps))
        self.config.timeout_graceful_shutdown = GRACE_S

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing, instead of installing signal handlers."""
        yield


class EngineSupervisor:
    """Starts an engine, and starts it again when it ends, until `stop`."""

    def __init__(
        self,
        start: Callable[[], RunningEngine],
        restarts: RestartPolicy,
        *,
        on_ready: Callable[[Capabilities], None],
        record_end: Callable[[EngineEnd, float], bool],
    ) -> None:
        """Supervise an engine.

        Args:
            start: Starts the engine.
            restarts: When to restart it.
            on_ready: Called when the engine is ready for the first time.
            record_end: Called with the end of the engine and the time of its start, in seconds
                since the epoch. It counts a crash for the request that caused it, and returns
                whether a request was completed since the start.
        """
        self._start = start
        self._restarts = restarts
        self._on_ready = on_ready
        self._record_end = record_end
        self._stopping = asyncio.Event()
        self._engine: RunningEngine | None = None
        self.was_ready = False
        """Whether the engine has ever been ready."""
        self._is_ready = False

    async def run(self) -> None:
        """Run the engine until `stop`.

        Raises CannotServe if it cannot start or crashes repeatedly.
        """
        while not self._stopping.is_set():
            # Start the engine and wait for its end.
            started_at = time.time()
            self._is_ready = False
            self._engine = self._start()
            end = await self._engine.wait(self._handle_ready)
            if self._stopping.is_set():
                return

            # Give up if a restart would fail too.
            if end.is_final and not self.was_ready:
                raise CannotServe(end.message)
            made_progress = await self._record_progress(end, started_at) or end.was_killed or end.was_unreachable
            delay_s = self._restarts.compute_next_delay_s(made_progress=made_progress)
            if delay_s is None:
                raise CannotServe(f"the engine crashes repeatedly, giving up; last: {end.message}")

            # Wait before the restart.
            _log.warning("engine exited: %s; restarting it in %.2f s", end.message, delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _record_progress(self, end: EngineEnd, started_at: float) -> bool:
        """Record the end of the engine.

        Returns True if a request was completed, or the database was unavailable.
        """
        was_unavailable = False
        while not self._stopping.is_set():
            try:
                return await asyncio.to_thread(self._record_end, end, started_at) or was_unavailable
            except (StoreUnreachable, StoreBlocked) as error:
                if not was_unavailable:
                    _log.warning("%s; the engine restarts when the database is available", error)
                was_unavailable = True
            except StoreError as error:
                raise CannotServe(str(error)) from error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATABASE_RETRY_S)
        return True

    @property
    def location(self) -> EngineLocation | None:
        """The machine and process of the current or last run of the engine."""
        return None if self._engine is None else self._engine.location

    def stop(self) -> None:
        """Ask the engine to finish its batch and exit, and do not restart it."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.request_stop()

    def stop_after_rank_0(self, within_s: float) -> None:
        """Stop a host with a rank above 0: when rank 0 has ended, or after `within_s` seconds.

        Rank 0 needs this host to finish its batch and to take snapshots. The host stops at once if
        it is not ready, or if this is the second call.
        """
        if self._stopping.is_set() or not self._is_ready:
            self.stop()
            return
        self._stopping.set()
        asyncio.get_running_loop().call_later(within_s, self.stop)

    def kill(self) -> None:
        """Kill the engine."""
        if self._engine is not None:
            self._engine.kill()

    def _handle_ready(self, ready: Capabilities) -> None:
        if not self.was_ready:
            self._on_ready(ready)
        self.was_ready = self._is_ready = True


class RestartPolicy:
    """Exponential backoff between restarts, with a limit for starts without progress."""

    def __init__(self, max_starts: int, *, first_delay_s: float = 0.25) -> None:
        self._max_starts = max_starts
        self._first_delay_s = first_delay_s
        self._starts_without_progress = 0

    def compute_next_delay_s(self, *, made_progress: bool) -> float | None:
        """Return the seconds to wait before the next start, or None to give up."""
        self._starts_without_progress = 1 if made_progress else self._starts_without_progress + 1
        if self._starts_without_progress >= self._max_starts:
            return None
        return min(self._first_delay_s * 2 ** (self._starts_without_progress - 1), _MAX_DELAY_S)
