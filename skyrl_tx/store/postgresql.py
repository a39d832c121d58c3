"""PostgreSQL: a database that multiple engines and API processes can share.

Roles and write transactions are protected by advisory locks. Advisory locks and LISTEN belong to a
connection, so the URL must not point to a connection pooler in transaction mode, for example
PgBouncer.
"""

import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlmodel import Session

from skyrl_tx.store import StoreError, StoreInUse, StoreUnreachable
from skyrl_tx.store.dialect import (
    DISK_FAILED,
    ENGINE_CHANNEL,
    ENGINE_CLASS,
    FAILED,
    LOCK_CLASS,
    LOCKED,
    NO_SPACE,
    PEER,
    SILENT_S,
    Dialect,
    Failure,
    Notifier,
    Role,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

_WRITE_LOCK = 1
"""Second key of the lock that each write transaction holds exclusively.

The first key is `LOCK_CLASS`.
"""
_ROLE_LOCKS: dict[Role, int] = {"engine": 2, "api": 3}
"""Second keys of the locks of the roles.

The LISTEN connection of each API process holds the lock of its role in shared mode. The write
connection of an engine holds the engine lock exclusively, or in shared mode if multiple engines
share the database.
"""
_CHANNELS: dict[Role, bytes] = {
    "api": b"skyrl_tx_api",
    "engine": ENGINE_CHANNEL.encode(),
    "tool": b"skyrl_tx_tool",
}
_ROLE_TIMEOUT_S = 3.0
"""How long a process waits for its role.

PostgreSQL needs a moment to notice and close the connection of a dead process.
"""

_MAX_ENGINES = 64
_NUM_READERS = 16
"""Read connections per process. A PostgreSQL server accepts 100 connections by default."""
_LEASE_POLL_S = 0.05
_RECONNECT_S = 0.5
_CONNECT_OPTIONS: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Options that detect an unreachable server.

The URL may override them (postgresql.org, libpq-connect).
"""
_SETTINGS = """
SELECT set_config('lock_timeout', %(lock_timeout)s, false),
       set_config('tcp_keepalives_idle', '10', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false),
       CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END
"""
_FROM_HOLDERS = """
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {} AND objid = {} AND objsubid = 2
"""
_HOLDER = f"SELECT coalesce(nullif(application_name, ''), 'another process') {_FROM_HOLDERS.format('%s', '%s')}"
_HOLDERS = text(f"SELECT pid {_FROM_HOLDERS.format(':class', ':lock')}")
_HAS_ACTIVE_API = text(
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'skyrl_tx api%'"
    " AND coalesce(state_change > clock_timestamp() - :silent_s * interval '1 second', true) LIMIT 1"
)
"""Users without privileges see no `state_change` of other users."""
_END_SILENT_WRITER = (
    f"SELECT pg_terminate_backend(pid), application_name {_FROM_HOLDERS.format('%s', '%s')}"
    " AND wait_event_type = 'Client' AND state_change < clock_timestamp() - %s * interval '1 second'"
)
"""Ends the connection that holds the write lock, if its process has been silent for some seconds."""
_SERVER = text(
    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND application_name ~ '^skyrl_tx (api|engine)' LIMIT 1"
)

_FAILURES: dict[str | None, Failure] = {
    "53100": NO_SPACE,
    "55P03": LOCKED,
    "58030": DISK_FAILED,
    **dict.fromkeys(
        ("XX001", "XX002"),
        (StoreError, "it is damaged; restore a backup, then run `skyrl-tx recover` for later checkpoints"),
    ),
    **dict.fromkeys(
        ("25006", "42501"),
        (StoreError, "it cannot be written; check the user's privileges, and that the database is not read-only"),
    ),
}
"""Failures by error code, see postgresql.org/docs/current/errcodes-appendix."""
_UNREACHABLE_STATES = {"57P01", "57P02", "57P03", "25P03", "57P05"}


class Postgresql(Dialect):
    """A database on a PostgreSQL server.

    Weights stay in the data directory, which all processes share.
    """

    errors = (psycopg.Error, PoolTimeout)
    file_locked = frozenset({"engine"})  # the write connection holds the lock on the database

    def __init__(self, url: URL, data_dir: Path, busy_timeout_s: float) -> None:
        defaults = {key: str(value) for key, value in _CONNECT_OPTIONS.items() if key not in url.query}
        self._url = url.set(drivername="postgresql+psycopg").update_query_dict(defaults)
        self._data_dir = data_dir
        self._busy_timeout_s = busy_timeout_s
        self._name = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
        self.label = url.set(drivername="postgresql", query={}).render_as_string()

    def share(self) -> None:
        """Allow multiple engines to have the engine role. Each gets its own number."""
        self.is_shared = True

    @property
    def name(self) -> str | None:
        """URL with only the server and the database, because users and passwords may change."""
        return self._name.render_as_string()

    def create_writer(self, role: Role) -> Engine:
        """Create the write pool with one connection.

        For an engine, this connection also holds the role. An engine never reconnects, because
        another engine may have written after the connection was lost.
        """
        engine = self._create_engine(role, writes=True)
        has_connected = False

        def on_connect(connection: psycopg.Connection, _record: object) -> None:
            nonlocal has_connected
            if role != "engine":
                return
            if has_connected:
                connection.close()
                raise StoreUnreachable(f"database {self.label}: the connection that held the engine role was lost")
            try:
                self._take_engine_role(connection)
            except BaseException:
                connection.close()
                raise
            has_connected = True

        def on_begin(connection: Connection) -> None:
            try:
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s, %s)", (LOCK_CLASS, _WRITE_LOCK))
            except DBAPIError as error:
                if isinstance(error.orig, psycopg.errors.LockNotAvailable):
                    self._end_silent_writer()
                raise

        def on_commit(connection: Connection) -> None:
            connection.exec_driver_sql(f"NOTIFY {_CHANNELS[PEER[role]].decode()}")

        event.listen(engine, "connect", on_connect)
        event.listen(engine, "begin", on_begin)
        event.listen(engine, "commit", on_commit)
        return engine

    def find_server(self, connection: Connection) -> str | None:
        """Look for the connections of API processes and engines by their names."""
        return connection.execute(_SERVER).scalar()

    def create_reader(self, role: Role) -> Engine:
        """Create the read pool. Its transactions are REPEATABLE READ."""
        return self._create_engine(role, writes=False)

    def _create_engine(self, role: Role, *, writes: bool) -> Engine:
        engine = create_engine(
            self._url,
            connect_args={"application_name": _make_application_name(role, "" if writes else "reads")},
            pool_size=1 if writes else _NUM_READERS,
            max_overflow=0,
            pool_timeout=self._busy_timeout_s,
            pool_use_lifo=True,
        )

        def on_connect(connection: psycopg.Connection, _record: object) -> None:
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            if writes:
                # A process that stops inside a transaction loses it before other writers give up.
                idle_ms = str(round(self._silence_s * 1000))
                connection.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (idle_ms,))
                connection.commit()
            connection.isolation_level = IsolationLevel.READ_COMMITTED if writes else IsolationLevel.REPEATABLE_READ
            connection.read_only = not writes

        event.listen(engine, "connect", on_connect)
        return engine

    def _prepare(self, connection: psycopg.Connection) -> None:
        connection.execute(_SETTINGS, {"lock_timeout": str(round(self._busy_timeout_s * 1000))})
        connection.commit()

    @property
    def _silence_s(self) -> float:
        """How long a process may stand still inside a write transaction."""
        return max(1.0, self._busy_timeout_s / 2)

    def _end_silent_writer(self) -> None:
        """End the transaction of a process that no longer reads what the database sends to it.

        PostgreSQL's own timeout ends only transactions that are idle between two statements.
        """
        with self._connect("tool", "watches") as connection:
            for _, name in connection.execute(_END_SILENT_WRITER, (LOCK_CLASS, _WRITE_LOCK, self._silence_s)):
                _log.error("ended the connection of %s, which stood still inside a write transaction", name)

    def _take_engine_role(self, connection: psycopg.Connection) -> None:
        lock = LOCK_CLASS, _ROLE_LOCKS["engine"]
        timeout_s = min(self._busy_timeout_s, _ROLE_TIMEOUT_S)
        try:
            connection.execute("SELECT set_config('lock_timeout', %s, true)", (str(round(timeout_s * 1000)),))
            kind = b"_shared" if self.is_shared else b""
            connection.execute(b"SELECT pg_advisory_lock" + kind + b"(%s, %s)", lock)
            connection.commit()
        except psycopg.errors.LockNotAvailable:
            connection.rollback()
            (holder,) = connection.execute(_HOLDER, lock).fetchone() or ("another process",)
            advice = "; start all engines that share a database with --engines" if self.is_shared else ""
            raise StoreInUse(f"database {self.label} is in use by {holder}{advice}") from None
        self.engine_number = self._take_lease(connection, timeout_s)

    def _take_lease(self, connection: psycopg.Connection, timeout_s: float) -> int:
        """Take the lease of the lowest free number, see `placement`.

        Raises StoreInUse if no number is free.
        """
        end = time.monotonic() + timeout_s
        while True:
            for number in range(1, _MAX_ENGINES + 1 if self.is_shared else 2):
                taken = connection.execute("SELECT pg_try_advisory_lock(%s, %s)", (ENGINE_CLASS, number)).fetchone()
                connection.commit()
                if taken == (True,):
                    return number
            if time.monotonic() >= end:
                raise StoreInUse(
                    f"database {self.label} is in use by {_MAX_ENGINES if self.is_shared else 1} engines, the maximum"
                )
            time.sleep(_LEASE_POLL_S)

    def copy(self, target: Path, look: Callable[[Session], T]) -> T:
        """Copy with `pg_dump`, from the snapshot of one transaction."""
        engine = self.create_reader("tool")
        try:
            with engine.connect() as connection:
                snapshot = connection.scalar(text("SELECT pg_export_snapshot()"))
                with Session(connection) as tx:
                    result = look(tx)
                    self._run_program("pg_dump", "--format=custom", f"--snapshot={snapshot}", f"--file={target}")
                return result
        finally:
            engine.dispose()

    def restore(self, source: Path) -> None:
        """Create the tables with `pg_restore`."""
        engine = self.create_writer("tool")
        try:
            if tables := inspect(engine).get_table_names():
                raise StoreError(
                    f"database {self.label} is not empty, it has the tables {', '.join(tables[:5])}: restore into an "
                    "empty database"
                )
        finally:
            engine.dispose()
        self._run_program("pg_restore", "--exit-on-error", "--single-transaction", str(source))

    def _run_program(self, program: str, *arguments: str) -> None:
        """Run a PostgreSQL client program.

        Raises StoreError. The password is passed in the environment, because other users of the
        machine can see the arguments.
        """
        url = self._url.set(drivername="postgresql")
        public = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
        environment = {**os.environ, **({"PGPASSWORD": url.password} if url.password else {})}
        command = [program, "--no-owner", "--no-privileges", f"--dbname={public.render_as_string()}", *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise StoreError(
                f"database {self.label}: {program} is not installed; install PostgreSQL's client programs, at least in "
                "the version of the server"
            ) from None
        if done.returncode:
            raise StoreError(f"database {self.label}: {program} failed: {' '.join(done.stderr.split())}")

    def create_notifier(self, role: Role, reader: Engine) -> Notifier:
        """Open a connection that listens for commits of the peer."""
        return _PostgresqlNotifier(self, role, reader)

    def connect_listener(self, role: Role) -> psycopg.Connection:
        """Open a connection that listens for commits of the peer. Raises psycopg.Error.

        The connection of an API process also holds the lock of its role.
        """
        connection = self._connect(role, "listens")
        try:
            self._prepare(connection)
            if role == "api":
                connection.execute("SELECT pg_advisory_lock_shared(%s, %s)", (LOCK_CLASS, _ROLE_LOCKS["api"]))
            connection.execute(b"LISTEN " + _CHANNELS[role])
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, role: Role, purpose: str) -> psycopg.Connection:
        _, arguments = self._url.get_dialect()().create_connect_args(self._url)
        conninfo = make_conninfo(**{key: str(value) for key, value in arguments.items()})
        return psycopg.connect(conninfo, autocommit=True, application_name=_make_application_name(role, purpose))

    def classify_error(self, cause: BaseException) -> Failure:
        """Classify an error by its SQLSTATE.

        Connection errors mean that the database is unreachable.
        """
        if isinstance(cause, PoolTimeout):
            return StoreError, f"all {_NUM_READERS} read connections of this process are in use; try again later"
        state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
        is_unreachable = isinstance(cause, psycopg.OperationalError) and (
            state is None or state.startswith(("08", "533"))
        )
        if is_unreachable or state in _UNREACHABLE_STATES:
            return StoreUnreachable, "it cannot be reached"
        return _FAILURES.get(state, FAILED)


class _PostgresqlNotifier(Notifier):
    """A connection that listens for the peer's commits, and a socket pair for `wake`."""

    def __init__(self, database: Postgresql, role: Role, reader: Engine) -> None:
        self._database = database
        self._role: Role = role
        self._reader = reader
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._connection: psycopg.Connection | None = database.connect_listener(role)
        self._reconnect_at = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification.

        A reconnect after a lost connection counts as a notification, because notifications may have
        been lost.
        """
        end = time.monotonic() + timeout_s
        while True:
            if self._connection is None and time.monotonic() >= self._reconnect_at and self._reconnect():
                return True
            left = max(0.0, end - time.monotonic())
            if self._is_notified(left if self._connection is not None else min(left, _RECONNECT_S)):
                return True
            if time.monotonic() >= end:
                return False

    def _is_notified(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection.fileno(), select.POLLIN)
        ready = [fileno for fileno, _ in poll.poll(timeout_s * 1000)]
        notified = False
        if self._wake_receiver.fileno() in ready:
            notified = True
            with suppress(BlockingIOError):
                while self._wake_receiver.recv(4096):
                    pass
        if self._connection is not None and self._connection.fileno() in ready:
            notified |= self._has_notifications(self._connection)
        return notified

    def _has_notifications(self, connection: psycopg.Connection) -> bool:
        try:
            return bool(list(connection.notifies(timeout=0)))
        except psycopg.Error as error:
            _log.warning("%s", self._database.explain(error))
            connection.close()
            self._connection = None
            return True  # the caller then reads the database and handles the error

    def _reconnect(self) -> bool:
        try:
            self._connection = self._database.connect_listener(self._role)
        except psycopg.Error:
            self._reconnect_at = time.monotonic() + _RECONNECT_S
            return False
        _log.warning("database is reachable again")
        return True

    def wake(self) -> None:
        with suppress(OSError):  # the buffer is full of notifications, or the socket is closed
            self._wake_sender.send(b"\0")

    def notify_peer(self) -> None:
        """Do nothing, because the commit already sent NOTIFY."""

    def is_peer_running(self) -> bool:
        with self._reader.connect() as connection:
            parameters = {"class": LOCK_CLASS, "lock": _ROLE_LOCKS[PEER[self._role]]}
            is_running = connection.execute(_HOLDERS, parameters).first() is not None
            if is_running and PEER[self._role] == "api":
                is_running = connection.execute(_HAS_ACTIVE_API, {"silent_s": SILENT_S}).first() is not None
            return is_running

    def is_alone(self) -> bool:
        with self._reader.connect() as connection:
            parameters = {"class": LOCK_CLASS, "lock": _ROLE_LOCKS[self._role]}
            return len(connection.execute(_HOLDERS, parameters).all()) <= 1

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                # The server may notice the closed connection only later.
                self._connection.execute("SELECT pg_advisory_unlock_all()")
            self._connection.close()
        self._wake_receiver.close()
        self._wake_sender.close()


def _make_application_name(role: Role, purpose: str = "") -> str:
    """Return the name that pg_stat_activity shows, at most 63 bytes."""
    name = f"skyrl_tx {role} {purpose}".strip()
    return f"{name}, process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace")[:63].decode()
