"""`serve`: the API in this process, the engine in a child that is restarted when it dies; both stopped cleanly."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

from skyrl_tx import __version__, engine_process
from skyrl_tx.api.server import ApiServer
from skyrl_tx.engine_process import EngineLaunch, EngineProcess, EngineReady
from skyrl_tx.garbage import collect_seldom
from skyrl_tx.listening import CannotServe, listen, url_of
from skyrl_tx.settings import ServerSettings
from skyrl_tx.store import checkpoints, futures, keys, models
from skyrl_tx.store.database import Store, StoreError, StoreInUse
from skyrl_tx.store.errors import StoreBlocked, StoreUnreachable

log = logging.getLogger(__name__)

STOP_S = 30.0
"""How long the engine may take to finish its step and take its snapshots."""
_ANSWER_S = 2
"""How long open calls may take to be answered when the API stops."""
_LONGEST_DELAY_S = 15.0
_DATABASE_AGAIN_S = 0.5
_OTHER_GONE_S = 3.0
"""How long an engine that was killed a moment ago may still seem to be there."""
_FULL_COLLECTION_AFTER = 1_000
"""As good as never: calls that wait leave no cyclic garbage, and other calls do not last."""


class SupervisedApi(ApiServer):
    """The API on a socket, leaving signals to the supervisor."""

    def __init__(self, settings: ServerSettings, store: Store) -> None:
        super().__init__(settings.for_api(), store)
        self.config.timeout_graceful_shutdown = _ANSWER_S

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Restarts:
    """When to start the engine again: later each time, and never after too many starts without progress."""

    def __init__(self, max_starts: int, *, first_delay_s: float = 0.25) -> None:
        self._max_starts = max_starts
        self._first_delay_s = first_delay_s
        self._fruitless = 0

    def next_delay_s(self, *, made_progress: bool) -> float | None:
        """Seconds to wait after this death; None to give up."""
        self._fruitless = 1 if made_progress else self._fruitless + 1
        if self._fruitless >= self._max_starts:
            return None
        return min(self._first_delay_s * 2 ** (self._fruitless - 1), _LONGEST_DELAY_S)


class EngineKeeper:
    """Keeps one engine alive until told to stop."""

    def __init__(
        self,
        start: Callable[[], EngineProcess],
        restarts: Restarts,
        *,
        on_ready: Callable[[EngineReady], None],
        has_progressed: Callable[[float], bool],
    ) -> None:
        """`has_progressed(since)`: whether any request was answered after that epoch time."""
        self._start = start
        self._restarts = restarts
        self._on_ready = on_ready
        self._has_progressed = has_progressed
        self._stopping = asyncio.Event()
        self._engine: EngineProcess | None = None
        self._was_ready = False

    async def run(self) -> None:
        """Return once stopped; raises CannotServe when the engine cannot start or keeps dying."""
        while not self._stopping.is_set():
            started_at = time.time()
            self._engine = self._start()
            log.info("engine process %d started", self._engine.pid)
            failure = await self._engine.live(self._ready)
            if self._stopping.is_set():
                return
            if failure.is_final and not self._was_ready:
                raise CannotServe(failure.message)
            delay_s = self._restarts.next_delay_s(made_progress=await self._progressed_since(started_at))
            if delay_s is None:
                raise CannotServe(f"the engine keeps dying, giving up; last: {failure.message}")
            log.warning("engine gone: %s; starting it again in %.2f s", failure.message, delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _progressed_since(self, started_at: float) -> bool:
        """Ask; while there is no database no engine can be started, and none is to blame for its end."""
        is_told = False
        while not self._stopping.is_set():
            try:
                return await asyncio.to_thread(self._has_progressed, started_at) or is_told
            except (StoreUnreachable, StoreBlocked) as error:
                if not is_told:
                    log.warning("%s; the engine starts again when it is back", error)
                is_told = True
            except StoreError as error:
                raise CannotServe(str(error)) from error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATABASE_AGAIN_S)
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the engine has ever been ready."""
        return self._was_ready

    def stop(self) -> None:
        """Have the engine finish its step and exit."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.ask_to_stop()

    def kill(self) -> None:
        """End the engine now."""
        if self._engine is not None:
            self._engine.kill()

    def _ready(self, ready: EngineReady) -> None:
        if not self._was_ready:
            self._on_ready(ready)
        self._was_ready = True


async def serve_both(api: SupervisedApi, listener: socket.socket, engine: EngineKeeper | None) -> None:
    """Run the API, and the engine if it is ours, until a signal; raises CannotServe when one cannot go on."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            if engine is not None:
                engine.kill()
            os._exit(128 + number)
        log.info("stopping: no new work, what runs is finished; a second signal exits at once")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(api.serve(sockets=[listener]))
    keeping = asyncio.create_task(engine.run()) if engine is not None else None
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task for task in (serving, keeping, stopped) if task}, return_when=asyncio.FIRST_COMPLETED)
    # Together: what the engine finishes now can still reach the calls that wait for it.
    api.should_exit = True
    if engine is not None and keeping is not None:
        engine.stop()
        _, running = await asyncio.wait({keeping}, timeout=STOP_S)
        if running:
            log.warning("the engine did not stop within %d s; ending it: what it acknowledged is on disk", STOP_S)
            engine.kill()
    await serving
    stopped.cancel()
    if keeping is not None:
        await keeping
    if not api.started:
        raise CannotServe("the API could not start; the log above says why")


