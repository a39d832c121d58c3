import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_tx.store import engine_state, sqlite
from skyrl_tx.store.database import Store
from skyrl_tx.store.doorbell import Doorbell
from skyrl_tx.testing.waiting import until

ECHO = """
import sys
from pathlib import Path
from skyrl_tx.store import engine_state, sqlite
from skyrl_tx.store.database import Store

sqlite._FALLBACK_S = 60.0

def say(detail):
    store.write(lambda tx: engine_state.publish(
        tx, boot_id="e", pid=1, status="ready", capabilities={}, base_models=[], detail=detail, now=1.0))

store = Store.open(Path(sys.argv[1]), role="engine", url=sys.argv[2] or None)
say("started")
heard = ""
while heard != "stop":
    store.wait(60)
    said = store.read(engine_state.get).detail
    if said.startswith("ask") and said != heard:
        heard = said
        say("answer" + said)
    if said == "stop":
        heard = said
store.close()
"""


def ask(store: Store, text: str) -> None:
    store.write(
        lambda tx: engine_state.publish(
            tx, boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], detail=text, now=1.0
        )
    )


def await_text(store: Store, text: str) -> None:
    while (row := store.read(engine_state.get)) is None or row.detail != text:
        assert store.wait(60), f"never heard {text!r}"


@pytest.mark.parametrize("depth", [1, 4], ids=["short path", "path beyond a socket address"])
def test_two_processes_answer_each_other_at_once(
    tmp_path: Path, open_store, database_url: str | None, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_FALLBACK_S", 60.0)  # who is not rung hears nothing
    data_dir = tmp_path.joinpath(*["long-name-" * 4] * (depth - 1), "data")
    assert (len(str(data_dir)) > 108) == (depth > 1)
    store = open_store("api", data_dir)
    with subprocess.Popen([sys.executable, "-c", ECHO, data_dir, database_url or ""]) as engine:
        await_text(store, "started")
        durations: list[float] = []
        for number in range(30):
            begun = time.perf_counter()
            ask(store, f"ask{number}")
            await_text(store, f"answerask{number}")
            durations.append(time.perf_counter() - begun)
        ask(store, "stop")
        assert engine.wait(20) == 0
    assert min(durations) < 0.1, (
        "rung, not found by chance; how fast, the benchmarks say: a busy machine adds what it likes"
    )


def test_waiting_costs_no_processor_time(store: Store) -> None:
    begun = time.process_time()
    assert not store.wait(0.5)
    assert time.process_time() - begun < 0.1


def test_wake_ends_ones_own_wait(store: Store) -> None:
    store.wait(0)
    threading.Timer(0.05, store.wake).start()
    begun = time.monotonic()
    assert store.wait(20)
    assert time.monotonic() - begun < 10


def test_a_ring_before_the_wait_is_not_lost_and_many_are_one(store: Store) -> None:
    for _ in range(1000):
        store.wake()
    assert store.wait(5)
    assert not store.wait(0)


@pytest.mark.parametrize("database_url", [None])  # elsewhere the commit itself rings
def test_a_lost_ring_costs_time_only(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    api, engine = open_store("api"), open_store("engine")
    api.wait(0)
    monkeypatch.setattr(Doorbell, "ring_peer", lambda self: None)
    ask(engine, "unheard")
    assert api.wait(5)


def test_no_peer_is_no_error(tmp_path: Path) -> None:
    bell = Doorbell(tmp_path, own="api", peer="engine")
    bell.ring_peer()
    assert not bell.wait(0)
    bell.close()
    assert list(tmp_path.iterdir()) == []


def test_a_bell_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "api.bell").touch()
    bell = Doorbell(tmp_path, own="api", peer="engine")
    bell.ring_own()
    assert bell.wait(1)
    bell.close()


def test_a_living_peer_is_told_from_a_dead_or_absent_one(tmp_path: Path, open_store) -> None:
    api = open_store("api")
    assert not api.peer_lives()
    engine = open_store("engine")
    assert api.peer_lives() and engine.peer_lives()
    engine.close()
    until(lambda: not api.peer_lives())  # a database server may take a moment to let go of a lock


@pytest.mark.parametrize("database_url", [None])
def test_a_bell_left_behind_is_no_peer(tmp_path: Path, open_store) -> None:
    api = open_store("api")
    (tmp_path / "engine.bell").touch()
    assert not api.peer_lives()
