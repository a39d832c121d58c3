"""Access of one process to the database: open, write, read, wait for the peer's commits; and statements with ids."""

import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple, overload

from sqlalchemy import ColumnElement, CursorResult, Engine, Executable, bindparam, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError
from sqlalchemy.orm import Mapped
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlmodel import Session, SQLModel

from skyrl_tx import DISTRIBUTION
from skyrl_tx.store.dialect import DATABASE_NAME, Dialect, Notifier, Role, lock_after_check, lock_file, lock_role
from skyrl_tx.store.errors import StoreError, StoreInUse
from skyrl_tx.store.private_files import make_private
from skyrl_tx.store.sqlite import Sqlite
from skyrl_tx.store.writer import GroupWriter, RetryPolicy, translate_refusal

__all__ = ["Role", "Store", "StoreError", "StoreInUse"]

T = TypeVar("T")
RowT = TypeVar("RowT", bound=SQLModel)
Ts = TypeVarTuple("Ts")
_Parameters = Mapping[str, object] | Sequence[Mapping[str, object]] | None

_MAX_IDS = 1024

HEAD = "0019"
"""Newest revision in `migrations`, repeated here so that a current database opens without importing alembic (0.3 s)."""
_DATABASE_NOTE = "database"
"""File with the name of an external database. With another database, no run and no checkpoint would be there."""


class Store:
    """The database as one process uses it; thread-safe except for `wait`."""

    def __init__(
        self, *, dialect: Dialect, reader: Engine, writer: GroupWriter, notifier: Notifier, resources: ExitStack
    ) -> None:
        """Use `open` instead. `resources` closes everything else, in reverse order of opening."""
        self._make_dialect = dialect
        self._reader = reader
        self._writer = writer
        self._notifier = notifier
        self._resources = resources
        self._waiting = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        role: Role,
        url: str | None = None,
        busy_timeout_s: float = 10.0,
        retry: RetryPolicy | None = None,
        is_shared: bool = False,
    ) -> Self:
        """Open the database in a role, creating or migrating it as needed.

        Several processes may have the role `tool` at once, and on PostgreSQL also `api`. Raises StoreInUse if the role
        is taken, and StoreError if the database cannot be used. `url` names another file ("sqlite:///path") or a
        PostgreSQL database ("postgresql://user@host/name"). `busy_timeout_s` is the time for which a write waits for
        writes of other processes; with `retry` it is then repeated, as it is while the disk is full. With `is_shared`,
        several processes may have the role `engine`, each with a number; PostgreSQL only.
        """
        dialect = _make_dialect(data_dir, url, busy_timeout_s)
        if is_shared:
            dialect.share()
        with ExitStack() as stack:
            try:
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_database(data_dir, dialect.name)
                make_private(data_dir, dialect.files)
                if role in dialect.file_locked:
                    stack.enter_context(lock_role(data_dir, role, is_shared=is_shared))
                write_engine = dialect.create_writer(role)
                stack.callback(write_engine.dispose)
                with lock_file(data_dir / "schema.lock"):  # SQLite's own does not cover a new file's journal mode
                    upgrade(write_engine)
                _record_database(data_dir, dialect.name)
                if role != "tool":
                    stack.enter_context(lock_after_check(data_dir, dialect.check))
                reader = dialect.create_reader(role)
                stack.callback(reader.dispose)
                notifier = dialect.create_notifier(role, reader)
                stack.callback(notifier.close)
            except (DBAPIError, OSError, *dialect.errors) as error:
                raise dialect.explain(error) from error
            writer = GroupWriter(write_engine, explain=dialect.explain, committed=notifier.notify_peer, retry=retry)
            stack.callback(writer.close)
            return cls(dialect=dialect, reader=reader, writer=writer, notifier=notifier, resources=stack.pop_all())

    def write(self, work: Callable[[Session], T]) -> T:
        """Run work on the writer thread and return its result after the commit.

        An exception of `work` is raised here and rolls back that work alone. StoreError means that the database failed
        and nothing was kept.
        """
        if self._writer.is_own_thread():
            raise StoreError("write called within a write: call both functions in one transaction")
        return self.write_soon(work).result()

    def write_soon(self, work: Callable[[Session], T]) -> Future[T]:
        """Run work as `write` does, without waiting for the commit."""
        return self._writer.submit(work)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run read-only work on one consistent state, from any thread, without blocking writers."""
        if self._is_closed:
            raise StoreError("the store is closed")
        with self._explain_errors():
            try:
                return self._read(work)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            return self._read(work)  # with a new connection: the old one may predate a database restart

    def _read(self, work: Callable[[Session], T]) -> T:
        with Session(self._reader, expire_on_commit=False) as tx:
            result = work(tx)
            tx.flush()  # raises for work that is not read-only
            return result

    @contextmanager
    def _explain_errors(self) -> Generator[None]:
        try:
            yield
        except DataError as error:
            raise translate_refusal(error) from error
        except (DBAPIError, *self._make_dialect.errors) as error:
            raise self._make_dialect.explain(error) from error

    def vacuum(self) -> bool:
        """Return some free space of the database to the file system; return whether more is left."""
        return self.write(lambda tx: self._make_dialect.vacuum(tx.connection()))

    def find_damage(self) -> str | None:
        """Check the database's own structure; return its first damage, or None. Takes some milliseconds per MiB."""
        with self._explain_errors():
            return self._make_dialect.find_damage()

    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Write a consistent copy of the database to a file, while others use it; return what `look` reads in it.

        Raises StoreError.
        """
        with self._explain_errors():
            return self._make_dialect.copy(target, look)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a commit of the other process or for `wake`; return False on timeout.

        For one thread at a time. Notifications may be spurious: check the database and wait again.
        """
        with self._waiting:
            return not self._is_closed and self._notifier.wait(timeout_s) and not self._is_closed

    @property
    def write_failure(self) -> str | None:
        """Error of the latest write; None if it succeeded."""
        failure = self._writer.failure
        return None if failure is None else str(failure)

    def observe_commits(self, observe_seconds: Callable[[float], object]) -> None:
        """Call `observe_seconds` with the duration of each later commit.

        It runs on the writer thread before the callers get their results, so it must be fast.
        """
        self._writer.observe_seconds = observe_seconds

    @property
    def engine_number(self) -> int:
        """The number of the engine that this process is; 1 in other roles."""
        return self._make_dialect.engine_number

    @property
    def is_shared(self) -> bool:
        """Whether several engines may share the database."""
        return self._make_dialect.is_shared

    def wake(self) -> None:
        """End this process's current or next `wait`."""
        self._notifier.wake()

    def is_peer_running(self) -> bool:
        """Return whether a process of the other role has this database open."""
        with self._explain_errors():
            return self._notifier.is_peer_running()

    def close(self) -> None:
        """Finish queued writes, then release all resources."""
        if self._is_closed:
            return
        self._is_closed = True
        self.wake()
        with self._waiting:
            self._resources.close()


