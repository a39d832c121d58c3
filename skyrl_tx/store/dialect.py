"""The interface of a kind of database, SQLite or PostgreSQL, and the file locks that both use.

A `Dialect` opens connections, copies and restores the database, and translates errors. A `Notifier`
tells this process about commits of its peer: the API process about commits of the engine, and the
other way round.
"""

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

from skyrl_tx.process.paths import describe_owner, explain_os_error, find_blocker, open_private
from skyrl_tx.store import StoreBlocked, StoreError, StoreInUse

T = TypeVar("T")
Role = Literal["api", "engine", "tool"]
PEER: Mapping[Role, Role] = {"api": "engine", "engine": "api", "tool": "engine"}
"""For each role, the role that its processes notify after a commit."""
DATABASE_NAME = "skyrl_tx.db"
"""SQLite file in the data directory, used if no other database is configured."""
_CHECK_POLL_S = 0.1
SILENT_S = 10.0
"""After this many seconds without activity, an API process counts as not running.

For example, SIGSTOP may have stopped it. A running API process reads the database at least once a
second.
"""

LOCK_CLASS = 0x736B7478
"""First key of PostgreSQL's advisory locks that concern the whole database."""
ENGINE_CLASS = LOCK_CLASS + 1
"""First key of the leases of engines, see `placement`. The second key is the engine's number."""
ENGINE_CHANNEL = "skyrl_tx_engine"
"""PostgreSQL's channel for notifications to all engines."""

Failure = tuple[type[StoreError], str]
"""Error class and message for one kind of failure."""
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
    """Wakes this process when its peer commits, and the peer when this process commits."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for a commit of the peer or for `wake`. Return False on timeout.

        Only one thread may wait at a time. Database errors are not raised here.
        """

    @abstractmethod
    def wake(self) -> None:
        """End this process's current or next `wait`."""

    @abstractmethod
    def notify_peer(self) -> None:
        """Wake the peer. Called after each commit."""

    @abstractmethod
    def is_peer_running(self) -> bool:
        """Return whether a process with the peer's role has the database open.

        An API process must also have done something within `SILENT_S`.
        """

    def is_alone(self) -> bool:
        """Return whether no other process with this process's role has the database open."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release sockets and connections."""


class Dialect(ABC):
    """One database and how to open it.

    Methods raise errors of the driver (`errors`) or SQLAlchemy's DBAPIError; `explain` translates
    them.
    """

    errors: ClassVar[tuple[type[Exception], ...]]
    """Exception types of the driver."""
    file_locked: ClassVar[frozenset[Role]]
    """Roles that need a file lock in the data directory."""
    label: str
    """The database in error messages, without its password."""
    files: tuple[Path, ...] = ()
    """Files of the database that this process opens. Some of them may not exist."""
    engine_number = 1
    """Number of this process's engine. Set when the writer of an engine connects."""
    is_shared = False
    """Whether multiple engines may share the database."""

    def share(self) -> None:
        """Allow multiple engines to share the database. The default raises StoreError."""
        raise StoreError("--engines: multiple engines need a PostgreSQL database; name one with --database-url")

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the database without secrets; None for the SQLite file in the data directory."""

    @abstractmethod
    def create_writer(self, role: Role) -> Engine:
        """Create the pool with the only write connection of this process.

        Any error that ends a transaction invalidates the connection. Connecting raises StoreInUse
        if another process has the role. Write transactions of all processes are serialized: rows
        that a transaction has read cannot change before it commits.
        """

    @abstractmethod
    def create_reader(self, role: Role) -> Engine:
        """Create the pool of read-only connections. Each transaction sees one consistent state."""

    @abstractmethod
    def create_notifier(self, role: Role, reader: Engine) -> Notifier:
        """Open the notifier of a role. It sends its queries to `reader`."""

    @abstractmethod
    def find_server(self, connection: Connection) -> str | None:
        """Return a server of any release that has the database open, or None.

        This process must not have its role yet.
        """

    def check(self) -> None:
        """Raise StoreError if the database must not be served, for example a damaged file.

        The default does nothing, because PostgreSQL checks its own files.
        """
        return

    def find_damage(self) -> str | None:
        """Return a description of the first damage that was found, or None.

        The default returns None, because PostgreSQL checks its own files.
        """
        return None

    @abstractmethod
    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Write a consistent copy of the database to a file.

        Return the result of `look`. `look` reads the same state as the copy. Raises StoreError if
        the program that makes the copy is missing or fails, for example `pg_dump`.
        """

    @abstractmethod
    def restore(self, source: Path) -> None:
        """Create the database from a file that `copy` wrote.

        Raises StoreError if there is a database already.
        """

    def vacuum(self, connection: Connection) -> bool:
        """Release some free pages to the file system. Return whether free pages remain.

        The default does nothing, because PostgreSQL vacuums automatically.
        """
        return False

    def explain(self, error: BaseException) -> StoreError:
        """Translate an error into a StoreError that names the database and what failed."""
        if isinstance(error, StoreError):
            return error
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        if isinstance(cause, OSError):
            kind, what = _OS_FAILURES.get(cause.errno, FAILED)
        else:
            kind, what = self.classify_error(cause)
        detail = explain_os_error(cause) if isinstance(cause, OSError) else " ".join(str(cause).split())
        if what == NOT_WRITABLE[1] and self.files and (blocker := find_blocker(self.files[0])) is not None:
            detail = f"{blocker} {describe_owner(blocker)}"
        return kind(f"database {self.label}: {what} ({detail})")

    @abstractmethod
    def classify_error(self, cause: BaseException) -> Failure:
        """Classify an error of the driver, for example as `NO_SPACE` or `LOCKED`.

        Unknown errors are `FAILED`.
        """


@contextmanager
def lock_role(data_dir: Path, role: str, *, is_shared: bool = False) -> Generator[None]:
    """Hold the file lock of a role.

    The kernel releases it when the process ends. With `is_shared`, other processes that also pass
    `is_shared` may hold the lock at the same time. The file contains the process id of the last
    process that took the lock. Raises StoreInUse with this process id if the lock is taken.
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
    """Hold a shared lock while this process has the database open.

    The first process runs `check` before it. A check takes seconds per GB. The crash of a process
    cannot damage the database, so an engine that restarts while the API process keeps the lock
    skips the check. Only a crash of the machine, a disk failure or somebody who edits the file
    while no server is running can damage it. Raises the errors of `check`.
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
            time.sleep(_CHECK_POLL_S)  # another process is checking the database
        yield


@contextmanager
def lock_file(path: Path) -> Generator[None]:
    """Wait for the lock of a file, then hold it."""
    with open(path, "a", opener=open_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
