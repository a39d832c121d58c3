"""The engine process: how it is started, runs and ends.

The parent process (`serve`) starts the engine as a child with `EngineProcess` and watches it. The
child ends when its parent ends. `run_in_foreground` runs the engine without a parent, for the
command `skyrl-tx engine`. Both run `run_engine` on the main thread of the process.
"""

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from pydantic import BaseModel
from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactsUnreachable, open_artifacts
from skyrl_tx.backends.composed import COMPOSED, ComposedConfig
from skyrl_tx.backends.hosts.follower import follow
from skyrl_tx.backends.hosts.leader import LeadingBackend
from skyrl_tx.backends.hosts.protocol import LeaderLost, Welcome
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.registry import find_backend, find_sampler, start_backend
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.engine.engine import Engine
from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch.command import App, load_engine_extensions
from skyrl_tx.launch.launcher import EngineEnd, EngineLocation, EngineLost
from skyrl_tx.process.exposition import MetricsSocket, get_socket_path, serve_http
from skyrl_tx.process.setup import (
    CannotServe,
    LogFormat,
    LogLevel,
    configure_logging,
    enable_huge_pages,
    tune_interpreter,
)
from skyrl_tx.process.signals import (
    ServiceThread,
    enable_stack_dumps,
    end_process_on_failure,
    handle_signals,
)
from skyrl_tx.store import StoreBlocked, StoreError, engine_state, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.notices import record_notices
from skyrl_tx.store.writer import RetryPolicy

_log = logging.getLogger(__name__)

_OPEN_AGAIN_S = 1.0
_RECORD_S = 5.0
FULL_COLLECTION_AFTER = 20
"""Smaller garbage collections before a full one, see `tune_interpreter`."""
STUCK_STATUS = 75
"""Exit status of an engine with a backend call that does not return (EX_TEMPFAIL)."""
MIN_INTERPRETER_TIMEOUT_S = 30.0
"""Minimum time limit for the interpreter's lock. Loading weights may hold it for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """The arguments of an engine process.

    They are pickled, so backend and sampler are given by name.
    """

    settings: EngineSettings
    backend: str
    backend_config: BaseModel
    log_level: LogLevel
    log_format: LogFormat = "text"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional environment variables of the child, for example CUDA_VISIBLE_DEVICES."""
    hosts: HostsSettings = field(default_factory=HostsSettings)
    """The hosts that hold the model together.

    A host with a rank above 0 repeats the calls of rank 0.
    """
    sampler: str | None = None
    sampler_config: BaseModel | None = None
    sampler_check_share: float = 0.0
    sampler_falls_back: bool = False
    apps: Sequence[App] = ()
    """Optional features. The child imports their functions."""


class EngineProcess:
    """An engine in a child process, as the parent sees it."""

    def __init__(self, launch: EngineLaunch) -> None:
        """Start the child. `wait` receives its messages."""
        enable_huge_pages(os.environ)  # inherited by the child
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_end = spawn.Pipe()
        self._num_memory_kills = _count_memory_kills()
        self._boot_id = engine_state.make_boot_id()
        arguments = launch, child_end, self._boot_id
        self._process = spawn.Process(target=_run_child, args=arguments, name="skyrl-tx engine")

        # Start the child with SIGINT blocked: Ctrl-C signals all processes of the terminal, but the
        # parent must decide when the child stops.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

        # Close the child's end of the pipe here, so that the pipe breaks when either process ends.
        child_end.close()
        _log.info("engine process %d started", self.location.pid)

    @property
    def location(self) -> EngineLocation:
        """The machine, the process id and the run of the child."""
        assert self._process.pid is not None  # it was started
        return EngineLocation(socket.gethostname(), self._process.pid, self._boot_id)

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        """Wait until the child ends, and return why. Calls `on_ready` when the engine is ready."""
        end: EngineEnd | None = None
        while (message := await _receive(self._pipe)) is not None:
            if isinstance(message, Capabilities):
                on_ready(message)
            else:
                end = message
        await asyncio.to_thread(self._process.join)
        self._pipe.close()
        was_memory_exhausted = _count_memory_kills() > self._num_memory_kills
        return end or EngineEnd.from_exit_code(self._process.exitcode or 0, was_memory_exhausted)

    def request_stop(self) -> None:
        """Ask the engine to finish its batch, take snapshots and exit."""
        with suppress(OSError):  # it has already ended
            self._pipe.send("stop")

    def kill(self) -> None:
        """Kill the child. No acknowledged request is lost, because all are on disk."""
        self._process.kill()


async def _receive(pipe: Connection) -> Capabilities | EngineEnd | None:
    """Wait for the next message of the child: that it is ready, or why it ends.

    None after it has ended.
    """
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


