"""Directories that processes share: locked while they are written or used, and left over when a process was killed."""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""Start of the names of directories that are being written or removed."""


@contextmanager
def lock_folder(folder: Path, how: int) -> Generator[int]:
    """Lock a directory, and yield its descriptor. Raises BlockingIOError if `how` says not to wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def create_locked(folder: Path) -> Generator[None]:
    """Create and lock a directory, so that garbage collection does not take it for an interrupted creation."""
    while True:
        folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # garbage collection removed it before it was opened
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.is_dir():  # not removed before the lock was taken
                yield
                return
        finally:
            os.close(descriptor)


def remove_interrupted(folder: Path) -> None:
    """Remove a directory that no process has locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # its creation has finished
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
