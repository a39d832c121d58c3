"""One SQLite database in memory for all processes of a history, with faults on demand.

Every transaction of the product runs without a break, so that one connection serves all. A commit is durable at once,
as `synchronous=FULL` promises; what is not promised is in `Faults`.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import StaticPool
from sqlmodel import Session

from skyrl_tx.store import keys, schema
from skyrl_tx.store.dialect import PEER, Notifier, Role
from skyrl_tx.store.sqlite import Sqlite, SqliteNotifier, _invalidate_if_rolled_back
from tests.support.quick_stores import make_stores_quick
from tests.support.simulation.scheduler import Fiber, Scheduler
from tests.support.simulation.statements import EXECUTE, FastSession, Statements

Watch = Callable[[str], None]
"""Called with "read", "commit", "committed" or "look" at the points where a fault may happen."""


def disk_error() -> sqlite3.OperationalError:
    """Return the error of a failing disk."""
    return _error("disk I/O error", sqlite3.SQLITE_IOERR)


def full_disk() -> sqlite3.OperationalError:
    """Return the error of a full disk."""
    return _error("database or disk is full", sqlite3.SQLITE_FULL)


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


_MAX_STATEMENTS = 2_000
"""Prepared statements that are kept: all of the product's."""


class _Connection(sqlite3.Connection):
    """The one connection. Closing it only ends the transaction."""

    watch: Watch = staticmethod(lambda point: None)
    num_commits = 0

    def commit(self) -> None:
        if self.in_transaction:
            self._reach("commit")
            super().commit()
            _Connection.num_commits += 1
            self.watch("committed")

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()

    def _reach(self, point: str) -> None:
        try:
            self.watch(point)
        except BaseException:
            self.rollback()
            raise


class _LastingConnection(Connection):
    """A connection that its users close, and that the next one uses again: making one takes longer than a read."""

    def close(self) -> None:
        if (transaction := self.get_transaction()) is not None:
            transaction.close()


class Database:
    """The database of this process; each history begins with a copy of the template."""

    def __init__(self, *, is_plain: bool) -> None:
        """Create the template, with the tables and a key for each owner. `is_plain`: see `statements`."""
        self.connection = sqlite3.connect(
            ":memory:", check_same_thread=False, factory=_Connection, cached_statements=_MAX_STATEMENTS
        )
        self.connection.isolation_level = None
        self.connection.execute("PRAGMA foreign_keys=ON")
        make_stores_quick()
        self.writer, self.reader = self._engine(writes=True), self._engine(writes=False)
        schema.upgrade(self.writer)
        self.keys: dict[str, str] = {}

        with Session(self.writer) as tx:
            for owner in ("ann", "bob", "operator"):
                scope = "admin" if owner == "operator" else "user"
                self.keys[owner], _ = keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=1.0)
            tx.commit()

        self.template = self.connection.serialize()
        self.statements = FastSession.statements = Statements(self.connection, self.reader.dialect.do_begin)  # type: ignore[arg-type]
        self.substitutes: list[tuple[object, object]] = [(EXECUTE, self.statements.execute), (Session, FastSession)]
        if is_plain:
            self.substitutes = []
        tables = self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._rows = {table: self.rows(f"SELECT * FROM {table}") for (table,) in tables}

    def reset(self) -> None:
        """Go back to the template. Prepared statements stay valid, which saves half of the time of a history."""
        connection = self.connection
        if connection.in_transaction:
            connection.rollback()
        connection.execute("PRAGMA foreign_keys=OFF")
        for table, rows in self._rows.items():
            connection.execute(f"DELETE FROM {table}")
            if rows:
                connection.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
        connection.execute("PRAGMA foreign_keys=ON")

    def replace(self, image: bytes) -> None:
        """Replace the content by an image."""
        if self.connection.in_transaction:
            self.connection.rollback()
        self.connection.deserialize(image)

    def image(self) -> bytes:
        """Return the content."""
        return self.connection.serialize()

    def rows(self, sql: str, *parameters: object) -> list[Any]:
        """Query without faults."""
        return self.connection.execute(sql, parameters).fetchall()

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            self.connection.rollback()

    def _engine(self, *, writes: bool) -> Engine:
        from skyrl_tx.store import sqlite

        engine = sqlite.create_engine(
            "sqlite://", creator=lambda: self.connection, poolclass=StaticPool, pool_reset_on_return=None
        )
        point = "write" if writes else "read"

        # Listeners of events, and statements that SQLAlchemy compiles, would take a third of the time.
        run = self.connection.execute

        def begin(_: object = None) -> None:
            if writes or not self.connection.in_transaction:  # `FastSession` may have started
                self.connection.watch(point)
                run("BEGIN")

        lasting: list[_LastingConnection] = []

        def connect() -> Connection:
            if not lasting or lasting[0].invalidated:
                lasting[:] = [_LastingConnection(engine)]
            return lasting[0]

        engine.connect = connect  # type: ignore[method-assign]
        engine.dialect.do_begin = begin  # type: ignore[method-assign]
        engine.dialect.do_rollback = lambda _: self._roll_back()  # type: ignore[method-assign]
        engine.dialect.do_savepoint = lambda connection, name: run(f"SAVEPOINT {name}")  # type: ignore[method-assign]
        engine.dialect.do_release_savepoint = lambda connection, name: run(f"RELEASE {name}")  # type: ignore
        engine.dialect.do_rollback_to_savepoint = lambda connection, name: run(f"ROLLBACK TO {name}")  # type: ignore
        if writes:
            event.listen(engine, "handle_error", _invalidate_if_rolled_back)
        return engine