def _count_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory. 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()  # the counter includes kills within a cgroup
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _run_child(launch: EngineLaunch, parent: Connection, boot_id: str) -> None:
    """Run the engine as a child. This is the entry point of the child process."""
    # Set up the process.
    os.environ.update(launch.environment)
    configure_logging("engine", launch.log_level, launch.log_format)
    enable_stack_dumps()
    end_process_on_failure()
    ServiceThread("follow-parent", lambda: _follow_parent(parent)).start()

    def on_stuck(store: Store, reason: str) -> None:
        parent.send(EngineEnd(message=reason, is_final=False, is_crash=True))
        _end_stuck_process(reason)

    # Run, and tell the parent why the engine ends.
    try:
        _run(launch, boot_id, parent.send, on_stuck, second_signal_exits=False)
        if launch.hosts.rank > 0:
            parent.send(EngineEnd(message="host 0 has stopped", is_final=False, is_crash=False))
        status = 0
    except Exception as error:
        parent.send(EngineEnd.from_error(error))
        status = 1

    # A normal exit would wait for programs that are being compiled, and for other hosts in JAX.
    logging.shutdown()
    os._exit(status)


def _follow_parent(parent: Connection) -> None:
    """Stop when the parent asks for it, and exit when the parent ends."""
    try:
        while True:
            parent.recv()
            os.kill(os.getpid(), signal.SIGTERM)
    except (EOFError, OSError):
        os._exit(1)


def run_in_foreground(launch: EngineLaunch, on_ready: Callable[[Capabilities], None]) -> None:
    """Run the engine in this process until a signal. A second signal exits at once.

    Raises CannotServe.
    """
    boot_id = engine_state.make_boot_id()
    try:
        _run(launch, boot_id, on_ready, _end_in_foreground, second_signal_exits=True)
    except Exception as error:
        # Record a crash. There is no parent that does it.
        end = EngineEnd.from_error(error)
        if end.is_crash:
            with closing(open_store(launch.settings, threading.Event())) as store:
                store.write(lambda tx: record_end(tx, boot_id, is_crash=True))

        if launch.hosts.size > 1:
            _log.critical("%s", end.message)
            os._exit(1)  # a normal exit would wait for the other hosts in JAX
        raise CannotServe(end.message) from error


def _end_in_foreground(store: Store, reason: str) -> None:
    """Record the crash, because there is no parent that does it, and end this process."""
    with suppress(StoreError, TimeoutError):  # if the database is lost too, the crash is not counted
        store.write_soon(lambda tx: futures.record_engine_end(tx, is_crash=True, engine=store.engine_number)).result(
            _RECORD_S
        )
    _end_stuck_process(reason)


def record_end(tx: Session, boot_id: str, *, is_crash: bool) -> None:
    """Record the end of a run of an engine. A crash counts for the request that ran alone.

    Does nothing if the run has published no status, or if another engine has its number now.
    """
    if (number := engine_state.find_number(tx, boot_id)) is not None:
        futures.record_engine_end(tx, is_crash=is_crash, engine=number)


def _run(
    launch: EngineLaunch,
    boot_id: str,
    on_ready: Callable[[Capabilities], None],
    on_stuck: Callable[[Store, str], object],
    *,
    second_signal_exits: bool,
) -> None:
    """Run the engine, or follow rank 0 on the other hosts. Returns after a clean stop."""
    tune_interpreter(full_collection_after=FULL_COLLECTION_AFTER)
    if launch.hosts.rank > 0:
        _follow(launch.hosts, on_ready)
        return

    # Combine the backend with the sampler.
    backend, config = find_backend(launch.backend), launch.backend_config
    if launch.sampler is not None and launch.sampler_config is not None:
        config = ComposedConfig(
            trainer=backend,
            trainer_config=config,
            sampler=find_sampler(launch.sampler),
            sampler_config=launch.sampler_config,
            check_share=launch.sampler_check_share,
            falls_back=launch.sampler_falls_back,
        )
        backend = COMPOSED

    def start(on_lost: Callable[[str], object]) -> AbstractBackend:
        name, base_model = " + ".join(filter(None, (launch.backend, launch.sampler))), launch.settings.base_model
        started = start_backend(name, backend, base_model, config)
        if launch.hosts.size == 1:
            return started
        settings = launch.backend_config.model_dump_json().encode()
        welcome = Welcome(backend=launch.backend, base_model=base_model, config=settings)
        return LeadingBackend(started, launch.hosts, welcome, on_lost=on_lost)

    # Run.
    with _interpreter_watchdog(launch.settings.step_timeout_s):
        run_engine(
            launch.settings,
            start,
            on_ready,
            on_stuck,
            boot_id=boot_id,
            second_signal_exits=second_signal_exits,
            apps=launch.apps,
        )


def _follow(hosts: HostsSettings, on_ready: Callable[[Capabilities], None]) -> None:
    """Repeat the calls of rank 0 in this process. SIGTERM ends it at once.

    Raises EngineLost if rank 0 is lost.
    """
    try:
        follow(hosts, on_ready=on_ready, on_lost=_end_stuck_process)
    except LeaderLost as error:
        raise EngineLost(str(error)) from error


