"""PostgreSQL: a server that one engine and any number of APIs share.

Locks are PostgreSQL's advisory ones, in the database that the URL names: one server, one database. They belong to a
connection, as LISTEN does, so a pooler that hands connections around between transactions cannot stand in between.
"""

import logging
import os
import select
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from skyrl_tx.store.dialect import PEER, Bell, Dialect, Role
from skyrl_tx.store.errors import StoreBlocked, StoreError, StoreInUse, StoreUnreachable
from skyrl_tx.store.locks import role_lock

_log = logging.getLogger(__name__)

_SPACE = 0x736B7478
"""First half of the numbers of our advisory locks; the second is one of these."""
_WRITING = 1
"""Held by a transaction that writes, in any process."""
_PRESENT: dict[Role, int] = {"engine": 2, "api": 3}
"""Held by the connection on which the engine writes, for itself alone, and on which an API listens, together."""
_CHANNELS: dict[Role, bytes] = {"api": b"skyrl_tx_api", "engine": b"skyrl_tx_engine", "tool": b"skyrl_tx_tool"}
_TAKEN_WITHIN_S = 3.0
"""How long a role may take to come free: PostgreSQL ends the connection of a process that is gone a moment later."""

_NUM_READERS = 16
"""Of the 100 connections that a PostgreSQL takes by default; who finds none free waits."""
_RECONNECT_S = 0.5
_CONNECTING: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""So that a peer which vanished is noticed, unless the URL says otherwise (postgresql.org, libpq-connect)."""
_SETTINGS = """
SELECT set_config('lock_timeout', %(lock_timeout)s, false),
       set_config('tcp_keepalives_idle', '10', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false),
       CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END
