"""The modes of a data directory and its database: no other user of the machine may read or change them."""

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

_log = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OWN_NAMES = (
    *("signing.key", "artifacts", "artifact-cache", "artifacts.url", "database"),
    *("api.lock", "engine.lock", "schema.lock", "checked.lock"),
)

open_private = partial(os.open, mode=0o600)
"""An `opener` for `open` that creates files without access for others."""


def make_private(data_dir: Path, database_files: Iterable[Path]) -> None:
    """Remove the access of other users, and log what was changed and what could not be.

    The directory's mode is changed if this user owns it, unless it is shared (a home, a root, or one like /tmp). The
    server also starts in a directory that stays open, such as a volume of another owner: its files are closed.
    """
    changed: list[str] = []
    still_open: list[str] = []
    for path in (data_dir, *database_files, *(data_dir / name for name in _OWN_NAMES)):
        with suppress(FileNotFoundError):  # SQLite removes its log when the last process closes the database
            found = path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if mode & _OTHERS:
                if path != data_dir or _is_dedicated(path, found):
                    _try_chmod(path, mode & ~_OTHERS)
                is_open = stat.S_IMODE(path.stat().st_mode) & _OTHERS
                (still_open if is_open else changed).append(f"{path} (mode {mode:04o})")
    if changed:
        _log.warning("removed the access of other users to %s", ", ".join(changed))
    if still_open:
        _log.warning("other users have access to %s; the mode cannot be changed from here", ", ".join(still_open))


def _is_dedicated(directory: Path, found: os.stat_result) -> bool:
    """Whether a directory belongs to this user, and is not one that programs share."""
    is_shared = found.st_mode & stat.S_ISVTX or directory.resolve() in (Path.home(), Path("/"))
    return found.st_uid == os.geteuid() and not is_shared


def _try_chmod(path: Path, mode: int) -> None:
    try:
        path.chmod(mode)
    except OSError as error:  # another owner, or a file system without modes; the caller looks at the result
        _log.debug("cannot change the mode of %s: %s", path, error)
