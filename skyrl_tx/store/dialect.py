"""Operations that differ between kinds of databases, and the file locks that they share."""

import errno
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from skyrl_tx.store.errors import StoreBlocked, StoreError, StoreInUse
from skyrl_tx.store.private_files import open_private

T = TypeVar("T")
Role = Literal["api", "engine", "tool"]
PEER: Mapping[Role, Role] = {"api": "engine", "engine": "api", "tool": "engine"}
"""The role that a process notifies after its commits."""
DATABASE_NAME = "skyrl_tx.db"
"""SQLite file in the data directory; used unless another database is configured."""
_CHECK_POLL_S = 0.1

Failure = tuple[type[StoreError], str]
"""Error class and text for one kind of failure."""
NO_SPACE: Failure = (StoreBlocked, "no space left on its disk")
DISK_FAILED: Failure = (StoreError, "the disk failed")
LOCKED: Failure = (StoreBlocked, "another process holds its lock")
FAILED: Failure = (StoreError, "it failed")
NOT_WRITABLE: Failure = (
    StoreError,
    "it cannot be written; check the file permissions, and that the disk is not mounted read-only",
)
_OS_FAILURES: dict[int | None, Failure] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), NO_SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NOT_WRITABLE),
}


class Notifier(ABC):
    """Wakes this process when its peer has committed, and the peer when this process has."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for a commit of the peer or for `wake`; return False on timeout. For one thread at a time; no errors."""

    @abstractmethod
    def wake(self) -> None:
        """End this process's current or next `wait`."""

    @abstractmethod
    def notify_peer(self) -> None:
        """Wake the peer; called after each commit."""

    @abstractmethod
    def is_peer_running(self) -> bool:
        """Return whether a process of the peer's role has the database open."""

    @abstractmethod
    def close(self) -> None:
        """Release sockets and connections."""


class Dialect(ABC):
    """One database, not yet open. Its failures are raised as one of `errors` or as SQLAlchemy's DBAPIError."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """Exception types of the driver."""
    file_locked: ClassVar[frozenset[Role]]
    """Roles that one process at a time may have on a data directory."""
    label: str
    """The database in error messages, without its password."""
    files: tuple[Path, ...] = ()
    """The files of the database that this process opens; some may not exist."""
    engine_number = 1
    """The number of the engine that this process is, once its writer has connected."""
    is_shared = False
    """Whether several engines may share the database."""

    def share(self) -> None:
        """Let several engines share the database. Raises StoreError if this kind of database cannot be shared.

        The default is for databases of one machine.
        """
        raise StoreError("--engines: several engines need a PostgreSQL database; name one with --database-url")

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the database without secrets; None for the data directory's own file."""

    @abstractmethod
    def create_writer(self, role: Role) -> Engine:
        """Create the pool of the one writing connection.

        Every error that ends a transaction invalidates the connection. Connecting raises StoreInUse if another process
        has the role. Write transactions of all processes are serialized: rows that one has read do not change until it
        commits.
        """

    @abstractmethod
    def create_reader(self, role: Role) -> Engine:
        """Create the pool of read-only connections; each transaction sees one consistent state."""

    @abstractmethod
    def create_notifier(self, role: Role, reader: Engine) -> Notifier:
        """Open the notifier of a role; `reader` serves its queries."""

    def check(self) -> None:
        """Raise StoreError for a database that must not be served, such as a damaged one.

        The default does nothing, for databases that check their own files.
        """
        return

    def find_damage(self) -> str | None:
        """Return the first damage of the database; None if there is none, or if the database checks its own files."""
        return None

    @abstractmethod
    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Write a consistent copy of the database to a file; return what `look` reads in the copied state.

        Raises StoreError if a program that makes the copy is missing or fails.
        """

    @abstractmethod
    def restore(self, source: Path) -> None:
        """Create the database from the file that `copy` wrote. Raises StoreError if it exists and is not empty."""

    def vacuum(self, connection: Connection) -> bool:
        """Return some free pages to the file system; return whether more are left.

        The default does nothing, for databases that do so by themselves.
        """
        return False

    def explain(self, error: BaseException) -> StoreError:
        """Translate an error into one that says what failed, and in which database."""
        if isinstance(error, StoreError):
            return error
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        if isinstance(cause, OSError):
            kind, what = _OS_FAILURES.get(cause.errno, FAILED)
        else:
            kind, what = self.classify_error(cause)
        return kind(f"database {self.label}: {what} ({' '.join(str(cause).split())})")

    @abstractmethod
    def classify_error(self, cause: BaseException) -> Failure:
        """Return what an error of the driver means: full disks, failing disks, locks, damage, `FAILED` for others."""


@contextmanager
def lock_role(data_dir: Path, role: str, *, is_shared: bool = False) -> Generator[None]:
    """Hold a role's file lock, which the kernel releases when the process ends.

    With `is_shared`, other processes may hold it too, if they say the same; the file then names the last of them.
    Raises StoreInUse with the holder's process id if another process holds it.
    """
    with open(data_dir / f"{role}.lock", "a+", opener=open_private) as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip().splitlines()[-1:] or ["unknown"]
            raise StoreInUse(f"data directory {data_dir} is in use: its {role} runs as process {holder[0]}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def lock_after_check(data_dir: Path, check: Callable[[], None]) -> Generator[None]:
    """Hold a shared lock while this process has the database open; first run `check`, unless another process holds it.

    A check takes seconds for each GB, and the crash of a process damages no database: only the machine or its disk do,
    or somebody who changes the file while no server runs. So engines that start again skip it. Raises what `check`
    raises.
    """
    with open(data_dir / "checked.lock", "a", opener=open_private) as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                check()
                fcntl.flock(file, fcntl.LOCK_SH)
                break
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            time.sleep(_CHECK_POLL_S)  # another process checks it now
        yield


@contextmanager
def lock_file(path: Path) -> Generator[None]:
    """Wait for a file's lock, then hold it."""
    with open(path, "a", opener=open_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
