"""File locks: the kernel frees them when their process ends, however it ends."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tx.store.errors import StoreInUse


@contextmanager
def role_lock(data_dir: Path, role: str) -> Generator[None]:
    """Hold a role on a data directory. Raises StoreInUse, naming the holder, if another process does."""
    with (data_dir / f"{role}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise StoreInUse(f"data directory {data_dir} is in use: its {role} runs as process {holder}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def file_lock(path: Path) -> Generator[None]:
    """Wait for, and hold, a lock on a file."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
