"""Access to files and directories: private modes, and explanations of errors.

An explanation is one line, with owner and mode if access is denied.
"""

import errno
import logging
import os
import pwd
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

_log = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO

open_private = partial(os.open, mode=0o600)
"""An `opener` for `open` that creates files which only their owner can read and write."""


def get_home() -> Path:
    """Return the home directory, or `/` for a user without one, for example in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def explain_os_error(error: OSError, about: Path | None = None) -> str:
    """Return what failed and what to do about it, in one line.

    The line begins with `about`, or else with the path that the error names.
    """
    name = error.filename if isinstance(error.filename, str) else about
    if name is None:
        return " ".join(str(error).split())
    path, about = Path(name).absolute(), about or Path(name)

    # A file is where a directory should be. Methods of Path would raise if a parent denies access.
    file = next((parent for parent in reversed(path.parents) if os.path.isfile(parent)), None)
    if error.errno == errno.EEXIST or (error.errno == errno.ENOTDIR and file is not None):
        return f"{about}: {file or path} is a file, not a directory"

    # No permission.
    blocker = find_blocker(path) if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else None
    if blocker is None:
        return f"{about}: {error.strerror or error}"
    return f"{about}: {'' if blocker == about else f'{blocker} '}{describe_owner(blocker)}"


def find_blocker(path: Path) -> Path | None:
    """Return the file or directory that denies this process access to a path, or None."""
    for parent in reversed(path.parents):
        if not _has_access(parent, os.X_OK):
            # To create `parent`, `parent.parent` must be writable.
            return parent if os.path.exists(parent) else parent.parent
    if not os.path.exists(path):
        return None if _has_access(path.parent, os.W_OK) else path.parent
    needed = os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
    return None if _has_access(path, needed) else path


def _has_access(path: Path, needed: int) -> bool:
    return os.access(path, needed, effective_ids=os.access in os.supports_effective_ids)


def describe_owner(path: Path) -> str:
    """Return the owner and mode of a path, and what a user without access can do."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "is on a file system that is mounted read-only: use a directory that can be written"
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid():
        return f"has mode {mode:04o}: change its mode"
    return f"belongs to {_get_user_name(status.st_uid)} (mode {mode:04o}): run as that user"


def _get_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def make_private(directory: Path, files: Iterable[Path]) -> None:
    """Remove the access of other users to a directory and to some of its files.

    The mode of the directory is changed only if this user owns it and it is not a shared directory,
    for example `/`, the user's home directory or `/tmp`. If other users keep access, for example to
    a volume with another owner, a warning is logged and the server starts anyway.
    """
    changed: list[str] = []
    still_accessible: list[str] = []
    for path in (directory, *files):
        with suppress(FileNotFoundError):  # for example SQLite's log after the last process has closed the database
            status = path.stat()
            mode = stat.S_IMODE(status.st_mode)
            if mode & _OTHERS:
                if path != directory or _is_dedicated(path, status):
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
