"""What PostgreSQL does in its own way; all else in this room runs on it as it does on SQLite."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, SQLModel

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import futures, schema, sessions
from skyrl_tx.store.database import Store, StoreError, StoreInUse
from skyrl_tx.store.errors import StoreUnreachable, ValueRefused
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.testing.postgresql_server import PostgresqlServer

HOLD_THE_ENGINES_ROLE = """
import sys, time
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
    """As a server that restarts does, or a network that breaks."""
    ended = administrator.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE %s",
        (f"skyrl_tx {role}%",),
    )
    return ended.rowcount


def submit(tx: Session, session_id: SessionId, key: str = "") -> futures.Submitted:
    new = NewRequest(key=key, kind="sample", owner="ann", session_id=session_id, body=b"b")
    return futures.submit(tx, new, 1.0)


def test_migrations_make_the_tables_that_the_code_expects(postgresql: PostgresqlServer) -> None:
    engine = create_engine(postgresql.new_database(empty=True).replace("postgresql:", "postgresql+psycopg:"))
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []
        partial = connection.execute(text("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%WHERE%'"))
        assert {"ix_requests_open", "ix_requests_loads", "ix_requests_prunable"} <= set(partial.scalars())
    engine.dispose()


def test_there_is_one_engine_whatever_its_data_directory(tmp_path: Path, open_store) -> None:
    engine = open_store("engine", tmp_path / "one")
    begun = time.monotonic()
    with pytest.raises(StoreInUse, match=r"in use by skyrl_tx engine, process \d+ on "):
        open_store("engine", tmp_path / "two", busy_timeout_s=0.2)
    with pytest.raises(StoreInUse, match=r"data directory .*/one is in use: its engine runs as process \d+"):
        open_store("engine", tmp_path / "one")
    assert time.monotonic() - begun < 3
    engine.close()
    open_store("engine", tmp_path / "two")


def test_a_killed_engine_leaves_its_role_to_the_next(tmp_path: Path, open_store, database_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_ENGINES_ROLE, tmp_path, database_url], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == "open\n"
        engine.kill()
    open_store("engine")


def test_any_number_may_be_the_api_and_the_engine_wakes_them_all(open_store) -> None:
    apis, engine = [open_store("api"), open_store("api")], open_store("engine")
    assert engine.peer_lives()
    for api in apis:
        assert api.peer_lives()
        api.wait(0)
    engine.write(lambda tx: None)
    assert [api.wait(5) for api in apis] == [True, True]
    apis[0].close()
    assert engine.peer_lives()
    apis[1].close()
    assert not engine.peer_lives()


def test_the_same_request_sent_to_two_apis_at_once_is_one(open_store, session_id: SessionId) -> None:
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


def test_positions_are_committed_in_their_order_so_that_a_reader_skips_none(open_store, session_id: SessionId) -> None:
    apis, engine = [open_store("api"), open_store("api")], open_store("engine")
    drawn, go_on = threading.Event(), threading.Event()

    def slowly(tx: Session) -> futures.Submitted:
        submitted = submit(tx, session_id)
        drawn.set()
        go_on.wait(10)
        return submitted

    first = apis[0].write_soon(slowly)
    assert drawn.wait(10)
    second = apis[1].write_soon(lambda tx: submit(tx, session_id))
    with pytest.raises(TimeoutError):
        second.result(0.2)  # its turn comes when the first has committed: it must not be seen before
    assert engine.read(lambda tx: futures.pending(tx, 0, 10)) == []
    go_on.set()
    assert first.result(10).position < second.result(10).position

    seen: list[int] = []
    sent = [api.write_soon(lambda tx: submit(tx, session_id)) for _ in range(100) for api in apis]
    while len(seen) < 202:
        last = seen[-1] if seen else 0
        seen += [found.position for found in engine.read(lambda tx, last=last: futures.pending(tx, last, 7))]
    assert sorted(future.result(10).position for future in sent) == seen[2:]


