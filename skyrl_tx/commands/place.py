"""The data directory that a command works on."""

import argparse
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.settings import ENVIRONMENT_PREFIX, default_data_dir
from skyrl_tx.store import checkpoints
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreInUse
from skyrl_tx.store.locks import role_lock
from skyrl_tx.store.sqlite import DATABASE_NAME
from skyrl_tx.store.tables import CheckpointRow


class CommandError(Exception):
    """The command cannot do what was asked; the text says why."""


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """Add --data-dir."""
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get(f"{ENVIRONMENT_PREFIX}DATA_DIR") or default_data_dir()),
        help="the server's data directory (default: as for `serve`, $SKYRL_TX_DATA_DIR first)",
    )
    parser.add_argument(
        "--database-url", help="the server's database, if not a file there (default: $SKYRL_TX_DATABASE_URL)"
    )


@contextmanager
def opened(arguments: argparse.Namespace, *, create: bool = False) -> Generator[Store]:
    """Open the database beside whatever server runs on it; raises CommandError where there is none."""
    data_dir: Path = arguments.data_dir.expanduser().absolute()
    url: str | None = arguments.database_url or os.environ.get(f"{ENVIRONMENT_PREFIX}DATABASE_URL")
    if not create and url is None and not (data_dir / DATABASE_NAME).is_file():
        raise CommandError(f"--data-dir {data_dir}: no server has ever stored anything there")
    store = Store.open(data_dir, role="tool", url=url)
    try:
        yield store
    finally:
        store.close()


def artifacts_of(data_dir: Path) -> ArtifactStore:
    """Open the files of a data directory."""
    return ArtifactStore(data_dir.expanduser().absolute() / "artifacts")


def find_checkpoint(store: Store, text: str) -> CheckpointRow:
    """Find a checkpoint by its path; raises UserError for a text that is none, CommandError where there is none."""
    path = CheckpointPath.parse(text)
    row = store.read(lambda tx: checkpoints.get(tx, path, time.time()))
    if row is None:
        raise CommandError(f"{path}: there is no such checkpoint; `skyrl-tx checkpoints list` shows those there are")
    return row


def free_files(store: Store, data_dir: Path) -> str:
    """Remove files that nothing points at any more, unless an engine is there to do it; say what becomes of them."""
    data_dir = data_dir.expanduser().absolute()
    try:
        with role_lock(data_dir, "engine"):
            keep = store.read(checkpoints.referenced_artifacts)
            if keep is None:
                return "no files were removed: a load that waits is damaged; the next start will answer it"
            removed = artifacts_of(data_dir).collect(keep)
    except StoreInUse:
        return "the running server removes the files that nothing else uses"
    return f"removed {len(removed)} sets of files that nothing else uses; the newest go with the next start"
