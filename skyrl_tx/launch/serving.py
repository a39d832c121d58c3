"""The commands that run a server: `serve`, `api` and `engine`.

`serve` runs the API in this process and each engine in a child process. If an engine ends, its
supervisor starts it again. The file begins with the commands. Then follow the steps of a command's
start, and the checks of the data that the server uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlmodel import Session

from skyrl_tx import __version__
from skyrl_tx.artifacts import ArtifactsUnreachable, InvalidLocation, open_artifacts
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.launch.command import App, check_app_settings
from skyrl_tx.launch.engine_process import EngineLaunch, EngineProcess, record_end, run_in_foreground
from skyrl_tx.launch.launcher import EngineEnd, EngineStarts, RunningEngine, assign_devices, find_launcher
from skyrl_tx.launch.settings import ServerSettings, SettingsError
from skyrl_tx.launch.supervisor import (
    GRACE_S,
    MAX_STARTS,
    STOP_S,
    EngineSupervisor,
    RestartPolicy,
    SupervisedApi,
    run_servers,
)
from skyrl_tx.process.memory import ENGINES_ON_HOST
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe, check_certificate, get_url, listen, tune_interpreter
from skyrl_tx.process.signals import handle_signals
from skyrl_tx.process.text import format_bytes
from skyrl_tx.store import StoreError, checkpoints, futures, keys, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.notices import record_notices

_log = logging.getLogger(__name__)

_FULL_COLLECTION_AFTER = 1_000
"""Smaller garbage collections before a full one: practically never, see `tune_interpreter`."""
_MODEL_SUFFIXES = frozenset({".json", ".jinja", ".safetensors"})
_RELEASE_S = 3.0
"""Seconds after which a killed engine no longer counts as running."""


def serve(settings: ServerSettings, apps: Sequence[App]) -> None:
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


def serve_api(settings: ServerSettings, apps: Sequence[App] = ()) -> None:
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
        asyncio.run(run_servers(engines, SupervisedApi(settings, store, apps), listener))


def serve_engine(settings: ServerSettings, apps: Sequence[App]) -> None:
    """Run only the engine until a signal. Raises CannotServe."""
    launch = make_engine_launch(settings, apps)

    # A host of a rank above 0 repeats the calls of rank 0.
    if launch.hosts.rank > 0:
        _follow(launch)
        return
    _log.info("skyrl_tx %s, engine only, data in %s", __version__, settings.data_dir)

    # A launcher starts engines on other machines.
    if settings.has_remote_engines:
        with contextlib.closing(open_database(settings)) as store, _open_launcher(settings, launch) as starts:
            is_ready = partial(_log_ready, settings, url=None)
            asyncio.run(run_servers([_make_supervisor(start, store, is_ready) for start in starts]))
        return

    # Otherwise the engine runs in this process.
    check_model_files(settings)
    warn_if_disk_is_full(settings)
    run_in_foreground(launch, lambda ready: _log_ready(settings, ready, None))


def _follow(launch: EngineLaunch) -> None:
    """Run a host that repeats the backend calls of rank 0, until a signal.

    The process of the host ends when rank 0 ends, and is then started again. Raises CannotServe if
    rank 0 rejects this host.
    """
    hosts = launch.hosts
    _log.info("skyrl_tx %s, host %d of %d, which follows %s", __version__, hosts.rank, hosts.size, hosts.address)
    follower = EngineSupervisor(
        lambda: EngineProcess(launch),
        RestartPolicy(MAX_STARTS),
        on_ready=lambda _: _log.info("host %d is ready", hosts.rank),
        record_end=lambda _end, _started_at: True,  # only rank 0 counts crashes and gives up
    )

    async def run() -> None:
        call = asyncio.get_running_loop().call_soon_threadsafe
        with handle_signals(
            {signal.SIGINT, signal.SIGTERM}, lambda _: call(follower.stop_after_rank_0, STOP_S + GRACE_S)
        ):
            await follower.run()

    asyncio.run(run())


def make_engine_launch(settings: ServerSettings, apps: Sequence[App] = ()) -> EngineLaunch:
    """Return the arguments of the engine process.

    Raises CannotServe if the settings do not fit together.
    """
    try:
        hosts = settings.host_settings
    except SettingsError as error:
        raise CannotServe(str(error)) from error
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

    supervisor = EngineSupervisor(start, RestartPolicy(MAX_STARTS), on_ready=on_ready, record_end=record)
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


def check_model_files(settings: ServerSettings) -> None:
    """Raise CannotServe if the base model or the tokenizer is a path without readable files.

    Otherwise only the engine would find out, after it has loaded its libraries.
    """
    for flag, model in ("--base-model", settings.base_model), ("--tokenizer-id", settings.tokenizer_id or ""):
        path = Path(model).expanduser()
        try:
            if model.startswith((".", "/", "~")) and not path.exists():
                raise CannotServe(f"{flag} {model}: no such directory")
            for file in sorted(path.iterdir()) if path.is_dir() else ():
                if file.suffix in _MODEL_SUFFIXES and file.is_file():
                    file.open("rb").close()
        except OSError as error:
            raise CannotServe(f"{flag} {explain_os_error(error)}") from error


def warn_if_disk_is_full(settings: ServerSettings) -> None:
    """Log a warning if the disk of the data directory has too little space for new weights."""
    data_dir, needed = settings.data_dir, settings.make_engine_settings().min_free_disk_bytes
    existing = next((path for path in (data_dir, *data_dir.parents) if os.access(path, os.F_OK)), Path("/"))
    free = shutil.disk_usage(existing).free
    if free < needed:
        _log.warning(
            "only %s are free on the disk of %s: saving weights fails until there are %s; delete checkpoints, or "
            "enlarge the disk",
            format_bytes(free),
            data_dir,
            format_bytes(needed),
        )


def open_database(settings: ServerSettings) -> Store:
    """Open the database as the API process does. Raises CannotServe if it cannot be opened."""
    try:
        return Store.open(settings.data_dir, role="api", url=settings.store_url, is_shared=settings.engines > 1)
    except StoreError as error:
        raise CannotServe(str(error)) from error
    except OSError as error:
        raise CannotServe(f"--data-dir {explain_os_error(error, settings.data_dir)}") from error


def open_api_database(settings: ServerSettings) -> Store:
    """Open the database for the API.

    Raises CannotServe if other machines can reach the API, there is no usable key, and
    authentication is not disabled (`--no-auth`).
    """
    store = open_database(settings)
    api = settings.make_api_settings()
    if not (api.is_loopback or api.no_auth or store.read(lambda tx: keys.list_usable(tx, time.time()))):
        store.close()
        raise CannotServe(
            f"--host {settings.host} is reachable from other machines and there are no API keys: create one with\n"
            f"    skyrl-tx keys create --admin NAME --data-dir {settings.data_dir}\n"
            "or add --no-auth to disable authentication, or use 127.0.0.1"
        )
    if api.no_auth and not api.is_loopback:
        _log.warning("--no-auth: everyone who can reach --host %s is an admin", settings.host)
    elif api.no_auth or not store.read(keys.has_any):
        _log.info("no API key is required: every user of this machine is an admin; see `skyrl-tx keys create`")
    return store


def record_artifacts_location(settings: ServerSettings) -> None:
    """Check the location of the artifacts, and record it in the data directory.

    Raises CannotServe if the location cannot be used.
    """
    try:
        open_artifacts(settings.data_dir, settings.artifacts)
    except (InvalidLocation, ArtifactsUnreachable) as error:
        raise CannotServe(str(error)) from error


def refuse_second_engine(store: Store) -> None:
    """Raise CannotServe if an engine is running on the database.

    The server calls this before it changes anything.
    """
    end = time.monotonic() + _RELEASE_S
    while store.is_peer_running():
        if time.monotonic() > end:
            raise CannotServe(
                "an engine is already running on this database; `skyrl-tx api` adds another API process to it"
            )
        time.sleep(0.05)


def abandon_models(store: Store) -> None:
    """Abandon the models of earlier starts. Logs these models and how many checkpoints remain."""
    abandoned, num_saved, size_bytes = store.write(
        lambda tx: (models.abandon_all(tx), *checkpoints.count(tx, time.time())),
    )
    names = ", ".join(row.model_id for row in abandoned[:5]) + (", …" if len(abandoned) > 5 else "")
    _log.info(
        "fresh start: %d models in training are abandoned%s; %d named checkpoints (%.1f MB) remain and can be loaded",
        len(abandoned),
        f" ({names})" if abandoned else "",
        num_saved,
        size_bytes / 1e6,
    )
