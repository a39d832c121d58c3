"""SQLite: a database file that one API process and one engine share on one machine."""

import logging
import math
import os
import secrets
import select
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event
from sqlmodel import Session

from skyrl_tx.artifacts.location import forget_identity
from skyrl_tx.process.paths import open_private
from skyrl_tx.store import StoreError, StoreInUse
from skyrl_tx.store.dialect import (
    DATABASE_NAME,
    DISK_FAILED,
    FAILED,
    LOCKED,
    NO_SPACE,
    NOT_WRITABLE,
    PEER,
    SILENT_S,
    Dialect,
    Failure,
    Notifier,
    Role,
    lock_role,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
_POLL_S = 0.1
"""Interval between polls for commits whose notification was lost."""
_ACTIVITY_PERIOD_S = 1.0
_LOCK_RETRY_S = 0.001
"""Interval between attempts to take the write lock.

SQLite itself waits longer after each attempt, up to 0.1 s. A process then waits for most of a second
while another process writes one transaction after another.
"""
_MAX_ADDRESS_BYTES = 100  # sockaddr_un holds 104 on macOS, 108 on Linux
_MAX_WAL_BYTES = 64 * 2**20
_INCREMENTAL = 2
_VACUUM_PAGES = 250
_MAX_IDLE_READERS = 32
"""Read connections that stay open. Opening one takes longer than a typical read."""

_DAMAGED = (
    "it is damaged and cannot be served; keep a copy, then replace it by a backup or by the output of sqlite3's "
    ".recover; `skyrl-tx recover` then restores missing checkpoints from their files"
)
_FAILURES: dict[int | None, Failure] = {
    sqlite3.SQLITE_FULL: NO_SPACE,
    sqlite3.SQLITE_IOERR: DISK_FAILED,
    sqlite3.SQLITE_BUSY: LOCKED,
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), (StoreError, _DAMAGED)),
    **dict.fromkeys((sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN), NOT_WRITABLE),
}

# After these errors a transaction may have been rolled back (sqlite.org/lang_transaction, "Response
# To Errors").
_ENDS_TRANSACTION = _FAILURES.keys() | {sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT}


