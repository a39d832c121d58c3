"""Opening, writing, reading, waiting: all that differs between SQLite and another database."""

import errno
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal, Self, TypeVar

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlmodel import Session

from skyrl_tx.store import schema
from skyrl_tx.store.doorbell import Doorbell
from skyrl_tx.store.errors import StoreError, StoreInUse
from skyrl_tx.store.locks import file_lock, role_lock
from skyrl_tx.store.writer import GroupWriter

__all__ = ["Role", "Store", "StoreError", "StoreInUse"]

T = TypeVar("T")
Role = Literal["api", "engine", "tool"]
_PEER: dict[Role, Role] = {"api": "engine", "engine": "api", "tool": "engine"}
_FALLBACK_S = 0.1
"""How late a lost ring is noticed."""
_WAL_KEPT_BYTES = 64 * 2**20

_DAMAGED = (
    "it is damaged and is not served from; keep a copy, then bring back a backup of the data directory, or what "
    "sqlite3's .recover can read of it"
)
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


class Store:
    """One process's door to the database."""

    def __init__(
        self, *, path: Path, reader: Engine, writer: GroupWriter, bell: Doorbell, watch: "_Watch", resources: ExitStack
    ) -> None:
        """For `open`; `resources` holds the rest, in the order of opening."""
        self._path = path
        self._reader = reader
        self._writer = writer
        self._bell = bell
        self._watch = watch
        self._resources = resources
        self._waiting = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(cls, data_dir: Path, *, role: Role, url: str | None = None, busy_timeout_s: float = 10.0) -> Self:
        """Open, creating or migrating as needed, and take the role; any number may be a `tool` at once.

        Raises StoreInUse if the role is taken, StoreError if the database cannot serve. `url` names another file
        ("sqlite:///path"); `busy_timeout_s` is how long a write waits while another process writes.
        """
        path = _database_path(data_dir, url)
        with ExitStack() as stack:
            try:
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                if role != "tool":
                    stack.enter_context(role_lock(data_dir, role))
                write_engine = _engine(path, busy_timeout_s, writes=True)
                stack.callback(write_engine.dispose)
                with file_lock(data_dir / "schema.lock"):
                    schema.upgrade(write_engine)
                if role != "tool":
                    _refuse_damage(path)
                reader = _engine(path, busy_timeout_s, writes=False)
                stack.callback(reader.dispose)
                watch = _Watch(path)
                stack.callback(watch.close)
                own = f"tool-{os.getpid()}-{secrets.token_hex(4)}" if role == "tool" else role
                bell = Doorbell(data_dir, own=own, peer=_PEER[role])
                stack.callback(bell.close)
            except (DBAPIError, sqlite3.Error, OSError) as error:
                raise _explain(path, error) from error
            writer = GroupWriter(write_engine, explain=lambda error: _explain(path, error), committed=bell.ring_peer)
            stack.callback(writer.close)
            return cls(path=path, reader=reader, writer=writer, bell=bell, watch=watch, resources=stack.pop_all())

    def write(self, work: Callable[[Session], T]) -> T:
        """Run work on the writer thread and return its result once that is on disk.

        What `work` raises is raised here and undoes that work alone; StoreError: the database failed, nothing was kept.
        """
        if self._writer.is_own_thread():
            raise StoreError("write called from within a write: compose the functions in one piece of work")
        return self.write_soon(work).result()

    def write_soon(self, work: Callable[[Session], T]) -> Future[T]:
        """As `write`, without waiting."""
        return self._writer.submit(work)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run read-only work on one consistent state; any thread, never in the writers' way."""
        if self._is_closed:
            raise StoreError("the store is closed")
        try:
            with Session(self._reader, expire_on_commit=False) as tx:
                return work(tx)
        except DBAPIError as error:
            raise _explain(self._path, error) from error

    def wait(self, timeout_s: float) -> bool:
        """Wait until the other process committed, or `wake`; whether that was so.

        For one thread at a time. A ring may be spurious, so look and then wait again; none is lost, at worst one is
        100 ms late.
        """
        end = time.monotonic() + timeout_s
        with self._waiting:
            while not self._is_closed:
                left = end - time.monotonic()
                rung = self._bell.wait(min(left, _FALLBACK_S))
                changed = self._watch.changed()  # looked at in any case, so that a ring counts once
                if rung or changed:
                    return not self._is_closed
                if left <= _FALLBACK_S:
                    return False
        return False

    def wake(self) -> None:
        """End this process's own `wait`."""
        self._bell.ring_own()

    def peer_lives(self) -> bool:
        """Whether a process of the other role has this database open."""
        return self._bell.peer_lives()

    def close(self) -> None:
        """Finish queued writes, then let go of everything."""
        if self._is_closed:
            return
        self._is_closed = True
        self.wake()
        with self._waiting:
            self._resources.close()


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


def _database_path(data_dir: Path, url: str | None) -> Path:
    if url is None:
        return data_dir / "skyrl_tx.db"
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise StoreError(f"database url {parsed.render_as_string()!r}: only sqlite:///path is supported")
    return Path(parsed.database)


def _engine(path: Path, busy_timeout_s: float, *, writes: bool) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        pool_size=1 if writes else 8,
        max_overflow=0 if writes else -1,
        pool_use_lifo=True,
    )

    def connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below: the driver's own comes too late for reads
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise StoreError(f"database {path}: its file system cannot share memory (journal mode {mode}, not wal)")
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
    if writes:
        event.listen(engine, "handle_error", _lose_what_sqlite_lost)
    return engine


def _refuse_damage(path: Path) -> None:
    """Look through every page, some milliseconds a MiB; raises StoreError with what SQLite finds wrong."""
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StoreError(f"database {path}: {_DAMAGED} ({found})")


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


def _explain(path: Path, error: BaseException) -> StoreError:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    match _code(cause):
        case sqlite3.SQLITE_FULL:
            what = "no space left for it on the disk"
        case sqlite3.SQLITE_IOERR:
            what = "the disk failed"
        case sqlite3.SQLITE_BUSY:
            what = "another process keeps it locked"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            what = _DAMAGED
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN:
            what = _NOT_WRITABLE
        case None if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = _NOT_WRITABLE
        case None if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "no space left for it on the disk"
        case _:
            what = "it failed"
    return StoreError(f"database {path}: {what} ({cause})")
