"""The database as one process uses it: open, read, write, and wait for commits of the peer.

The peer of the API is the engine, and the peer of an engine is the API. `Store` is the entry point.
All writes of a process go through the thread of its `GroupWriter`.
"""

import math
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple, overload

from sqlalchemy import URL, ColumnElement, Connection, CursorResult, Engine, Executable, bindparam, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import Mapped
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.selectable import TypedReturnsRows
from sqlmodel import Session, SQLModel

from skyrl_tx import DISTRIBUTION
from skyrl_tx.artifacts.location import write_note
from skyrl_tx.process.paths import make_private
from skyrl_tx.store import StoreError
from skyrl_tx.store.dialect import DATABASE_NAME, Dialect, Notifier, Role, lock_after_check, lock_file, lock_role
from skyrl_tx.store.schema import check_schema, upgrade_without_servers
from skyrl_tx.store.sqlite import Sqlite
from skyrl_tx.store.writer import GroupWriter, RetryPolicy, translate_refusal

T = TypeVar("T")
RowT = TypeVar("RowT", bound=SQLModel)
Ts = TypeVarTuple("Ts")
_Parameters = Mapping[str, object] | Sequence[Mapping[str, object]] | None

_MAX_IDS = 1024

_DATABASE_NOTE = "database"
"""File in the data directory that names an external database, to detect a wrong URL."""
_PRIVATE_NAMES = (
    *("signing.key", "artifacts", "artifact-cache", "artifacts.url", _DATABASE_NOTE),
    *("api.lock", "engine.lock", "schema.lock", "checked.lock"),
)
"""Files and directories in the data directory that other users cannot access."""