def run_engine(
    settings: EngineSettings,
    start: Callable[[Callable[[str], object]], AbstractBackend],
    on_ready: Callable[[Capabilities], None] = lambda _: None,
    on_stuck: Callable[[Store, str], object] = lambda _store, _reason: None,
    *,
    boot_id: str | None = None,
    second_signal_exits: bool = True,
    apps: Sequence[App] = (),
) -> None:
    """Run an engine on the main thread until SIGTERM or SIGINT.

    Args:
        settings: Settings of the engine.
        start: Starts the backend. Its argument ends this process with a reason, for example if a
            host of the backend is lost.
        on_ready: Called when the engine is ready.
        on_stuck: Called on another thread when a backend call exceeds its time limit.
        boot_id: Id of this run. The default is a new id.
        second_signal_exits: Whether a second signal ends the process at once. A parent decides
            this for its child.
        apps: Optional features.

    Raises EngineLost if the backend or the database was lost, and other errors if the start fails.
    """
    # Open the database, which may have to wait.
    stop = threading.Event()
    meters = EngineMetrics(with_owners=settings.metrics_owners)
    store = open_store(settings, stop)

    # A signal stops the loop.
    def on_signal(number: int) -> None:
        if stop.is_set() and second_signal_exits:
            os._exit(128 + number)
        stop.set()
        store.wake()

    with (
        closing(store),
        serve_http(settings.metrics_host, settings.metrics_port, meters.registry),
        handle_signals({signal.SIGTERM, signal.SIGINT}, on_signal),
    ):
        try:
            # Load the backend and open the artifacts.
            backend = start(lambda reason: on_stuck(store, reason))
            artifacts = open_artifacts(
                settings.data_dir,
                settings.artifacts,
                max_cache_bytes=settings.max_artifact_cache_bytes,
                min_free_bytes=settings.min_free_disk_bytes,
            )

            # Make the engine and run its loop.
            engine = Engine(
                settings,
                backend,
                store,
                artifacts,
                meters,
                boot_id or engine_state.make_boot_id(),
                load_engine_extensions(apps),
            )
            path = get_socket_path(settings.data_dir, store.engine_number)
            with _serve_metrics_socket(path, engine.meters), record_notices(store, "engine"):
                engine.run(stop, on_ready, lambda reason: on_stuck(store, reason))
        except (BackendLost, StoreError, ArtifactsUnreachable) as error:
            raise EngineLost(f"backend, database or object store lost: {error}") from error


def open_store(settings: EngineSettings, stop: threading.Event) -> Store:
    """Open the engine's database.

    If it is full or locked, this and later writes wait until it is not, or `stop`.
    """
    store: Store | None = None

    def report(tx: Session, detail: str) -> None:
        engine_state.report_waiting(tx, 1 if store is None else store.engine_number, detail)

    retry, url = RetryPolicy(until=stop, report=report), settings.store_url
    while True:
        try:
            store = Store.open(settings.data_dir, role="engine", url=url, retry=retry, is_shared=settings.engines > 1)
            return store
        except StoreBlocked as error:
            _log.warning("%s; trying again", error)
            time.sleep(_OPEN_AGAIN_S)


@contextmanager
def _serve_metrics_socket(path: Path, meters: EngineMetrics) -> Generator[None]:
    """Serve the engine's metrics to the API.

    If that is not possible, the engine runs without it.
    """
    try:
        served = MetricsSocket(path, meters.registry)
    except OSError as error:
        _log.warning("cannot serve the metrics of the engine to the API: %s", error)
        yield
        return
    with closing(served):
        yield


@contextmanager
def _interpreter_watchdog(timeout_s: float) -> Generator[None]:
    """End this process if no Python code has run for a time, and log all stacks. 0 disables this.

    A call that never releases the interpreter's lock stops all Python threads, including the
    watchdog. So this uses the timer of `faulthandler`, which is written in C. As long as Python
    code runs, a thread restarts the timer.
    """
    ended = threading.Event()
    log = sys.__stderr__ or sys.stderr
    limit_s = max(timeout_s, MIN_INTERPRETER_TIMEOUT_S)

    def restart_timer() -> None:
        while not ended.wait(min(1.0, limit_s / 4)):
            faulthandler.dump_traceback_later(limit_s, exit=True, file=log)

    thread = ServiceThread("interpreter-watchdog", restart_timer)
    if timeout_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if timeout_s:
            thread.join()
            faulthandler.cancel_dump_traceback_later()


def _end_stuck_process(reason: str) -> None:
    """End this process because a backend call does not return. Logs the stacks of all threads."""
    _log.critical("%s; this process ends, and the next one continues from the log. All stacks:", reason)
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(STUCK_STATUS)