"""
_HOLDER = """
SELECT coalesce(nullif(application_name, ''), 'another process')
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = %s AND objid = %s AND objsubid = 2
LIMIT 1
"""
_HOLDS = text(_HOLDER.replace("%s", ":space", 1).replace("%s", ":lock", 1))

# postgresql.org/docs/current/errcodes-appendix
_NO_SPACE = {"53100"}
_LOCKED = {"55P03"}
_FAILING = {"58030"}
_DAMAGED = {"XX001", "XX002"}
_FORBIDDEN = {"25006", "42501"}
_GONE = {"57P01", "57P02", "57P03", "25P03", "57P05"}


class Postgresql(Dialect):
    """A database on a server; weights still lie in the data directory, which all of its processes see."""

    errors = (psycopg.Error, PoolTimeout)

    def __init__(self, url: URL, data_dir: Path, busy_timeout_s: float) -> None:
        defaults = {key: str(value) for key, value in _CONNECTING.items() if key not in url.query}
        self._url = url.set(drivername="postgresql+psycopg").update_query_dict(defaults)
        self._data_dir = data_dir
        self._busy_timeout_s = busy_timeout_s
        self._name = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
        self._place = f"database {url.set(drivername='postgresql', query={}).render_as_string()}"

    @property
    def name(self) -> str | None:
        """Server and database; users and passwords change."""
        return self._name.render_as_string()

    @contextmanager
    def role(self, role: Role) -> Generator[None]:
        """Keep other engines off the weights; what keeps them off the database is taken with the connection."""
        if role != "engine":
            yield
            return
        with role_lock(self._data_dir, role):
            yield

    @contextmanager
    def upgrading(self) -> Generator[None]:
        """Do nothing: the upgrade is a transaction that writes, and those come one after the other."""
        yield

    def writer(self, role: Role) -> Engine:
        """Let transactions take turns; the engine holds its role on this connection, and so can have no second one.

        Had it lost the first, another engine might have written since.
        """
        engine = self._engine(role, writes=True)
        has_connected = False

        def connected(connection: psycopg.Connection, _record: object) -> None:
            nonlocal has_connected
            if role != "engine":
                return
            if has_connected:
                connection.close()
                raise StoreUnreachable(f"{self._place}: the connection was lost on which this engine held its role")
            try:
                self._take_engines_role(connection)
            except BaseException:
                connection.close()
                raise
            has_connected = True

        def begun(connection: Connection) -> None:
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s, %s)", (_SPACE, _WRITING))

        def committing(connection: Connection) -> None:
            connection.exec_driver_sql(f"NOTIFY {_CHANNELS[PEER[role]].decode()}")

        event.listen(engine, "connect", connected)
        event.listen(engine, "begin", begun)
        event.listen(engine, "commit", committing)
        return engine

    def reader(self, role: Role) -> Engine:
        """See one state in each transaction."""
        return self._engine(role, writes=False)

    def _engine(self, role: Role, *, writes: bool) -> Engine:
        engine = create_engine(
            self._url,
            connect_args={"application_name": _name(role, "" if writes else "reads")},
            pool_size=1 if writes else _NUM_READERS,
            max_overflow=0,
            pool_timeout=self._busy_timeout_s,
            pool_use_lifo=True,
        )

        def connected(connection: psycopg.Connection, _record: object) -> None:
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            connection.isolation_level = IsolationLevel.READ_COMMITTED if writes else IsolationLevel.REPEATABLE_READ
            connection.read_only = not writes

        event.listen(engine, "connect", connected)
        return engine

    def _prepare(self, connection: psycopg.Connection) -> None:
        connection.execute(_SETTINGS, {"lock_timeout": str(round(self._busy_timeout_s * 1000))})
        connection.commit()

    def _take_engines_role(self, connection: psycopg.Connection) -> None:
        lock = _SPACE, _PRESENT["engine"]
        patience_ms = str(round(min(self._busy_timeout_s, _TAKEN_WITHIN_S) * 1000))
        try:
            connection.execute("SELECT set_config('lock_timeout', %s, true)", (patience_ms,))
            connection.execute("SELECT pg_advisory_lock(%s, %s)", lock)
            connection.commit()
        except psycopg.errors.LockNotAvailable:
            connection.rollback()
            (holder,) = connection.execute(_HOLDER, lock).fetchone() or ("another process",)
            raise StoreInUse(f"{self._place} is in use by {holder}") from None

    def check(self) -> None:
        """Leave that to PostgreSQL."""

    def bell(self, role: Role, reader: Engine) -> Bell:
        """Hang up a connection that listens."""
        return _PostgresqlBell(self, role, reader)

    def listening(self, role: Role) -> psycopg.Connection:
        """Connect to hear of commits; an API is there for as long as this connection is. Raises psycopg.Error."""
        _, arguments = self._url.get_dialect()().create_connect_args(self._url)
        told = make_conninfo(**{key: str(value) for key, value in arguments.items()})
        connection = psycopg.connect(told, autocommit=True, application_name=_name(role, "listens"))
        try:
            self._prepare(connection)
            if role == "api":
                connection.execute("SELECT pg_advisory_lock_shared(%s, %s)", (_SPACE, _PRESENT["api"]))
            connection.execute(b"LISTEN " + _CHANNELS[role])
        except BaseException:
            connection.close()
            raise
        return connection

    def explain(self, error: BaseException) -> StoreError:
        """Tell a database that is away from one that refuses."""
        if isinstance(error, StoreError):
            return error
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        said = " ".join(str(cause).split())
        if isinstance(cause, PoolTimeout):
            return StoreError(f"{self._place}: all {_NUM_READERS} connections of this process are at work")
        state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
        is_away = isinstance(cause, psycopg.OperationalError) and (state is None or state.startswith(("08", "533")))
        if is_away or state in _GONE:
            return StoreUnreachable(f"{self._place}: it cannot be reached now ({said})")
        kind = StoreError
        if state in _LOCKED:
            kind, what = StoreBlocked, "another process keeps it locked"
        elif state in _NO_SPACE:
            kind, what = StoreBlocked, "no space left for it on the disk"
        elif state in _FAILING:
            what = "the disk failed"
        elif state in _DAMAGED:
            what = "it is damaged; bring back a backup"
        elif state in _FORBIDDEN:
            what = "it cannot be written; give this user the right to, in a database that is not read-only"
        else:
            what = "it failed"
        return kind(f"{self._place}: {what} ({said})")


class _PostgresqlBell(Bell):
    """A connection that listens for the peer's commits, and a pair of sockets to end one's own wait."""

    def __init__(self, database: Postgresql, role: Role, reader: Engine) -> None:
        self._database = database
        self._role: Role = role
        self._reader = reader
        self._own, self._cord = socket.socketpair()
        self._own.setblocking(False)
        self._cord.setblocking(False)
        self._connection: psycopg.Connection | None = database.listening(role)
        self._connect_at = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait; a connection that is lost is made anew, and counts as a ring then, for those that were missed."""
        end = time.monotonic() + timeout_s
        while True:
            if self._connection is None and time.monotonic() >= self._connect_at and self._reconnect():
                return True
            left = max(0.0, end - time.monotonic())
            if self._is_rung(left if self._connection is not None else min(left, _RECONNECT_S)):
                return True
            if time.monotonic() >= end:
                return False

    def _is_rung(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._own, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection.fileno(), select.POLLIN)
        ready = [fileno for fileno, _ in poll.poll(timeout_s * 1000)]
        rung = False
        if self._own.fileno() in ready:
            rung = True
            with suppress(BlockingIOError):
                while self._own.recv(4096):
                    pass
        if self._connection is not None and self._connection.fileno() in ready:
            rung |= self._hear(self._connection)
        return rung

    def _hear(self, connection: psycopg.Connection) -> bool:
        try:
            return bool(list(connection.notifies(timeout=0)))
        except psycopg.OperationalError as error:
            _log.warning("%s", self._database.explain(error))
            connection.close()
            self._connection = None
            return True  # the others find out what they make of it

    def _reconnect(self) -> bool:
        try:
            self._connection = self._database.listening(self._role)
        except psycopg.OperationalError:
            self._connect_at = time.monotonic() + _RECONNECT_S
            return False
        _log.warning("the database can be reached again")
        return True

    def ring_own(self) -> None:
        with suppress(OSError):  # a full buffer has been rung; a closed bell wakes nobody
            self._cord.send(b"\0")

    def ring_peer(self) -> None:
        """Do nothing: the commit itself rang."""

    def peer_lives(self) -> bool:
        with self._reader.connect() as connection:
            asked = {"space": _SPACE, "lock": _PRESENT[PEER[self._role]]}
            return connection.execute(_HOLDS, asked).first() is not None

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.execute("SELECT pg_advisory_unlock_all()")  # at once, not when the server notices
            self._connection.close()
        self._own.close()
        self._cord.close()


def _name(role: Role, does: str = "") -> str:
    """What an administrator sees in pg_stat_activity, in the 63 bytes that there are."""
    who = f"skyrl_tx {role} {does}".strip()
    return f"{who}, process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace")[:63].decode()