class Store:
    """The database as one process uses it.

    All methods are thread-safe; only one thread at a time may `wait`.
    """

    def __init__(
        self, *, dialect: Dialect, reader: Engine, writer: GroupWriter, notifier: Notifier, resources: ExitStack
    ) -> None:
        """Callers use `open`, which makes these objects.

        `resources` closes the other arguments, in the reverse order of their opening.
        """
        self._dialect = dialect
        self._reader = reader
        self._writer = writer
        self._notifier = notifier
        self._resources = resources
        self._waiting = threading.Lock()
        self._is_closed = False
        self.engine_number = dialect.engine_number
        """The number of this process's engine; 1 in other roles."""
        self.is_shared = dialect.is_shared
        """Whether multiple engines may share the database."""
        self.is_older = False
        """Whether an older release wrote the database, see `accepts_older` of `open`."""

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
        creates: bool = True,
        accepts_older: bool = False,
    ) -> Self:
        """Open the database in a role.

        Only servers, which are the roles `api` and `engine`, migrate a database of an older
        release, and only while no other server has it open.

        Args:
            data_dir: The data directory, which is created if it does not exist.
            role: Multiple processes may have the role `tool` and, on PostgreSQL, the role `api`.
            url: Another SQLite file ("sqlite:///path") or a PostgreSQL database
                ("postgresql://user@host/name"). The default is a SQLite file in the data directory.
            busy_timeout_s: How long a write waits for writes of other processes.
            retry: Repeats writes while the database is locked or full. By default they fail.
            is_shared: Whether multiple processes may have the role `engine`. Needs PostgreSQL.
            creates: Whether a tool creates the tables in an empty database. Otherwise an empty
                database is refused.
            accepts_older: Whether a tool opens a database of an older release, which stays
                unchanged. The tool can then read only what the older release has stored.

        Raises:
            StoreInUse: Another process has the role, or a server prevents the migration.
            SchemaOutdated: The database has the schema of an older release.
            StoreError: The database cannot be used.
        """
        dialect = _make_dialect(data_dir, url, busy_timeout_s)
        if is_shared:
            dialect.share()
        with ExitStack() as stack:
            try:
                # Prepare the data directory and take the role.
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_database(data_dir, dialect.name)
                make_private(data_dir, [*dialect.files, *(data_dir / name for name in _PRIVATE_NAMES)])

                # Prepare the tables before this process has its role: servers that start at the
                # same time must not prevent each other's migration. SQLite's lock does not cover
                # setting the journal mode of a new file.
                is_older = False
                with lock_file(data_dir / "schema.lock"), ExitStack() as until_prepared:
                    engine = dialect.create_writer("tool")
                    until_prepared.callback(engine.dispose)
                    if role == "tool":
                        is_older = check_schema(engine, creates=creates, accepts_older=accepts_older)
                    else:
                        upgrade_without_servers(engine, dialect)

                # Take the role and connect.
                if role in dialect.file_locked:
                    stack.enter_context(lock_role(data_dir, role, is_shared=is_shared))
                write_engine = dialect.create_writer(role)
                stack.callback(write_engine.dispose)
                write_engine.connect().close()
                may_note = role != "tool" or creates  # a tool that only reads may have got the wrong URL
                if may_note and dialect.name is not None and not (data_dir / _DATABASE_NOTE).is_file():
                    write_note(data_dir, _DATABASE_NOTE, dialect.name)

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
            store = cls(dialect=dialect, reader=reader, writer=writer, notifier=notifier, resources=stack.pop_all())
            store.is_older = is_older
            return store

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction on the writer thread, and return its result after the commit.

        An exception of `work` is raised here. It rolls back only the changes of this call.
        StoreError means that the database failed and the changes were not stored.
        """
        if self._writer.is_own_thread():
            raise StoreError("write called within a write: call both functions in one transaction")
        return self.write_soon(work).result()

    def write_soon(self, work: Callable[[Session], T], if_refused: Callable[[Session], T] | None = None) -> Future[T]:
        """Like `write`, but returns a future instead of waiting for the commit.

        If the database refuses a value of `work`, `if_refused` runs instead in the same place.
        """
        return self._writer.submit(work, if_refused)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run read-only work on one consistent state. Does not block writers."""
        if self._is_closed:
            raise StoreError("the store is closed")
        with self._explain_errors():
            try:
                return self._read(work)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            return self._read(work)  # with a new connection, because the database may have restarted

    def _read(self, work: Callable[[Session], T]) -> T:
        with Session(self._reader, expire_on_commit=False) as tx:
            result = work(tx)
            tx.flush()  # raises for work that is not read-only
            return result

    @contextmanager
    def _explain_errors(self) -> Generator[None]:
        try:
            yield
        except (UnicodeEncodeError, DBAPIError, *self._dialect.errors) as error:
            raise (translate_refusal(error) or self._dialect.explain(error)) from error

    def get_free_bytes(self) -> float:
        """Return the free space on the disk of the database; infinite for PostgreSQL."""
        return shutil.disk_usage(self._dialect.files[0].parent).free if self._dialect.files else math.inf

    def vacuum(self) -> bool:
        """Release some free space to the file system. Return whether more free space remains."""
        return self.write(lambda tx: self._dialect.vacuum(tx.connection()))

    def find_damage(self) -> str | None:
        """Check the structure of the database file. Return the first damage, or None.

        Takes some milliseconds per MiB.
        """
        with self._explain_errors():
            return self._dialect.find_damage()

    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Write a consistent copy of the database to a file, and return the result of `look`.

        `look` reads the same state as the copy. Other processes can use the database meanwhile.
        Raises StoreError.
        """
        with self._explain_errors():
            return self._dialect.copy(target, look)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a commit of the peer or for `wake`.

        Return False on timeout. Only one thread at a time can wait. Notifications may be spurious,
        so callers must check the database.
        """
        with self._waiting:
            return not self._is_closed and self._notifier.wait(timeout_s) and not self._is_closed

    @property
    def write_failure(self) -> str | None:
        """Error of the latest write, or None if it succeeded."""
        failure = self._writer.failure
        return None if failure is None else str(failure)

    def observe_commits(self, observe_seconds: Callable[[float], object]) -> None:
        """Call `observe_seconds` with the duration of each commit from now on.

        The call is made on the writer thread before the callers get their results, so it must be
        fast.
        """
        self._writer.observe_seconds = observe_seconds

    def wake(self) -> None:
        """End this process's current or next `wait`."""
        self._notifier.wake()

    def is_peer_running(self) -> bool:
        """Return whether a process with the peer's role has this database open."""
        with self._explain_errors():
            return self._notifier.is_peer_running()

    def is_alone(self) -> bool:
        """Return whether no other process with this process's role has this database open."""
        with self._explain_errors():
            return self._notifier.is_alone()

    def close(self) -> None:
        """Finish queued writes, then release all resources."""
        if self._is_closed:
            return
        self._is_closed = True
        self.wake()
        with self._waiting:
            self._resources.close()


def restore(source: Path, data_dir: Path, url: str | None = None) -> None:
    """Create a database from a file that `Store.copy` wrote.

    Raises StoreError if there is a database already.
    """
    dialect = _make_dialect(data_dir, url, busy_timeout_s=10.0)
    try:
        dialect.restore(source)
        if dialect.name is not None:
            write_note(data_dir, _DATABASE_NOTE, dialect.name)
    except (DBAPIError, OSError, *dialect.errors) as error:
        raise dialect.explain(error) from error


