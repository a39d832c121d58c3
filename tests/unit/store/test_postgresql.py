"""Tests for PostgreSQL only. The other tests in this directory run on both databases."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import (
    SchemaOutdated,
    StoreBlocked,
    StoreError,
    StoreInUse,
    StoreUnreachable,
    ValueRefused,
    futures,
    schema,
    sessions,
)
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import LOCK_CLASS
from skyrl_tx.store.futures import NewRequest
from tests.support import old_schemas
from tests.support.postgresql_server import PostgresqlServer

STOP_IN_A_WRITE = """
import os, signal, sys
from pathlib import Path
from skyrl_tx.store.database import Store
store = Store.open(Path(sys.argv[1]), role=sys.argv[2], url=sys.argv[3], is_shared=True)
def stop(tx):
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    store.write(stop)
except Exception as error:
    print(type(error).__name__, flush=True)
"""
HOLD_ENGINE_ROLE = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from skyrl_tx.store.database import Store
store = Store.open(Path(sys.argv[1]), role="engine", url=sys.argv[2])
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def database_url(postgresql_url: str) -> str:
    return postgresql_url


@pytest.fixture
def administrator(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True, application_name="administrator") as connection:
        yield connection


def end_connections(administrator: psycopg.Connection, role: str) -> int:
    """Close all connections, as a server restart or a network failure would."""
    ended = administrator.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE %s",
        (f"skyrl_tx {role}%",),
    )
    return ended.rowcount


def submit(tx: Session, session_id: SessionId, key: str = "") -> futures.SubmittedRequest:
    new = NewRequest(key=key, kind="sample", owner="ann", session_id=session_id, body=b"b")
    return futures.submit(tx, new, 1.0)


@pytest.mark.parametrize("is_new", [True, False])
def test_migrations_create_the_tables_of_the_code(postgresql: PostgresqlServer, is_new: bool) -> None:
    engine = create_engine(postgresql.new_database(empty=True).replace("postgresql:", "postgresql+psycopg:"))
    if not is_new:
        with engine.begin() as connection:
            old_schemas.create(connection, "0001")
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, old_schemas.ALL_TABLES) == []
        partial = connection.execute(text("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%WHERE%'"))
        assert {"ix_requests_open", "ix_requests_loads", "ix_requests_prunable"} <= set(partial.scalars())
    engine.dispose()


def test_a_server_does_not_migrate_while_another_one_runs(postgresql: PostgresqlServer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(schema, "_SERVERS_END_S", 0.0)
    url = postgresql.new_database(empty=True)
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        old_schemas.create(connection, "0017")
    engine.dispose()
    with (
        psycopg.connect(url, application_name="skyrl_tx engine, process 12 on node-1"),
        pytest.raises(StoreInUse, match="while a server uses it: skyrl_tx engine, process 12 on node-1; stop all"),
    ):
        Store.open(tmp_path, role="api", url=url)
    with pytest.raises(SchemaOutdated):
        Store.open(tmp_path, role="tool", url=url)

    # Engines of this release that start together do not prevent each other's migration.
    with ThreadPoolExecutor() as pool:
        opening = [
            pool.submit(Store.open, tmp_path / str(number), role="engine", url=url, is_shared=True)
            for number in range(3)
        ]
    for opened in opening:
        opened.result().close()


def test_engine_role_is_exclusive_across_data_directories(tmp_path: Path, open_store) -> None:
    engine = open_store("engine", tmp_path / "one")
    started = time.monotonic()
    with pytest.raises(StoreInUse, match=r"in use by skyrl_tx engine, process \d+ on "):
        open_store("engine", tmp_path / "two", busy_timeout_s=0.2)
    with pytest.raises(StoreInUse, match=r"data directory .*/one is in use: its engine runs as process \d+"):
        open_store("engine", tmp_path / "one")
    assert time.monotonic() - started < 15
    engine.close()
    open_store("engine", tmp_path / "two")


def test_a_killed_engine_releases_its_role(tmp_path: Path, open_store, database_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_ENGINE_ROLE, tmp_path, database_url], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == "open\n"
        engine.kill()
    open_store("engine")


def test_a_writer_that_stands_still_loses_its_transaction(open_store, session_id: SessionId) -> None:
    still, other = open_store("api", busy_timeout_s=1.0), open_store("api")
    started, go_on = threading.Event(), threading.Event()
    written = still.write_soon(lambda tx: started.set() or (go_on.wait(20), submit(tx, session_id, "model/m/1")))
    assert started.wait(10)
    assert other.write(lambda tx: submit(tx, session_id, "model/m/2")).is_new
    go_on.set()
    with pytest.raises(StoreUnreachable):
        written.result(20)
    assert still.write(lambda tx: submit(tx, session_id, "model/m/1")).is_new, "it connects again"


def test_a_writer_that_reads_no_rows_loses_its_transaction(open_store, database_url: str, session_id, caplog) -> None:
    store = open_store("api", busy_timeout_s=1.5)
    with psycopg.connect(database_url, application_name="skyrl_tx engine, process 12") as stopped:
        stopped.execute("SELECT pg_advisory_xact_lock(%s, 1)", (LOCK_CLASS,))
        stopped.pgconn.send_query(b"SELECT repeat('x', 1000) FROM generate_series(1, 100000)")
        with pytest.raises(StoreBlocked):
            store.write(lambda tx: submit(tx, session_id))
        assert store.write(lambda tx: submit(tx, session_id)).is_new
        stopped.close()
    assert "ended the connection of skyrl_tx engine, process 12, which stood still" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("role", ["api", "engine"])
def test_a_stopped_process_does_not_stop_the_others(tmp_path, open_store, database_url, session_id, role: str) -> None:
    other = open_store("api")
    command = [sys.executable, "-c", STOP_IN_A_WRITE, tmp_path / "stopped", role, database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout is not None and stopped.stdout.readline() == "stops\n"
        assert other.write(lambda tx: submit(tx, session_id)).is_new
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout.readline() == "StoreUnreachable\n"
        stopped.kill()


def test_the_engine_notifies_every_api(open_store) -> None:
    apis, engine = [open_store("api"), open_store("api")], open_store("engine")
    assert engine.is_peer_running()
    for api in apis:
        assert api.is_peer_running()
        api.wait(0)
    engine.write(lambda tx: None)
    assert [api.wait(5) for api in apis] == [True, True]
    apis[0].close()
    assert engine.is_peer_running()
    apis[1].close()
    assert not engine.is_peer_running()


def test_concurrent_duplicates_on_two_apis_create_one_request(open_store, session_id: SessionId) -> None:
    apis = [open_store("api"), open_store("api")]
    for number in range(30):
        sent = [
            api.write_soon(lambda tx, number=number: submit(tx, session_id, f"model/m/{number}"))
            for api in apis
            for _ in range(3)
        ]
        answers = [future.result(20) for future in sent]
        assert len({answer.request_id for answer in answers}) == 1
        assert sum(answer.is_new for answer in answers) == 1


def test_positions_are_committed_in_order(open_store, session_id: SessionId) -> None:
    apis, engine = [open_store("api"), open_store("api")], open_store("engine")
    assigned, go_on = threading.Event(), threading.Event()

    def slowly(tx: Session) -> futures.SubmittedRequest:
        submitted = submit(tx, session_id)
        assigned.set()
        go_on.wait(10)
        return submitted

    first = apis[0].write_soon(slowly)
    assert assigned.wait(10)
    second = apis[1].write_soon(lambda tx: submit(tx, session_id))
    with pytest.raises(TimeoutError):
        second.result(0.2)  # it must not become visible before the first one is committed
    assert engine.read(lambda tx: futures.list_pending(tx, 0, 10)) == []
    go_on.set()
    assert first.result(10).position < second.result(10).position

    seen: list[int] = []
    sent = [api.write_soon(lambda tx: submit(tx, session_id)) for _ in range(100) for api in apis]
    while len(seen) < 202:
        last = seen[-1] if seen else 0
        seen += [found.position for found in engine.read(lambda tx, last=last: futures.list_pending(tx, last, 7))]
    assert sorted(future.result(10).position for future in sent) == seen[2:]


def test_a_write_fails_after_the_busy_timeout(open_store) -> None:
    first, second = open_store("api"), open_store("api", busy_timeout_s=0.2)
    go_on, started = threading.Event(), threading.Event()
    slow = first.write_soon(lambda tx: started.set() or go_on.wait(10))
    assert started.wait(5)
    with pytest.raises(StoreError, match="another process holds its lock"):
        second.write(lambda tx: None)
    go_on.set()
    slow.result(5)
    second.write(lambda tx: None)


def test_commits_are_durable_and_foreign_keys_enforced(
    open_store, database_url: str, administrator: psycopg.Connection
) -> None:
    name = administrator.info.dbname
    administrator.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off'.encode())
    try:
        store = open_store()
        shown = store.write(lambda tx: tx.connection().exec_driver_sql("SHOW synchronous_commit").scalar())
        assert shown == "on"
    finally:
        administrator.execute(f'ALTER DATABASE "{name}" RESET synchronous_commit'.encode())
    with pytest.raises(IntegrityError):
        store.write(lambda tx: submit(tx, SessionId("unknown")))


def test_a_lost_connection_fails_one_write_and_reconnects(store: Store, administrator: psycopg.Connection) -> None:
    store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0))
    assert end_connections(administrator, "") >= 3
    assert store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0)) == [], "a read is repeated"
    with pytest.raises(StoreUnreachable, match="it cannot be reached"):
        store.write(lambda tx: None)
    store.write(lambda tx: None)


def test_an_api_reconnects_its_listener(open_store, administrator) -> None:
    api, engine = open_store("api"), open_store("engine")
    api.wait(0)
    end_connections(administrator, "api")
    assert not engine.is_peer_running()
    assert api.wait(5), "a reconnect counts as a notification"
    end = time.monotonic() + 60
    while not engine.is_peer_running() and time.monotonic() < end:
        api.wait(0.1)
    assert engine.is_peer_running()
    api.wait(0)
    engine.write(lambda tx: None)
    assert api.wait(5)


def test_an_engine_never_writes_after_a_lost_connection(open_store, administrator) -> None:
    engine = open_store("engine")
    end_connections(administrator, "engine")
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            engine.write(lambda tx: None)
    engine.close()
    open_store("engine").write(lambda tx: None)


def test_running_work_rolls_back_when_the_connection_breaks(
    store: Store, session_id: SessionId, administrator: psycopg.Connection
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work(tx: Session) -> None:
        submit(tx, session_id)
        started.set()
        go_on.wait(10)
        submit(tx, session_id)

    half_done = store.write_soon(work)
    assert started.wait(5)
    also = store.write_soon(lambda tx: None)
    end_connections(administrator, "api")
    go_on.set()
    with pytest.raises(StoreUnreachable):
        half_done.result(10)
    assert also.exception(10) is None, "it is in the next group"
    assert store.read(lambda tx: futures.list_pending(tx, 0, 10)) == []


def test_an_unsupported_value_is_refused(store: Store, session_id: SessionId) -> None:
    after = store.write_soon(lambda tx: submit(tx, session_id))
    with pytest.raises(ValueRefused, match=r"cannot contain NUL \(0x00\) bytes$"):
        store.write(lambda tx: sessions.find_unfinished(tx, "ann", "zero \0"))
    with pytest.raises(ValueRefused, match="NUL"):
        store.read(lambda tx: sessions.find_unfinished(tx, "ann", "zero \0"))
    assert after.result(5).is_new


def test_error_for_an_unreachable_server_hides_the_password(tmp_path: Path) -> None:
    url = "postgresql://ann:hunter2@127.0.0.1:1/data?password=hunter2&connect_timeout=2"
    with pytest.raises(
        StoreUnreachable, match=r"postgresql://ann:\*\*\*@127.0.0.1:1/data: it cannot be reached"
    ) as unreachable:
        Store.open(tmp_path, role="api", url=url)
    assert "hunter2" not in str(unreachable.value)


def test_a_database_of_another_program_is_refused(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database(empty=True)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE songs (id INTEGER)")
    with pytest.raises(StoreError, match="belongs to another program: it has the tables songs"):
        Store.open(tmp_path, role="api", url=url)
