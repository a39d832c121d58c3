"""The engine waits while the database is not writable, and no request fails."""

import re
import shutil
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract import requests, results
from skyrl_tx.contract.errors import CapacityError, ErrorCategory
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.engine.request_log import DeliveryAttempts
from skyrl_tx.server.engine_status import EngineHealth
from skyrl_tx.store import StoreBlocked, checkpoints, futures
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample
from tests.support.polling import until


@pytest.fixture
def is_full():
    """While this event is set, databases cannot grow on new connections, so large writes fail."""
    full = threading.Event()

    def limit_size(connection, _record):
        if full.is_set():
            connection.execute("PRAGMA max_page_count = 1")

    event.listen(Engine, "connect", limit_size)
    yield full
    event.remove(Engine, "connect", limit_size)


def test_commit_waits_until_the_disk_has_space(tmp_path, caplog, is_full):
    harness = EngineHarness(tmp_path)
    model_id, created = harness.create()
    harness.run(created)
    data = tuple(datum(seed, 1000) for seed in range(5))
    large = harness.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    health = EngineHealth(harness.api, silence_s=60.0)
    is_full.set()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(harness.run, large, step)
        until(lambda: "no space left" in (health.read_report().problem or ""))
        assert str(health.read_report().problem).startswith("the engine waits: database ")
        assert harness.attempts(large) == 1
        assert "retrying until the write succeeds" in caplog.text
        is_full.clear()
        running.result(300)

    assert harness.result(large).metrics["num_datums:sum"] == 5
    assert harness.result(step).metrics["unclipped_grad_l2:mean"] > 0
    assert harness.attempts(large) == harness.attempts(step) == 0

    harness.close()


def test_weights_leave_the_last_bytes_of_the_disk_to_the_database(tmp_path):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=1)
    model_id, created = harness.create()
    enough, harness.artifacts = harness.artifacts, LocalArtifacts(tmp_path / "artifacts", min_free_bytes=2**62)
    refused = harness.submit(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    trained = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
    harness.run(created, refused, trained)
    failure = harness.result(refused)
    assert failure.category == ErrorCategory.SERVER
    assert re.match(r"the server's disk has [\d,]+ MiB left, but 4,398,046,511,104 MiB must stay free", failure.message)
    assert harness.result(trained).metrics["num_datums:sum"] == 2
    assert list(tmp_path.glob("artifacts/art-*")) == []

    harness.artifacts = enough
    later = harness.submit(forward_backward(), model_id=model_id, seq_id=3)
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=4)
    assert saved.path is not None and harness.result(later).metrics == harness.result(trained).metrics

    harness.close()


def test_weights_that_would_take_the_last_bytes_of_the_disk_are_removed(tmp_path, monkeypatch):
    free = [100, 9]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    store = LocalArtifacts(tmp_path, min_free_bytes=10)
    with pytest.raises(CapacityError):
        store.create(lambda folder: (folder / "a.json").write_text("{}") and None)
    assert free == [] and list(tmp_path.iterdir()) == []


def test_stop_ends_the_wait_for_disk_space_and_counts_no_attempt(tmp_path, is_full, monkeypatch):
    undo_all_on_stop = DeliveryAttempts.undo_all_on_stop

    def undo_late(attempts, stop):
        stop.wait()
        time.sleep(0.3)  # wait until a write of the engine has failed
        undo_all_on_stop(attempts, stop)

    monkeypatch.setattr(DeliveryAttempts, "undo_all_on_stop", undo_late)
    harness = EngineHarness(tmp_path)
    model_id, created = harness.create()
    harness.run(created)
    data = tuple(datum(seed, 1000) for seed in range(5))
    large = harness.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    watched = harness.submit(sample(max_tokens=4000, eos_stops=False))
    is_full.set()
    health = EngineHealth(harness.api, silence_s=60.0)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(harness.run, watched)
        until(lambda: "no space left" in (health.read_report().problem or ""))
        harness.api.write(lambda tx: futures.complete(tx, watched, b"", failed=True, effect_order=None, now=0.0))
        with pytest.raises(StoreBlocked, match="no space left on its disk"):
            running.result(300)

    assert harness.attempts(large) == 0

    is_full.clear()
    harness.run(large)
    assert harness.result(large).metrics["num_datums:sum"] == 5

    harness.close()


def test_save_that_waited_for_disk_space_at_its_commit_has_its_checkpoint(tmp_path, monkeypatch):
    harness = EngineHarness(tmp_path)
    model_id, created = harness.create()
    harness.run(created)
    failures = [sqlite3.OperationalError("database or disk is full")]
    failures[0].sqlite_errorcode = sqlite3.SQLITE_FULL
    put = checkpoints.put

    def put_then_fill(tx, row, overwrite):
        put(tx, row, overwrite)
        tx.flush()
        if failures:
            raise OperationalError("COMMIT", {}, failures.pop())

    monkeypatch.setattr(checkpoints, "put", put_then_fill)
    save = requests.SaveWeights(kind="weights", name="a")
    saved = harness.answer(save, model_id=model_id, seq_id=1)
    assert not failures and isinstance(saved, results.SaveWeightsOutput)
    path = CheckpointPath(model_id, CheckpointKind.TRAINING, "a")
    assert harness.api.read(lambda tx: checkpoints.get(tx, path, time.time())) is not None
    harness.close()