def parse_url(url: str) -> URL:
    """Parse the URL of a database. Raises StoreError, without the password in its message."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreError("database url: not a URL; use for example postgresql://user:password@host/name") from None
    if "@" in (parsed.host or ""):  # the part of the password after its first '@' counts as the host
        raise StoreError("database url: the password contains '@', which a URL must spell as %40")
    return parsed


def _make_dialect(data_dir: Path, url: str | None, busy_timeout_s: float) -> Dialect:
    if url is None:
        return Sqlite(data_dir / DATABASE_NAME, data_dir, busy_timeout_s)
    parsed = parse_url(url)
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
    """Raise StoreError if the data directory belongs to another database.

    `name` is `Dialect.name`: None for the SQLite file in the data directory.
    """
    note = data_dir / _DATABASE_NOTE
    recorded = note.read_text().strip() if note.is_file() else None
    if name is None and recorded is not None:
        raise StoreError(
            f"data directory {data_dir} belongs to the database {recorded}: name it with --database-url, or choose "
            "another data directory"
        )

    if name is not None and recorded is None and (data_dir / DATABASE_NAME).is_file():
        raise StoreError(
            f"data directory {data_dir} belongs to the database {DATABASE_NAME} in it: choose another data directory "
            "for --database-url"
        )

    if name is not None and recorded not in (None, name):
        raise StoreError(
            f"data directory {data_dir} belongs to the database {recorded}, not {name}: choose another data "
            f"directory, or remove {note} if both are names of the same database"
        )


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
    """Execute a statement without loading objects, which is much faster than `Session.execute`.

    Like `Session.execute`, it flushes changed objects first.
    """
    tx.flush()
    return tx.connection().execute(statement, parameters)


def is_in_batch(column: Mapped[Any]) -> ColumnElement[bool]:
    """Return the condition that a column is in the parameter `ids` of `execute_in_batches`.

    Use it instead of `column.in_(ids)`, so that the statement is built only once. A statement with
    the ids in it is a reference cycle, which keeps the ids in memory until garbage collection.
    """
    return column.in_(bindparam("ids", expanding=True))


def split_batches(ids: Iterable[T]) -> Iterator[list[T]]:
    """Yield the ids in lists of 1, 2, 4, … or 1,024.

    The last list may repeat its last id as padding. SQLite's driver caches the last 128 statement
    texts of each connection. With lengths that are powers of two, a statement has at most 11 texts.
    """
    all_ids = list(ids)
    for start in range(0, len(all_ids), _MAX_IDS):
        batch = all_ids[start : start + _MAX_IDS]
        padding = (1 << (len(batch) - 1).bit_length()) - len(batch)
        yield batch + batch[-1:] * padding


def execute_in_batches(tx: Session, statement: Executable, ids: Iterable[object], **parameters: object) -> list[Any]:
    """Execute a statement once for each batch of ids, and return all selected rows."""
    rows: list[Any] = []
    for batch in split_batches(ids):
        result = execute(tx, statement, {"ids": batch, **parameters})
        if result.returns_rows:
            rows.extend(result)
    return rows


@dataclass(frozen=True, slots=True)
class _CompiledStatement:
    """A statement that was compiled for one kind of database."""

    text: str
    constants: Mapping[str, Any]
    positions: Sequence[str] | None
    """Names of the values in the driver's order; None if the driver takes values by name."""

    def values(self, named: Mapping[str, Any]) -> Any:
        if self.positions is not None:
            constants = self.constants
            return tuple([named[name] if name in named else constants[name] for name in self.positions])
        return {**self.constants, **named}


@dataclass(frozen=True, slots=True)
class PreparedStatement:
    """A statement without result rows that runs for every result.

    SQLAlchemy compiles it once. Each execution then sends the text and the values to the driver,
    and bypasses SQLAlchemy's work per execution. An insert of eleven columns takes 28 microseconds
    instead of 75 with `execute`. Values are passed to the driver unchanged, so they must be numbers,
    text, bytes or None.
    """

    build: Callable[[str], Executable]
    """Builds the statement for a kind of database, `sqlite` or `postgresql`."""
    columns: Sequence[str]
    """Names of all values."""
    _statements: dict[str, _CompiledStatement] = field(default_factory=dict[str, _CompiledStatement])

    def execute(self, tx: Session, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> CursorResult[Any]:
        """Execute the statement, once for each mapping.

        Like `execute`, flushes changed objects first.
        """
        tx.flush()
        connection = tx.connection()
        statement = self._statements.get(connection.dialect.name) or self._compile(connection)
        if isinstance(values, Mapping):
            return connection.exec_driver_sql(statement.text, statement.values(values))
        return connection.exec_driver_sql(statement.text, [statement.values(row) for row in values])

    def _compile(self, connection: Connection) -> _CompiledStatement:
        dialect = connection.dialect
        compiled = self.build(dialect.name).compile(dialect=dialect, column_keys=list(self.columns))  # pyright: ignore
        assert isinstance(compiled, SQLCompiler)
        variables = set(self.columns)
        constants = {name: value for name, value in compiled.params.items() if name not in variables}
        statement = _CompiledStatement(str(compiled), constants, compiled.positiontup)
        self._statements[dialect.name] = statement
        return statement


def make_upsert_builder(table: type[SQLModel], key: Sequence[str], sums: Sequence[str]) -> Callable[[str], Executable]:
    """Return the builder of an upsert.

    The statement inserts a row. If a row with the same key exists, the statement adds the values of
    the columns `sums` to the existing row instead.
    """

    def build(database: str) -> Executable:
        row = (sqlite.insert if database == "sqlite" else postgresql.insert)(table)
        added = {name: getattr(table, name) + getattr(row.excluded, name) for name in sums}
        return row.on_conflict_do_update(index_elements=list(key), set_=added)

    return build
