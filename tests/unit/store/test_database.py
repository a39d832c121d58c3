"""The store: transactions, roles, group commits, and error messages for databases that cannot be used."""

import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.process import signals
from skyrl_tx.store import StoreError, StoreInUse, ValueRefused, sessions, sqlite
from skyrl_tx.store.database import Store


def add_session(tx: Session, owner: str = "ann") -> str:
    return sessions.create(tx, owner=owner, now=1.0)


def list_owned(store: Store, owner: str) -> list[str]:
    return store.read(lambda tx: sessions.list_ids(tx, owner, 1000, 0))


def test_data_directory_is_private(tmp_path: Path, open_store) -> None:
    open_store(data_dir=tmp_path / "deep" / "er")
    assert stat.S_IMODE((tmp_path / "deep" / "er").stat().st_mode) == 0o700


def test_writes_survive_reopening(open_store) -> None:
    first = open_store()
    session_id = first.write(add_session)
    first.close()
    assert list_owned(open_store(), "ann") == [session_id]


@pytest.mark.parametrize("database_url", [None])  # test_postgresql.py has the counterpart for PostgreSQL
def test_only_one_process_may_have_a_role(tmp_path: Path, open_store) -> None:
    api = open_store("api")
    open_store("engine")
    with pytest.raises(StoreInUse, match=rf"{tmp_path}.*api runs as process \d+"):
        open_store("api")
    api.close()
    open_store("api")


@pytest.mark.parametrize("database_url", [None])
def test_commits_are_durable_and_foreign_keys_enforced(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "create_engine", sqlalchemy.create_engine)  # not the quick one of other tests
    store = open_store()

    pragmas = ("journal_mode", "synchronous", "foreign_keys")
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    assert {
        p: store.write(lambda tx, p=p: tx.connection().exec_driver_sql(f"PRAGMA {p}").scalar()) for p in pragmas
    } == wanted

    with pytest.raises(IntegrityError):
        store.write(
            lambda tx: tx.connection().execute(
                text(
                    "INSERT INTO models (model_id, session_id, base_model, spec, status, created_at, last_request_at,"
                    " effect_order, num_steps) VALUES ('m', 'unknown', 'b', x'', 'ready', 1, 1, 0, 0)"
                )
            )
        )


def test_readers_cannot_write(store: Store) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        store.read(add_session)
    assert list_owned(store, "ann") == []


def test_work_that_fails_is_rolled_back_without_the_rest_of_its_group_commit(store: Store) -> None:
    # The writer thread waits in this write, and then commits the three writes below together
    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(60))

    def fail(tx: Session) -> None:
        add_session(tx, "failed")
        raise RuntimeError("no")

    before, failing, after = [
        store.write_soon(work)
        for work in (lambda tx: add_session(tx, "before"), fail, lambda tx: add_session(tx, "after"))
    ]
    gate.set()
    with pytest.raises(RuntimeError, match=r"^no$"):
        failing.result(300)
    expected = [before.result(300)], [], [after.result(60)]
    assert (list_owned(store, "before"), list_owned(store, "failed"), list_owned(store, "after")) == expected


def test_a_write_returns_when_readers_see_it(store: Store) -> None:
    for number in range(20):
        assert list_owned(store, f"owner-{number}") == []
        session_id = store.write(lambda tx, number=number: add_session(tx, f"owner-{number}"))
        assert list_owned(store, f"owner-{number}") == [session_id]


def test_many_threads_write_and_read(store: Store) -> None:
    def write_some(number: int) -> None:
        for _ in range(20):
            store.write(lambda tx: add_session(tx, f"thread-{number}"))

    threads = [threading.Thread(target=write_some, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(list_owned(store, f"thread-{number}")) for number in range(8)] == [20] * 8


def test_two_roles_write_concurrently(open_store) -> None:
    roles = open_store("api"), open_store("engine")
    queued = [role.write_soon(add_session) for _ in range(100) for role in roles]
    session_ids = {write.result(300) for write in queued}
    assert len(session_ids) == 200
    assert all(set(list_owned(role, "ann")) == session_ids for role in roles)


def test_a_read_sees_one_consistent_state(store: Store) -> None:
    def read_before_and_after_a_write(tx: Session) -> tuple[int, int]:
        before = len(sessions.list_ids(tx, "ann", 10, 0))
        store.write(add_session)
        return before, len(sessions.list_ids(tx, "ann", 10, 0))

    assert store.read(read_before_and_after_a_write) == (0, 0)
    assert len(list_owned(store, "ann")) == 1


def test_a_nested_write_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="called within a write"):
        store.write(lambda tx: store.write(add_session))


