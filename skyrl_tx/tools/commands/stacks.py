"""Finds the processes of a data directory, and makes them write the stacks of their threads to their logs."""

import os
import signal
from pathlib import Path

from skyrl_tx.launch.command import CommandError

_ROLES = "api", "engine"
_PROCESSES = Path("/proc")


def write_stacks(data_dir: Path) -> None:
    """Make the processes that run on a data directory write their stacks. Raises CommandError if that fails."""
    pids = {role: pid for role in _ROLES if (pid := find_process(data_dir / f"{role}.lock")) is not None}
    if not pids:
        raise CommandError(f"--data-dir {data_dir}: no server runs there")
    for role, pid in pids.items():
        if not _has_sigquit_handler(pid):
            raise CommandError(
                f"process {pid} ({role}) would be ended by the signal: it is starting, or an old release"
            )
        os.kill(pid, signal.SIGQUIT)
        print(f"process {pid} ({role}) writes its stacks to its log")


def find_process(lock: Path) -> int | None:
    """Return the running process that has a role's lock file open, or None."""
    try:
        pid = int(lock.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not _PROCESSES.is_dir():  # not Linux: the number may be that of another process since
        return pid if _is_running(pid) else None
    try:
        descriptors = list((_PROCESSES / str(pid) / "fd").iterdir())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CommandError(f"process {pid} belongs to another user: {error.strerror}") from error
    return pid if lock.resolve() in map(_read_target, descriptors) else None


def _read_target(descriptor: Path) -> Path | None:
    """Return the file of an open descriptor; None if it has been closed since."""
    try:
        return descriptor.readlink()
    except FileNotFoundError:
        return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _has_sigquit_handler(pid: int) -> bool:
    """Return whether a process handles the signal, which ends others; True where that cannot be read."""
    status = _PROCESSES / str(pid) / "status"
    if not status.is_file():
        return True
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
