"""File modes of the data directory and its database: other users have no access."""

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from skyrl_tx.process.paths import get_home

_log = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DATA_DIR_NAMES = (
    *("signing.key", "artifacts", "artifact-cache", "artifacts.url", "database"),
    *("api.lock", "engine.lock", "schema.lock", "checked.lock"),
)

open_private = partial(os.open, mode=0o600)
"""An `opener` for `open` that creates files which only their owner can read and write."""


def make_private(data_dir: Path, database_files: Iterable[Path]) -> None:
    """Remove the access of other users to the data directory and its files.

    The mode of the directory is changed only if this user owns it and it is not a shared directory,
    for example `/`, the user's home directory or `/tmp`. If other users keep access, for example to
    a volume with another owner, a warning is logged and the server starts anyway.
    """
    changed: list[str] = []
    still_accessible: list[str] = []
    for path in (data_dir, *database_files, *(data_dir / name for name in _DATA_DIR_NAMES)):
        with suppress(FileNotFoundError):  # for example SQLite's log after the last process has closed the database
            status = path.stat()
            mode = stat.S_IMODE(status.st_mode)
            if mode & _OTHERS:
                if path != data_dir or _is_dedicated(path, status):
                    _try_chmod(path, mode & ~_OTHERS)
                is_accessible = stat.S_IMODE(path.stat().st_mode) & _OTHERS
                (still_accessible if is_accessible else changed).append(f"{path} (mode {mode:04o})")

    if changed:
        _log.warning("removed the access of other users to %s", ", ".join(changed))
    if still_accessible:
        _log.warning(
            "other users have access to %s, and the server cannot change that; use a directory that belongs to the "
            "server's user",
            ", ".join(still_accessible),
        )


def _is_dedicated(directory: Path, status: os.stat_result) -> bool:
    """Return whether a directory belongs to this user and is not shared (`/tmp` is shared)."""
    is_shared = status.st_mode & stat.S_ISVTX or directory.resolve() in (get_home(), Path("/"))
    return status.st_uid == os.geteuid() and not is_shared


def _try_chmod(path: Path, mode: int) -> None:
    try:
        path.chmod(mode)
    except OSError as error:  # another owner, or a file system without modes: the caller checks the result
        _log.debug("cannot change the mode of %s: %s", path, error)