def test_a_writer_that_is_kept_waiting_too_long_says_so(open_store) -> None:
    first, second = open_store("api"), open_store("api", busy_timeout_s=0.2)
    go_on, begun = threading.Event(), threading.Event()
    slow = first.write_soon(lambda tx: begun.set() or go_on.wait(10))
    assert begun.wait(5)
    with pytest.raises(StoreError, match="another process keeps it locked"):
        second.write(lambda tx: None)
    go_on.set()
    slow.result(5)
    second.write(lambda tx: None)


def test_every_commit_is_durable_and_foreign_keys_hold(
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
        store.write(lambda tx: submit(tx, SessionId("nobody's")))


def test_a_lost_connection_is_an_error_once_and_made_anew(store: Store, administrator: psycopg.Connection) -> None:
    store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0))
    assert end_connections(administrator, "") >= 3
    assert store.read(lambda tx: sessions.list_ids(tx, "ann", 10, 0)) == [], "a read is tried again by itself"
    with pytest.raises(StoreUnreachable, match="it cannot be reached now"):
        store.write(lambda tx: None)
    store.write(lambda tx: None)


def test_an_api_that_lost_its_connection_is_heard_and_hears_again(open_store, administrator) -> None:
    api, engine = open_store("api"), open_store("engine")
    api.wait(0)
    end_connections(administrator, "api")
    assert not engine.peer_lives()
    assert api.wait(5), "what was missed meanwhile counts as a ring"
    end = time.monotonic() + 60
    while not engine.peer_lives() and time.monotonic() < end:
        api.wait(0.1)
    assert engine.peer_lives()
    api.wait(0)
    engine.write(lambda tx: None)
    assert api.wait(5)


def test_an_engine_that_lost_its_connection_never_writes_again(open_store, administrator) -> None:
    engine = open_store("engine")
    end_connections(administrator, "engine")
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            engine.write(lambda tx: None)
    engine.close()
    open_store("engine").write(lambda tx: None)


def test_work_under_way_when_the_connection_breaks_is_not_kept(
    store: Store, session_id: SessionId, administrator: psycopg.Connection
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(tx: Session) -> None:
        submit(tx, session_id)
        begun.set()
        go_on.wait(10)
        submit(tx, session_id)

    half_done = store.write_soon(work)
    assert begun.wait(5)
    also = store.write_soon(lambda tx: None)
    end_connections(administrator, "api")
    go_on.set()
    with pytest.raises(StoreUnreachable):
        half_done.result(10)
    assert also.exception(10) is None, "it came in a group of its own"
    assert store.read(lambda tx: futures.pending(tx, 0, 10)) == []


def test_a_value_that_postgresql_cannot_hold_is_the_callers_mistake(store: Store, session_id: SessionId) -> None:
    after = store.write_soon(lambda tx: submit(tx, session_id))
    with pytest.raises(ValueRefused, match=r"cannot contain NUL \(0x00\) bytes$"):
        store.write(lambda tx: sessions.unfinished(tx, "ann", "zero \0"))
    with pytest.raises(ValueRefused, match="NUL"):
        store.read(lambda tx: sessions.unfinished(tx, "ann", "zero \0"))
    assert after.result(5).is_new


def test_a_server_that_is_away_is_told_from_one_that_refuses_and_passwords_are_not_told(tmp_path: Path) -> None:
    url = "postgresql://ann:hunter2@127.0.0.1:1/data?password=hunter2&connect_timeout=2"
    with pytest.raises(
        StoreUnreachable, match=r"postgresql://ann:\*\*\*@127.0.0.1:1/data: it cannot be reached"
    ) as away:
        Store.open(tmp_path, role="api", url=url)
    assert "hunter2" not in str(away.value)


def test_a_database_of_another_program_is_left_alone(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database(empty=True)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE songs (id INTEGER)")
    with pytest.raises(StoreError, match="belongs to another program: it has the tables songs"):
        Store.open(tmp_path, role="api", url=url)
