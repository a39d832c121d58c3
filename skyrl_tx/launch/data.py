"""Open the data of a server, and check that the server may use it."""

import logging
import os
import shutil
import time
from pathlib import Path

from skyrl_tx.artifacts import ArtifactsUnreachable, InvalidLocation, open_artifacts
from skyrl_tx.launch.command_line import format_bytes
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.store import StoreError, checkpoints, keys, models
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)

_MODEL_SUFFIXES = frozenset({".json", ".jinja", ".safetensors"})
_RELEASE_S = 3.0
"""Seconds after which a killed engine no longer counts as running."""


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
    if not (api.is_loopback or api.no_auth or store.read(lambda tx: keys.has_usable(tx, time.time()))):
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
