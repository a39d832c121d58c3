"""Open the data of a server, and check that the server may use it."""

import logging
import time

from skyrl_tx.artifacts import ArtifactsUnreachable, InvalidLocation, open_artifacts
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.store import checkpoints, keys, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)

_RELEASE_S = 3.0
"""Seconds after which a killed engine no longer counts as running."""


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

    Raises CannotServe if other machines reach the API and there are no keys.
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
    """Check the location of the artifacts and record it.

    Raises CannotServe if it cannot be used.
    """
    try:
        open_artifacts(settings.data_dir, settings.artifacts)
    except (InvalidLocation, ArtifactsUnreachable) as error:
        raise CannotServe(str(error)) from error


def refuse_second_engine(store: Store) -> None:
    """Raise CannotServe if an engine is running on the database.

    Called before anything is changed.
    """
    end = time.monotonic() + _RELEASE_S
    while store.is_peer_running():
        if time.monotonic() > end:
            raise CannotServe(
                "an engine is already running on this database; `skyrl-tx api` adds another API process to it"
            )
        time.sleep(0.05)


def abandon_models(store: Store) -> None:
    """Abandon the models of earlier starts. Logs them, and which checkpoints remain."""
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
