"""The database as a file: SQLite, shared by one API and one engine on one machine."""

import errno
import os
import secrets
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.exc import DBAPIError

from skyrl_tx.store.dialect import PEER, Bell, Dialect, Role
from skyrl_tx.store.doorbell import Doorbell
from skyrl_tx.store.errors import StoreBlocked, StoreError
from skyrl_tx.store.locks import file_lock, role_lock

DATABASE_NAME = "skyrl_tx.db"
_FALLBACK_S = 0.1
"""How late a lost ring is noticed."""
_WAL_KEPT_BYTES = 64 * 2**20
_INCREMENTAL = 2
_PAGES_AT_ONCE = 250
_KEPT_READERS = 32
"""Connections that stay open; to open one more takes longer than to read."""

_DAMAGED = (
    "it is damaged and is not served from; keep a copy, then bring back a backup of the data directory, or what "
    "sqlite3's .recover can read of it"
)
_NO_SPACE = "no space left for it on the disk"
_NOT_WRITABLE = "it cannot be written; give this user the right to, on a disk that is not read-only"

# After these a transaction may be gone, or is not to be trusted (sqlite.org/lang_transaction, "Response To Errors").
_ENDS_TRANSACTION = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
    }
)


class Sqlite(Dialect):
    """A file, and locks and sockets in the data directory beside it."""

    errors = (sqlite3.Error,)

    def __init__(self, path: Path, data_dir: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._data_dir = data_dir
        self._busy_timeout_s = busy_timeout_s

    @property
    def name(self) -> str | None:
        """None where the file lies, under its usual name, among what belongs to it."""
        return None if self._path == self._data_dir / DATABASE_NAME else f"sqlite:///{self._path}"

    @contextmanager
    def role(self, role: Role) -> Generator[None]:
        """Hold a file lock; any number may be a `tool` at once."""
        if role == "tool":
            yield
            return
        with role_lock(self._data_dir, role):
            yield

    @contextmanager
    def upgrading(self) -> Generator[None]:
        """Hold another file lock: a new file's journal mode is not set under SQLite's own."""
        with file_lock(self._data_dir / "schema.lock"):
            yield

    def writer(self, role: Role) -> Engine:
        """Take SQLite's own lock with each transaction."""
        engine = self._engine(writes=True)
        event.listen(engine, "handle_error", _lose_what_sqlite_lost)
        return engine

    def reader(self, role: Role) -> Engine:
        """Read beside the writers, as the write-ahead log allows."""
        return self._engine(writes=False)

    def _engine(self, *, writes: bool) -> Engine:
        engine = create_engine(
            URL.create("sqlite", database=str(self._path)),
            connect_args={"timeout": self._busy_timeout_s, "check_same_thread": False},
            pool_size=1 if writes else _KEPT_READERS,
            max_overflow=0 if writes else -1,
            pool_use_lifo=True,
        )

        def connected(connection: sqlite3.Connection, _record: object) -> None:
            connection.isolation_level = None  # we say BEGIN ourselves: the driver's own comes too late for reads
            if connection.execute("PRAGMA page_count").fetchone() == (0,):  # else it would be written to
                connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"database {self._path}: its file system cannot share memory (journal mode {mode}, not wal)"
                )
            for pragma in (
                "synchronous=FULL",
                "foreign_keys=ON",
                f"journal_size_limit={_WAL_KEPT_BYTES}",
                f"query_only={'OFF' if writes else 'ON'}",
            ):
                connection.execute(f"PRAGMA {pragma}")

        def begun(connection: Connection) -> None:
            # A writer takes the lock at once: a transaction that read first could not always go on to write.
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        event.listen(engine, "connect", connected)
        event.listen(engine, "begin", begun)
        return engine

    def _let_shrink(self) -> None:
        """Rewrite a file of an earlier release, which could not give pages back, once; some seconds a GB."""
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            if connection.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                connection.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
                connection.execute("VACUUM")

    def give_back(self, connection: Connection) -> bool:
        """Give back a few hundred free pages, one at a time: the pragma frees one for each step of its statement."""
        (num_free,) = connection.exec_driver_sql("PRAGMA freelist_count").one()
        for _ in range(min(num_free, _PAGES_AT_ONCE)):
            connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        return num_free > _PAGES_AT_ONCE

    def check(self) -> None:
        """Look through every page, some milliseconds a MiB, and raise StoreError with what SQLite finds wrong.

        A sound file of an earlier release is then made one that can give pages back.
        """
        with closing(sqlite3.connect(self._path)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StoreError(f"database {self._path}: {_DAMAGED} ({found})")
        self._let_shrink()

    def bell(self, role: Role, reader: Engine) -> Bell:
        """Hang up a socket in the data directory."""
        return _SqliteBell(self._path, self._data_dir, role)

    def explain(self, error: BaseException) -> StoreError:
        """Tell full disks, failing ones, locks and damage apart."""
        if isinstance(error, StoreError):
            return error
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        kind = StoreError
        match _code(cause):
            case sqlite3.SQLITE_FULL:
                kind, what = StoreBlocked, _NO_SPACE
            case sqlite3.SQLITE_IOERR:
                what = "the disk failed"
            case sqlite3.SQLITE_BUSY:
                kind, what = StoreBlocked, "another process keeps it locked"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                what = _DAMAGED
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN:
                what = _NOT_WRITABLE
            case None if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what = _NOT_WRITABLE
            case None if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                kind, what = StoreBlocked, _NO_SPACE
            case _:
                what = "it failed"
        return kind(f"database {self._path}: {what} ({cause})")


class _SqliteBell(Bell):
    """A doorbell, and a slow look at the file in case a ring is lost."""

    def __init__(self, path: Path, data_dir: Path, role: Role) -> None:
        own = f"tool-{os.getpid()}-{secrets.token_hex(4)}" if role == "tool" else role
        self._door = Doorbell(data_dir, own=own, peer=PEER[role])
        self._watch = _Watch(path)

    def wait(self, timeout_s: float) -> bool:
        """Wait; a ring may be spurious, and none is lost: at worst one is 100 ms late."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            rung = self._door.wait(min(left, _FALLBACK_S))
            changed = self._watch.changed()  # looked at in any case, so that a ring counts once
            if rung or changed:
                return True
            if left <= _FALLBACK_S:
                return False

    def ring_own(self) -> None:
        self._door.ring_own()

    def ring_peer(self) -> None:
        self._door.ring_peer()

    def peer_lives(self) -> bool:
        return self._door.peer_lives()

    def close(self) -> None:
        self._watch.close()
        self._door.close()


class _Watch:
    """Notices commits by other connections, in 4 µs a look (sqlite.org/pragma: data_version)."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._seen = self._version()

    def _version(self) -> int:
        return self._connection.execute("PRAGMA data_version").fetchone()[0]

    def changed(self) -> bool:
        """Whether anything was committed since the last look."""
        before, self._seen = self._seen, self._version()
        return before != self._seen

    def close(self) -> None:
        self._connection.close()


def _code(error: BaseException | None) -> int | None:
    """SQLite's primary result code; None if SQLite did not say this."""
    return (
        error.sqlite_errorcode & 0xFF
        if isinstance(error, sqlite3.Error) and hasattr(error, "sqlite_errorcode")
        else None
    )


def _lose_what_sqlite_lost(context: ExceptionContext) -> None:
    """Give up a connection whose transaction SQLite rolled back by itself.

    Otherwise what follows would commit on its own, and what came before would be taken for written.
    """
    connection = context.connection.connection.dbapi_connection if context.connection is not None else None
    if isinstance(connection, sqlite3.Connection):
        has_no_transaction = not connection.in_transaction
        context.is_disconnect = has_no_transaction or _code(context.original_exception) in _ENDS_TRANSACTION
