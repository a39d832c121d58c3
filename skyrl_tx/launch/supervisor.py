"""The commands that run a server: `serve`, `api` and `engine`.

`serve` runs the API in this process and each engine in a child process. If an engine ends, its
supervisor starts it again. The file begins with the commands. Then follow the steps of a command's
start, the loop that runs API and engines until a signal, and the supervisor of one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlmodel import Session

from skyrl_tx import __version__
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.launch.command import App, check_app_settings, load_server_extensions
from skyrl_tx.launch.data import (
    abandon_models,
    check_model_files,
    open_api_database,
    open_database,
    record_artifacts_location,
    refuse_second_engine,
    warn_if_disk_is_full,
)
from skyrl_tx.launch.engine_end import EngineEnd, RestartPolicy
from skyrl_tx.launch.engine_process import (
    EngineLaunch,
    EngineLocation,
    EngineProcess,
    record_end,
    run_in_foreground,
)
from skyrl_tx.launch.launcher import EngineStarts, RunningEngine, assign_devices, find_launcher
from skyrl_tx.launch.settings import ServerSettings, SettingsError
from skyrl_tx.process.memory import ENGINES_ON_HOST
from skyrl_tx.process.setup import CannotServe, check_certificate, get_url, listen, tune_interpreter
from skyrl_tx.process.signals import handle_signals
from skyrl_tx.server.app import ApiServer
from skyrl_tx.store import StoreBlocked, StoreError, StoreUnreachable, checkpoints, futures, keys, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.notices import record_notices

_log = logging.getLogger(__name__)

_STOP_S = 30.0
"""Seconds for the engine to finish its batch and take snapshots."""
_GRACE_S = 2
"""Seconds for open calls to get their response when the API stops."""
_MAX_STARTS = 5
"""Starts in a row without progress before the server gives up. They take less than four seconds."""
_DATABASE_RETRY_S = 0.5
_FULL_COLLECTION_AFTER = 1_000
"""Smaller garbage collections before a full one: practically never, see `tune_interpreter`."""


def serve(settings: ServerSettings, apps: Sequence[App]) -> int:
    """Run the API and the engines until a signal. Raises CannotServe."""
    # Check the settings and the files of the model, unless the engines run on other machines.
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    check_app_settings(apps, settings.make_api_settings())
    if not settings.has_remote_engines:
        check_model_files(settings)
    launch = make_engine_launch(settings, apps)
    if launch.hosts.rank > 0:
        raise CannotServe(f"host {launch.hosts.rank} of {launch.hosts.size} serves no API: run `skyrl-tx engine` here")

    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        contextlib.closing(open_api_database(settings)) as store,
        _open_launcher(settings, launch) as starts,
    ):
        # Check the data, and abandon old models with --fresh.
        if settings.engines == 1 or settings.fresh:
            refuse_second_engine(store)
        record_artifacts_location(settings)
        warn_if_disk_is_full(settings)
        if settings.fresh:
            abandon_models(store)
        _log.info("skyrl_tx %s loads %s with backend %s", __version__, settings.base_model, settings.backend)

        # Print how to connect when the first engine is ready.
        requires_key = not settings.no_auth and store.read(keys.has_any)
        url, num_ready = get_url(listener, settings.scheme), itertools.count(1)

        contents = store.read(_describe_contents)

        def on_ready(ready: Capabilities) -> None:
            if (number := next(num_ready)) == 1:
                _log_ready(settings, ready, url, requires_key=requires_key, contents=contents)
            if settings.engines > 1:
                _log.info("%d of %d engines are ready", number, settings.engines)

        # Run until a signal.
        engines = [_make_supervisor(start, store, on_ready) for start in starts]
        _run_api(settings, store, apps, listener, engines)
    return 0


def serve_api(settings: ServerSettings, apps: Sequence[App] = ()) -> int:
    """Run only the API until a signal. Raises CannotServe."""
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    check_app_settings(apps, settings.make_api_settings())
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        contextlib.closing(open_api_database(settings)) as store,
    ):
        url = get_url(listener, settings.scheme)
        record_artifacts_location(settings)
        _log.info("skyrl_tx %s, API only, at %s, data in %s", __version__, url, settings.data_dir)
        _run_api(settings, store, apps, listener, [])
    return 0


def _run_api(
    settings: ServerSettings,
    store: Store,
    apps: Sequence[App],
    listener: socket.socket,
    engines: Sequence[EngineSupervisor],
) -> None:
    """Run the API and watch the engines until a signal."""
    tune_interpreter(full_collection_after=_FULL_COLLECTION_AFTER)
    with record_notices(store, "api"):
        asyncio.run(run_servers(SupervisedApi(settings, store, apps), listener, engines))


def serve_engine(settings: ServerSettings, apps: Sequence[App]) -> int:
    """Run only the engine until a signal. Raises CannotServe."""
    launch = make_engine_launch(settings, apps)

    # A host of a rank above 0 repeats the calls of rank 0.
    if launch.hosts.rank > 0:
        return _follow(launch)
    _log.info("skyrl_tx %s, engine only, data in %s", __version__, settings.data_dir)

    # A launcher starts engines on other machines.
    if settings.has_remote_engines:
        with contextlib.closing(open_database(settings)) as store, _open_launcher(settings, launch) as starts:
            is_ready = partial(_log_ready, settings, url=None)
            asyncio.run(_run_alone([_make_supervisor(start, store, is_ready) for start in starts]))
        return 0

    # Otherwise the engine runs in this process.
    check_model_files(settings)
    warn_if_disk_is_full(settings)
    run_in_foreground(launch, lambda ready: _log_ready(settings, ready, None))
    return 0


def _follow(launch: EngineLaunch) -> int:
    """Run a host that repeats the backend calls of rank 0, until a signal.

    The process of the host ends when rank 0 ends, and is then started again. Raises CannotServe if
    rank 0 rejects this host.
    """
    hosts = launch.hosts
    _log.info("skyrl_tx %s, host %d of %d, which follows %s", __version__, hosts.rank, hosts.size, hosts.address)
    follower = EngineSupervisor(
        lambda: EngineProcess(launch),
        RestartPolicy(_MAX_STARTS),
        on_ready=lambda _: _log.info("host %d is ready", hosts.rank),
        record_end=lambda _end, _started_at: True,  # only rank 0 counts crashes and gives up
    )

    async def run() -> None:
        call = asyncio.get_running_loop().call_soon_threadsafe
        with handle_signals(
            {signal.SIGINT, signal.SIGTERM}, lambda _: call(follower.stop_after_rank_0, _STOP_S + _GRACE_S)
        ):
            await follower.run()

    asyncio.run(run())
    return 0


def make_engine_launch(settings: ServerSettings, apps: Sequence[App] = ()) -> EngineLaunch:
    """Return the arguments of the engine process.

    Raises CannotServe if the settings do not fit together.
    """
    hosts = _resolve_hosts(settings)
    if hosts.size > 1 and settings.sampler is not None:
        raise CannotServe(
            f"--sampler {settings.sampler}: it cannot be used with --hosts.size {hosts.size}: every host repeats each "
            "backend call, so each would send every sample to the sampler; use one host, or no sampler"
        )

    return EngineLaunch(
        settings=settings.make_engine_settings(),
        backend=settings.backend,
        backend_config=settings.backend_config,
        sampler=settings.sampler,
        sampler_config=settings.sampler_config,
        sampler_check_share=settings.sampler_check_share,
        sampler_falls_back=settings.sampler_fallback == "trainer",
        log_level=settings.log_level,
        log_format=settings.log_format,
        hosts=hosts,
        apps=apps,
    )


def _resolve_hosts(settings: ServerSettings) -> HostsSettings:
    try:
        return settings.host_settings
    except SettingsError as error:
        raise CannotServe(str(error)) from error


@contextlib.contextmanager
def _open_launcher(settings: ServerSettings, launch: EngineLaunch) -> Generator[EngineStarts]:
    """Yield one function per engine. It starts the engine as a child or with a launcher."""
    if settings.metrics_port:
        raise CannotServe("--metrics-port is for an engine alone: `skyrl-tx engine` on its own machine")
    if not settings.has_remote_engines:
        shares = assign_devices(settings.engines, os.environ, Path("/dev"))
        shares = [{**share, ENGINES_ON_HOST: str(settings.engines)} for share in shares]
        yield [partial(EngineProcess, replace(launch, environment=share)) for share in shares]
        return
    start_engines = find_launcher(settings.launcher).load()
    with start_engines(getattr(settings, settings.launcher), launch, settings.engines) as starts:
        yield starts


def _make_supervisor(
    start: Callable[[], RunningEngine], store: Store, on_ready: Callable[[Capabilities], None]
) -> EngineSupervisor:
    """Make a supervisor of one engine, which records crashes of the engine in the database."""

    def record(end: EngineEnd, since: float) -> bool:
        """Record the end of the engine. Returns True if a request was completed after `since`."""

        def work(tx: Session) -> bool:
            if supervisor.location is not None:
                record_end(tx, supervisor.location.boot_id, is_crash=end.is_crash)
            return futures.has_answered_since(tx, since)

        return store.write(work)

    supervisor = EngineSupervisor(start, RestartPolicy(_MAX_STARTS), on_ready=on_ready, record_end=record)
    return supervisor


def _describe_contents(tx: Session) -> str:
    """Describe what the database holds, for example "runs: 2, checkpoints: 10"."""
    num_runs, (num_checkpoints, _) = models.count(tx), checkpoints.count(tx, time.time())
    return f"runs: {num_runs:,}, checkpoints: {num_checkpoints:,}" if num_runs + num_checkpoints else "empty"


def _log_ready(
    settings: ServerSettings, ready: Capabilities, url: str | None, *, requires_key: bool = False, contents: str = ""
) -> None:
    """Log which model is served, and how to connect."""
    _log.info("devices: %s", ", ".join(ready.devices))
    _log.info("model: %s, %s parameters", settings.public_model_name, f"{ready.num_parameters:,}")
    _log.info("data: %s%s", settings.data_dir, contents and f", {contents}")
    if url is None:
        _log.info("ready")
        return

    if not settings.no_console:
        _log.info("console: %s/overview", url)
    _log.info("ready at %s; connect with", url)
    _log.info("    import tinker")
    key = "tml-…" if requires_key else "tml-local"  # the SDK requires a key of this form, even without authentication
    _log.info('    service = tinker.ServiceClient(base_url="%s", api_key="%s")', url, key)


async def run_servers(api: SupervisedApi, listener: socket.socket, engines: Sequence[EngineSupervisor]) -> None:
    """Run the API and engines until a signal.

    Raises CannotServe if the API or all engines cannot continue.
    """
    with _stop_on_signal(engines) as stop:
        await _serve_until(stop, api, listener, engines)
    if not api.started:
        raise CannotServe("the API could not start; the log above says why")


async def _serve_until(
    stop: asyncio.Event, api: SupervisedApi, listener: socket.socket, engines: Sequence[EngineSupervisor]
) -> None:
    """Run the API and engines until `stop` is set, the API has ended or all engines have ended."""
    serving = asyncio.create_task(api.serve(sockets=[listener]))
    supervising = asyncio.create_task(_supervise(engines)) if engines else None
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task for task in (serving, supervising, stopped) if task}, return_when=asyncio.FIRST_COMPLETED)

    # Stop all at the same time, so that open long polls still receive the results of stopping
    # engines.
    api.should_exit = True
    if supervising is not None:
        await _stop(supervising, engines)
    await serving
    stopped.cancel()

    # Raise the error of the engines, if there is one.
    if supervising is not None:
        await supervising


async def _run_alone(engines: Sequence[EngineSupervisor]) -> None:
    """Run engines without an API until a signal. Raises CannotServe if no engine can continue."""
    with _stop_on_signal(engines) as stop:
        supervising, stopped = asyncio.create_task(_supervise(engines)), asyncio.create_task(stop.wait())
        await asyncio.wait({supervising, stopped}, return_when=asyncio.FIRST_COMPLETED)
        await _stop(supervising, engines)
        stopped.cancel()
        await supervising


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
    """Stop the engines. Kill them if they do not stop within `_STOP_S`."""
    for engine in engines:
        engine.stop()
    _, running = await asyncio.wait({supervising}, timeout=_STOP_S)
    if running:
        _log.warning("the engine did not stop within %d s and is killed; no acknowledged request is lost", _STOP_S)
        for engine in engines:
            engine.kill()


class SupervisedApi(ApiServer):
    """The API on a socket. The supervisor handles the signals."""

    def __init__(self, settings: ServerSettings, store: Store, apps: Sequence[App] = ()) -> None:
        super().__init__(settings.make_api_settings(), store, load_server_extensions(apps))
        self.config.timeout_graceful_shutdown = _GRACE_S

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