def serve(settings: ServerSettings) -> int:
    """Serve until a signal; raises CannotServe."""
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        contextlib.closing(_open_store(settings)) as store,
    ):
        _refuse_second_engine(store)
        if settings.fresh:
            _leave_models(store)
        log.info("skyrl_tx %s loads %s with backend %s", __version__, settings.base_model, settings.backend)
        launch = launch_of(settings)
        keeper = EngineKeeper(
            lambda: EngineProcess(launch),
            Restarts(settings.max_engine_starts),
            on_ready=lambda ready: _greet(settings, ready, url_of(listener)),
            has_progressed=lambda since: store.read(lambda tx: futures.any_answered_since(tx, since)),
        )
        collect_seldom(full_after=_FULL_COLLECTION_AFTER)
        asyncio.run(serve_both(SupervisedApi(settings, store), listener, keeper))
    return 0


def run_api(settings: ServerSettings) -> int:
    """Run the API alone until a signal; raises CannotServe."""
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        contextlib.closing(_open_store(settings)) as store,
    ):
        log.info("skyrl_tx %s, the API alone at %s, data in %s", __version__, url_of(listener), settings.data_dir)
        collect_seldom(full_after=_FULL_COLLECTION_AFTER)
        asyncio.run(serve_both(SupervisedApi(settings, store), listener, None))
    return 0


def run_engine(settings: ServerSettings) -> int:
    """Run the engine alone until a signal; raises CannotServe."""
    log.info("skyrl_tx %s, the engine alone, data in %s", __version__, settings.data_dir)
    engine_process.run_alone(launch_of(settings), lambda ready: _greet(settings, ready, None))
    return 0


def launch_of(settings: ServerSettings) -> EngineLaunch:
    """Return what the engine is told."""
    return EngineLaunch(
        settings=settings.for_engine(),
        backend=settings.backend,
        backend_config=settings.backend_config,
        log_level=settings.log_level,
    )


def _open_store(settings: ServerSettings) -> Store:
    try:
        store = Store.open(settings.data_dir, role="api", url=settings.store_url)
    except (StoreInUse, StoreError, OSError) as error:
        raise CannotServe(str(error)) from error
    api = settings.for_api()
    if not (api.is_loopback or api.no_auth or store.read(keys.any_usable)):
        store.close()
        raise CannotServe(
            f"--host {settings.host} is reachable by others and there are no keys: make one with\n"
            f"    skyrl-tx keys create --admin NAME --data-dir {settings.data_dir}\n"
            "or add --no-auth to let everyone in, or keep to 127.0.0.1"
        )
    return store


def _refuse_second_engine(store: Store) -> None:
    """Before anything is changed; a second API of an engine is started as `skyrl-tx api`."""
    end = time.monotonic() + _OTHER_GONE_S
    while store.peer_lives():
        if time.monotonic() > end:
            raise CannotServe(
                "an engine is at work on this database already; `skyrl-tx api` serves one more address for it"
            )
        time.sleep(0.05)


def _leave_models(store: Store) -> None:
    """Bring back no model of an earlier start, and say what stays where it is."""
    left, num_saved, size_bytes = store.write(
        lambda tx: (models.leave_all(tx), *checkpoints.count(tx, time.time())),
    )
    log.info(
        "fresh start: %d models in training are left behind%s; %d named checkpoints (%.1f MB) stay and can be loaded",
        len(left),
        f" ({', '.join(row.model_id for row in left[:5])}{', …' if len(left) > 5 else ''})" if left else "",
        num_saved,
        size_bytes / 1e6,
    )


def _greet(settings: ServerSettings, ready: EngineReady, url: str | None) -> None:
    """Say what is served, and how to reach it."""
    log.info("devices: %s", ", ".join(ready.devices))
    log.info("model: %s, %s parameters", settings.public_model_name, f"{ready.num_parameters:,}")
    log.info("data: %s", settings.data_dir)
    if url is None:
        log.info("ready")
        return
    log.info("ready at %s; connect with", url)
    log.info("    import tinker")
    log.info('    service = tinker.ServiceClient(base_url="%s", api_key="tml-local")', url)