def test_close_finishes_queued_writes(open_store) -> None:
    store = open_store()
    queued = [store.write_soon(add_session) for _ in range(50)]
    store.close()
    store.close()
    assert not wait_for(queued, 0).not_done, "close has waited for all writes"
    with pytest.raises(StoreError, match="closed"):
        store.write(add_session)
    with pytest.raises(StoreError, match="closed"):
        store.read(lambda tx: None)
    assert sorted(list_owned(open_store(), "ann")) == sorted(future.result() for future in queued)


def test_a_cancelled_write_is_not_executed(store: Store) -> None:
    gate = threading.Event()
    store.write_soon(lambda tx: gate.wait(5))
    unwanted = store.write_soon(add_session)
    assert unwanted.cancel()
    gate.set()
    store.write(lambda tx: None)
    assert list_owned(store, "ann") == []


def test_close_wakes_a_thread_that_waits_for_commits(store: Store) -> None:
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(store.wait(30)))
    waiting.start()
    time.sleep(0.02)
    store.close()
    waiting.join(5)
    assert results == [False]


def test_error_names_an_unsupported_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"mysql://ann:\*\*\*@host/db.*only sqlite:///path and postgresql:"):
        Store.open(tmp_path, role="api", url="mysql://ann:secret@host/db?password=secret")
    with pytest.raises(StoreError, match="not a URL") as refused:
        Store.open(tmp_path, role="api", url="secret")
    assert "secret" not in str(refused.value)
    with pytest.raises(StoreError, match="the password contains '@', which a URL must spell as %40") as refused:
        Store.open(tmp_path, role="api", url="postgresql://ann:top@secret@host/db")
    assert "secret" not in str(refused.value)


def test_a_database_file_outside_the_data_directory(tmp_path: Path) -> None:
    elsewhere = tmp_path / "a file, with odd % and ? signs.db"
    store = Store.open(
        tmp_path / "data", role="api", url=f"sqlite:///{str(elsewhere).replace('%', '%25').replace('?', '%3F')}"
    )
    store.close()
    assert elsewhere.exists()


def test_error_names_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "skyrl_tx.db").write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match=r"skyrl_tx\.db: it is damaged"):
        Store.open(tmp_path, role="api")


def test_error_names_a_data_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"{tmp_path}/file"):
        Store.open(tmp_path / "file", role="api")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_writes_fail_after_the_writer_thread_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_failures", signals._Failures())
    store = Store.open(tmp_path, role="api")

    def fail(_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(store._writer, "_write", fail)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"the thread that writes to the database ended: MemoryError"):
            store.write(lambda tx: None)
    assert "'store-writer' ended" in str(signals.get_failure())
    store.close()


def test_a_fallback_runs_if_the_database_refuses_a_value(store: Store) -> None:
    """A lone surrogate is no valid Unicode text, so the database refuses it."""

    def create(owner: str) -> Callable[[Session], str]:
        return lambda tx: sessions.create(tx, owner=owner, now=1.0)

    refused = store.write_soon(create("\ud800"))
    with_fallback, later = store.write_soon(create("\ud800"), create("plain")), store.write_soon(create("ann"))
    with pytest.raises(ValueRefused, match="surrogates"):
        refused.result()
    plain, ann = with_fallback.result(), later.result()
    assert list_owned(store, "plain") == [plain] and list_owned(store, "ann") == [ann]
    with pytest.raises(ValueRefused):
        store.read(lambda tx: sessions.find(tx, SessionId("\ud800")))