def restore(source: Path, data_dir: Path, url: str | None = None) -> None:
    """Create a database from a file that `Store.copy` wrote. Raises StoreError, also if there is a database."""
    dialect = _make_dialect(data_dir, url, busy_timeout_s=10.0)
    try:
        dialect.restore(source)
    except (DBAPIError, OSError, *dialect.errors) as error:
        raise dialect.explain(error) from error


def _make_dialect(data_dir: Path, url: str | None, busy_timeout_s: float) -> Dialect:
    if url is None:
        return Sqlite(data_dir / DATABASE_NAME, data_dir, busy_timeout_s)
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError("database url: not a URL; postgresql://user:password@host/name is one") from None
    match parsed.get_backend_name():
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return Sqlite(Path(parsed.database), data_dir, busy_timeout_s)
        case "postgresql" | "postgres":
            try:
                from skyrl_tx.store.postgresql import Postgresql
            except ImportError as error:
                raise StoreError(
                    f"database url: PostgreSQL needs a driver ({error}): pip install '{DISTRIBUTION}[postgres]'"
                ) from error
            return Postgresql(parsed, data_dir, busy_timeout_s)
        case _:
            raise StoreError(
                f"database url {parsed.set(query={}).render_as_string()!r}: only sqlite:///path and "
                "postgresql://user@host/name are supported"
            )


