"""Notification between processes."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_tx.store import engine_state, postgresql, sqlite
from skyrl_tx.store.database import Store
from skyrl_tx.store.sqlite import SqliteNotifier
from skyrl_tx.store.tables import EngineStateRow
from tests.support.polling import until

ECHO = """
import sys
from pathlib import Path
from skyrl_tx.store import engine_state, sqlite
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow

sqlite._POLL_S = 60.0

def publish(detail):
    store.write(lambda tx: engine_state.publish(tx, EngineStateRow(
        boot_id="e", pid=1, status="ready", capabilities={}, base_models=[], detail=detail, updated_at=1.0)))

store = Store.open(Path(sys.argv[1]), role="engine", url=sys.argv[2] or None)
publish("started")
last = ""
while last != "stop":
    store.wait(60)
    text = store.read(engine_state.get).detail
    if text.startswith("ask") and text != last:
        last = text
        publish("answer" + text)
    if text == "stop":
        last = text
store.close()
"""


def ask(store: Store, text: str) -> None:
    row = EngineStateRow(
        boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], detail=text, updated_at=1.0
    )
    store.write(lambda tx: engine_state.publish(tx, row))


def await_text(store: Store, text: str) -> None:
    while (row := store.read(engine_state.get)) is None or row.detail != text:
        assert store.wait(60), f"{text!r} never arrived"


@pytest.mark.parametrize("depth", [1, 4], ids=["short path", "path beyond a socket address"])
def test_two_processes_notify_each_other(
    tmp_path: Path, open_store, database_url: str | None, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_POLL_S", 60.0)  # without notifications, no commit would be noticed in time
    data_dir = tmp_path.joinpath(*["long-name-" * 4] * (depth - 1), "data")
    assert (len(str(data_dir)) > 108) == (depth > 1)

    store = open_store("api", data_dir)

    with subprocess.Popen([sys.executable, "-c", ECHO, data_dir, database_url or ""]) as engine:
        await_text(store, "started")
        durations: list[float] = []
        for number in range(30):
            started = time.perf_counter()
            ask(store, f"ask{number}")
            await_text(store, f"answerask{number}")
            durations.append(time.perf_counter() - started)
        ask(store, "stop")
        assert engine.wait(20) == 0

    assert min(durations) < 0.1, (
        "notified rather than polled; benchmarks measure the latency, because a busy machine adds to it"
    )


def test_wait_uses_no_processor_time(store: Store) -> None:
    started = time.process_time()
    assert not store.wait(0.5)
    assert time.process_time() - started < 0.1


def test_wake_ends_a_wait(store: Store) -> None:
    store.wait(0)
    threading.Timer(0.05, store.wake).start()
    started = time.monotonic()
    assert store.wait(20)
    assert time.monotonic() - started < 10


def test_notifications_before_a_wait_count_as_one(store: Store) -> None:
    for _ in range(1000):
        store.wake()
    assert store.wait(5)
    assert not store.wait(0)


@pytest.mark.parametrize("database_url", [None])  # on PostgreSQL, the commit sends the notification
def test_a_lost_notification_delays_only(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    api, engine = open_store("api"), open_store("engine")
    api.wait(0)
    monkeypatch.setattr(SqliteNotifier, "notify_peer", lambda self: None)
    ask(engine, "not notified")
    assert api.wait(5)


def test_notify_without_a_peer(tmp_path: Path) -> None:
    notifier = SqliteNotifier(tmp_path / "skyrl_tx.db", tmp_path, "api")
    notifier.notify_peer()
    assert not notifier.wait(0)
    notifier.close()
    assert list(tmp_path.glob("*.sock*")) == []


def test_a_stopped_api_is_not_running(tmp_path: Path, open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    api, engine = open_store("api"), open_store("engine")
    assert engine.is_peer_running()
    for module in sqlite, postgresql:
        monkeypatch.setattr(module, "SILENT_S", 0.3)
    monkeypatch.setattr(sqlite, "_ACTIVITY_PERIOD_S", 0.05)
    until(lambda: not engine.is_peer_running())

    def act() -> bool:
        api.wait(0.0)
        api.read(engine_state.list_engines)
        return engine.is_peer_running()

    until(act)
    assert api.is_peer_running(), "an engine may be silent"


def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "api.sock").touch()
    notifier = SqliteNotifier(tmp_path / "skyrl_tx.db", tmp_path, "api")
    notifier.wake()
    assert notifier.wait(1)
    notifier.close()


def test_is_peer_running(tmp_path: Path, open_store) -> None:
    api = open_store("api")
    assert not api.is_peer_running()
    engine = open_store("engine")
    assert api.is_peer_running() and engine.is_peer_running()
    engine.close()
    until(lambda: not api.is_peer_running())  # the database server may release the lock with a delay


@pytest.mark.parametrize("database_url", [None])
def test_a_socket_left_by_a_killed_process_is_no_peer(tmp_path: Path, open_store) -> None:
    api = open_store("api")
    (tmp_path / "engine.sock").touch()
    assert not api.is_peer_running()