class Sqlite(Dialect):
    """A database file, with locks and sockets in the data directory."""

    errors = (sqlite3.Error,)
    file_locked = frozenset({"api", "engine"})

    def __init__(self, path: Path, data_dir: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._data_dir = data_dir
        self._busy_timeout_s = busy_timeout_s
        self.label = str(path)
        self.files = (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm")))

    @property
    def name(self) -> str | None:
        """URL of the file, or None for the file in the data directory."""
        return None if self._path == self._data_dir / DATABASE_NAME else f"sqlite:///{self._path}"

    def create_writer(self, role: Role) -> Engine:
        """Create the write pool. Each transaction takes SQLite's write lock when it begins."""
        if not self._path.exists():
            # SQLite gives its other files the mode of this file. It also reports the error if this
            # fails.
            with suppress(OSError):
                os.close(open_private(self._path, os.O_CREAT | os.O_WRONLY))
        engine = self._create_engine(writes=True)
        event.listen(engine, "handle_error", _invalidate_if_rolled_back)
        return engine

    def find_server(self, connection: Connection) -> str | None:
        """Look for a process that holds the file lock of its role."""
        try:
            for role in sorted(self.file_locked):
                with lock_role(self._data_dir, role):
                    pass
        except StoreInUse as error:
            return str(error)
        return None

    def create_reader(self, role: Role) -> Engine:
        """Create the read pool.

        It can read during a write, because the database uses a write-ahead log.
        """
        return self._create_engine(writes=False)

    def _create_engine(self, *, writes: bool) -> Engine:
        engine = create_engine(
            URL.create("sqlite", database=str(self._path)),
            connect_args={"timeout": self._busy_timeout_s, "check_same_thread": False},
            pool_size=1 if writes else _MAX_IDLE_READERS,
            max_overflow=0 if writes else -1,
            pool_use_lifo=True,
        )

        def on_connect(connection: sqlite3.Connection, _record: object) -> None:
            connection.isolation_level = None  # `on_begin` sends BEGIN: the driver sends it too late for reads
            if connection.execute("PRAGMA page_count").fetchone() == (0,):  # a new file
                connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")

            # The write-ahead log needs shared memory between processes.
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"database {self._path}: its file system has no shared memory (journal mode {mode}, not wal); "
                    "choose a data directory on a local disk"
                )

            for pragma in (
                "synchronous=FULL",
                "foreign_keys=ON",
                f"journal_size_limit={_MAX_WAL_BYTES}",
                f"query_only={'OFF' if writes else 'ON'}",
            ):
                connection.execute(f"PRAGMA {pragma}")

        def on_begin(connection: Connection) -> None:
            # A writer takes the lock here, because SQLite may refuse to upgrade a transaction that
            # has read.
            if not writes:
                connection.exec_driver_sql("BEGIN")
            elif not _try_to_lock(connection, self._busy_timeout_s):
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises the error

        event.listen(engine, "connect", on_connect)
        event.listen(engine, "begin", on_begin)
        return engine

    def _enable_incremental_vacuum(self) -> None:
        """Rewrite a database file of an early release, so that its free pages can be released.

        This happens once per file and takes some seconds per GB.
        """
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            if connection.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
                connection.execute("VACUUM")

    def vacuum(self, connection: Connection) -> bool:
        """Release up to `_VACUUM_PAGES` free pages, one per statement.

        The pragma frees one page for each `sqlite3_step`.
        """
        (num_free,) = connection.exec_driver_sql("PRAGMA freelist_count").one()
        for _ in range(min(num_free, _VACUUM_PAGES)):
            connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return num_free > _VACUUM_PAGES

    def check(self) -> None:
        """Check every page and raise StoreError if the file is damaged.

        Takes some milliseconds per MiB. Files of early releases are then rewritten once, so that
        their free pages can be released.
        """
        if (damage := self.find_damage()) is not None:
            # The file that replaces this one may have the same identity and fewer rows.
            forget_identity(self._data_dir)
            raise StoreError(f"database {self._path}: {_DAMAGED} ({damage})")
        self._enable_incremental_vacuum()

    def find_damage(self) -> str | None:
        """Check every page, which takes some milliseconds per MiB.

        Return the first damage, or None.
        """
        with closing(sqlite3.connect(self._path)) as connection:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        return None if result == "ok" else str(result)

    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Copy with SQLite's backup API in one read transaction. Writers are not blocked."""
        with closing(sqlite3.connect(self._path)) as source, closing(sqlite3.connect(target)) as copied:
            source.backup(copied)
            copied.execute("PRAGMA journal_mode=DELETE")  # so that the copy is a single file
        engine = create_engine(URL.create("sqlite", database=str(target)))
        try:
            with Session(engine) as tx:
                return look(tx)
        finally:
            engine.dispose()

    def restore(self, source: Path) -> None:
        """Copy the file to the path of the database and flush it to disk."""
        if self._path.exists():
            raise StoreError(f"database {self._path} exists already: restore into an empty data directory")
        shutil.copyfile(source, self._path)
        self._path.chmod(0o600)
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def create_notifier(self, role: Role, reader: Engine) -> Notifier:
        """Bind the role's socket in the data directory."""
        return SqliteNotifier(self._path, self._data_dir, role)

    def classify_error(self, cause: BaseException) -> Failure:
        """Look up SQLite's result code."""
        return _FAILURES.get(_get_error_code(cause), FAILED)


class SqliteNotifier(Notifier):
    """Notifies through Unix datagram sockets in the data directory, one per role.

    Datagrams are empty. The database file is polled as well, in case a notification is lost. A poll
    takes 4 µs; it reads the pragma `data_version`.
    """

    def __init__(self, path: Path, data_dir: Path, role: Role) -> None:
        self._resources = ExitStack()
        self._is_peer_api = PEER[role] == "api"
        self._shown_at = -math.inf

        # Choose the addresses of this process and its peer.
        name = f"tool-{os.getpid()}-{secrets.token_hex(4)}" if role == "tool" else role
        directory = self._shorten_path(data_dir, f"{max(name, PEER[role], key=len)}.sock")
        self._address = str(directory / f"{name}.sock")
        self._peer_address = str(directory / f"{PEER[role]}.sock")

        # Bind the socket. A killed process may have left its file. The role's lock excludes a
        # running process.
        self._socket = self._resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.setblocking(False)
        self._unlink()
        self._socket.bind(self._address)
        self._resources.callback(self._unlink)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

        # Open a connection to poll for commits.
        self._path = path
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection = self._resources.enter_context(closing(connection))
        self._seen: int | None = self._version()

    def _shorten_path(self, directory: Path, name: str) -> Path:
        """Return the directory, or a short link to it if the path of a socket in it is too long."""
        if len(os.fsencode(directory / name)) <= _MAX_ADDRESS_BYTES:
            return directory
        link = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="skyrl_tx-"))) / "data"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        return link

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._address)

    def _version(self) -> int:
        """Return a number that changes whenever another connection commits."""
        return self._connection.execute("PRAGMA data_version").fetchone()[0]

    def _is_changed(self) -> bool:
        """Return whether another connection has committed since the last call.

        Returns True if the version cannot be read. The caller then reads the database and handles
        the error if that fails too.
        """
        before = self._seen
        try:
            self._seen = self._version()
        except sqlite3.Error as error:
            if before is not None:  # log only the first of a series of errors
                _log.warning("cannot read the version of database %s; retrying: %s", self._path, error)
            self._seen = None
            time.sleep(_POLL_S)
        return before is None or before != self._seen

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification, which may be spurious.

        A lost notification is noticed within 100 ms.
        """
        end = time.monotonic() + timeout_s
        self._show_activity()
        while True:
            left = end - time.monotonic()
            is_notified = bool(self._poll.poll(max(0.0, min(left, _POLL_S)) * 1000))
            with suppress(BlockingIOError):
                while is_notified:  # all queued notifications count as one
                    self._socket.recv(1)
            is_changed = self._is_changed()  # read in any case, so that a notified commit does not count again
            if is_notified or is_changed:
                return True
            if left <= _POLL_S:
                return False

    def _show_activity(self) -> None:
        """Set the time of the socket of this process, at most once a second."""
        if (now := time.monotonic()) - self._shown_at >= _ACTIVITY_PERIOD_S:
            self._shown_at = now
            with suppress(OSError):  # somebody removed the socket
                os.utime(self._address)

    def wake(self) -> None:
        """Send a notification to this process."""
        self._send(self._address)

    def notify_peer(self) -> None:
        """Send a notification to the peer if it is running."""
        self._send(self._peer_address)

    def _send(self, address: str) -> None:
        # Errors are ignored, because the commit has succeeded. Without a peer there is nothing to
        # wake, and a full buffer already holds a notification. After any other error the receiver
        # still polls.
        with suppress(OSError):
            self._socket.sendto(b"", address)

    def is_peer_running(self) -> bool:
        """Return whether a process is bound to the peer's socket, and whether an API is active."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._peer_address)
                silent_s = time.time() - os.stat(self._peer_address).st_mtime
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return silent_s < SILENT_S or not self._is_peer_api

    def close(self) -> None:
        """Close the connection, then close and remove the socket."""
        self._resources.close()


def _get_error_code(error: BaseException | None) -> int | None:
    """Return SQLite's primary result code, or None if the error is not from SQLite."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _try_to_lock(connection: Connection, timeout_s: float) -> bool:
    """Begin a transaction with SQLite's write lock. Return whether this succeeded in time."""
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    end = time.monotonic() + timeout_s
    driver.execute("PRAGMA busy_timeout=0")
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if _get_error_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                return False
            time.sleep(_LOCK_RETRY_S)
        else:
            driver.execute(f"PRAGMA busy_timeout={round(timeout_s * 1000)}")
            return True


def _invalidate_if_rolled_back(context: ExceptionContext) -> None:
    """Invalidate a connection whose transaction SQLite has, or may have, rolled back.

    Otherwise later statements would be committed one by one, and statements before the error would
    count as written.
    """
    connection = context.connection.connection.dbapi_connection if context.connection is not None else None
    if isinstance(connection, sqlite3.Connection):
        has_no_transaction = not connection.in_transaction
        context.is_disconnect = has_no_transaction or _get_error_code(context.original_exception) in _ENDS_TRANSACTION