class Dialect(Sqlite):
    """The product's SQLite on the database in memory. As on PostgreSQL, several APIs may run."""

    file_locked = frozenset()

    def __init__(self, history: "Notifiers", shared: Database, data_dir: Path) -> None:
        super().__init__(data_dir / "skyrl_tx.db", data_dir, 1.0)
        self._notifiers = history
        self._shared = shared

    def create_writer(self, role: Role) -> Engine:
        return self._shared.writer

    def create_reader(self, role: Role) -> Engine:
        return self._shared.reader

    def check(self) -> None:
        """Pages in memory are not damaged."""

    def create_notifier(self, role: Role, reader: Engine) -> Notifier:
        return _Notifier(self._notifiers, role)


class Notifiers:
    """The notifiers of all running processes, by role."""

    def __init__(self, scheduler: Scheduler, watch: Watch) -> None:
        self.scheduler = scheduler
        self.watch = watch
        self.by_role: dict[str, list[_Notifier]] = {}


class _Notifier(SqliteNotifier):
    """The product's notifier, with a queue in the place of its socket and a counter in the place of its query."""

    def __init__(self, others: Notifiers, role: Role) -> None:
        self._others = others
        self._role = role
        self._address, self._peer_address = role, PEER[role]
        self._num_received = 0
        self._waiting: Fiber | None = None
        self._process = others.scheduler.current.process
        self._poll = self._socket = self._connection = self  # pyright: ignore
        self._path = Path("simulated")
        self._seen = self._version()
        others.by_role.setdefault(role, []).append(self)
        self._process.on_death.append(self.close)

    def poll(self, milliseconds: float) -> bool:
        """Stand for `select.poll`."""
        if not self._num_received:
            self._waiting = self._others.scheduler.current
            self._others.scheduler.park(milliseconds / 1000, on=self)
            self._waiting = None
        return self._num_received > 0

    def recv(self, size: int) -> bytes:
        """Stand for the socket."""
        if not self._num_received:
            raise BlockingIOError
        self._num_received = 0
        return b""

    def execute(self, sql: str) -> "_Notifier":
        """Stand for the connection; its only query asks for a number that changes with each commit."""
        self._others.watch("look")
        return self

    def fetchone(self) -> tuple[int]:
        """Return the number of commits."""
        return (_Connection.num_commits,)

    def _send(self, address: str) -> None:
        for other in self._others.by_role.get(address, ()):
            if address != self._role or other is self:
                other.receive()

    def _show_activity(self) -> None:
        """Do nothing: a simulated process is never silent."""

    def receive(self) -> None:
        """Take a notification."""
        self._num_received += 1
        if self._waiting is not None:
            self._others.scheduler.wake(self._waiting, on=self)

    def is_peer_running(self) -> bool:
        return bool(self._others.by_role.get(self._peer_address))

    def close(self) -> None:
        if self in self._others.by_role[self._role]:
            self._others.by_role[self._role].remove(self)