def _check_database(data_dir: Path, name: str | None) -> None:
    """Raise StoreError if the weights belong to another database than `name`; None means the directory's own file."""
    note = data_dir / _DATABASE_NOTE
    noted = note.read_text().strip() if note.is_file() else None
    if name is None and noted is not None:
        raise StoreError(
            f"data directory {data_dir} belongs to the database {noted}: name it with --database-url, or choose "
            "another data directory"
        )
    if name is not None and noted is None and (data_dir / DATABASE_NAME).is_file():
        raise StoreError(
            f"data directory {data_dir} has a database of its own, {DATABASE_NAME}, to which its weights belong: "
            "choose another data directory for --database-url"
        )
    if name is not None and noted not in (None, name):
        raise StoreError(
            f"data directory {data_dir} belongs to the database {noted}, not {name}: choose another, or if these are "
            f"one database under two names, remove {note}"
        )


def _record_database(data_dir: Path, name: str | None) -> None:
    """Write the name of an external database into the data directory; does nothing for the directory's own file."""
    if name is None or (data_dir / _DATABASE_NOTE).is_file():
        return
    # Renamed when it is whole, because other processes may start at the same moment; `mkstemp` makes it private.
    descriptor, temporary = tempfile.mkstemp(dir=data_dir, prefix=f"{_DATABASE_NOTE}.")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{name}\n")
    Path(temporary).rename(data_dir / _DATABASE_NOTE)


def upgrade(engine: Engine) -> None:
    """Create the tables, or upgrade them to HEAD, in one transaction.

    Raises StoreError if a newer release or another program wrote the database.
    """
    with engine.begin() as connection:
        tables = inspect(connection).get_table_names()
        is_versioned = "alembic_version" in tables
        version = connection.scalar(text("SELECT version_num FROM alembic_version")) if is_versioned else None
        if version == HEAD:
            return
        if tables and not {"alembic_version", "sessions", "requests"} <= set(tables):
            raise StoreError(
                f"database {connection.engine.url.database} belongs to another program: it has the tables "
                f"{', '.join(tables[:5])}; choose another data directory"
            )
        from skyrl_tx.store import migrations

        if version is None:
            migrations.create(connection, HEAD)
        else:
            migrations.migrate(connection, version, HEAD)


def get_existing(tx: Session, table: type[RowT], key: object) -> RowT:
    """Return the row with this primary key. Raises LookupError if there is none."""
    row = tx.get(table, key)
    if row is None:
        raise LookupError(f"no {table.__name__} has the key {key!r}")
    return row


@overload
def execute(tx: Session, statement: TypedReturnsRows[*Ts], parameters: _Parameters = None) -> CursorResult[*Ts]: ...
@overload
def execute(tx: Session, statement: Executable, parameters: _Parameters = None) -> CursorResult[*tuple[Any, ...]]: ...
def execute(tx: Session, statement: Executable, parameters: _Parameters = None) -> CursorResult[*tuple[Any, ...]]:
    """Execute a statement without loading objects, which takes a fraction of the time of `Session.execute`.

    Like that, it writes changed objects first.
    """
    tx.flush()
    return tx.connection().execute(statement, parameters)


def is_in_batch(column: Mapped[Any]) -> ColumnElement[bool]:
    """Return the condition that a column is in the parameter `ids` of `execute_in_batches`.

    A statement built around a list refers to itself and so keeps the list until garbage collection, and SQLite's driver
    keeps the last 128 statement texts of each connection prepared. So statements are built once, and the lengths of
    their lists are powers of two.
    """
    return column.in_(bindparam("ids", expanding=True))


def split_batches(ids: Iterable[T]) -> Iterator[list[T]]:
    """Yield the ids in lists of 1, 2, 4, … or 1,024; the last list may repeat its last id as padding."""
    all_ids = list(ids)
    for start in range(0, len(all_ids), _MAX_IDS):
        batch = all_ids[start : start + _MAX_IDS]
        padding = (1 << (len(batch) - 1).bit_length()) - len(batch)
        yield batch + batch[-1:] * padding


def execute_in_batches(tx: Session, statement: Executable, ids: Iterable[object], **parameters: object) -> list[Any]:
    """Execute a statement for each batch of ids; return all rows that it selects."""
    rows: list[Any] = []
    for batch in split_batches(ids):
        result = execute(tx, statement, {"ids": batch, **parameters})
        if result.returns_rows:
            rows.extend(result)
    return rows
