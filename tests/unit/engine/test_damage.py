"""A bit flip in a stored value fails the request's future, and the damaged value is never served."""

import os
from typing import Any

import pytest
from sqlmodel import Session, col, select

from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, RequestId
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import checkpoints, futures
from skyrl_tx.store.tables import CheckpointRow, RequestRow
from tests.support.engine_harness import SPEC, EngineHarness, forward_backward, optim_step, sample
from tests.support.live_engine import live_engine
from tests.support.polling import until


def flip(harness: EngineHarness, request_id: RequestId, column: str) -> None:
    """Flip one bit of a stored value and leave its checksum unchanged."""

    def work(tx: Session) -> None:
        row = tx.exec(select(RequestRow).where(col(RequestRow.request_id) == request_id)).one()
        value = bytearray(getattr(row, column))
        value[len(value) // 2] ^= 4
        setattr(row, column, bytes(value))

    harness.api.write(work)


@pytest.mark.parametrize("make", [forward_backward, sample])
def test_damaged_request_fails_alone(harness: EngineHarness, make: Any) -> None:
    model_id, _ = harness.create()
    where = {"model_id": model_id, "seq_id": 1} if make is forward_backward else {}
    damaged, intact = harness.submit(make(), **where), harness.submit(sample())
    flip(harness, damaged, "body")
    harness.run(damaged, intact)
    failure = harness.result(damaged)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message == "the stored request is damaged: its checksum does not match"
    assert harness.result(intact).sequences


def test_damaged_pass_makes_the_gradient_incomplete(harness: EngineHarness) -> None:
    model_id, _ = harness.create()
    damaged = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    flip(harness, damaged, "body")
    harness.run(damaged, step)
    assert "is damaged" in harness.result(step).message


def test_damaged_log_record_is_not_replayed(tmp_path) -> None:
    harness = EngineHarness(tmp_path, snapshot_interval_requests=10**6)
    model_id, _ = harness.create()
    first = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.run(first)
    (effect, *_) = harness.api.read(lambda tx: futures.read_log(tx, model_id, 0))[1:]
    assert effect.request_id == first
    harness.api.write(lambda tx: tx.connection().exec_driver_sql("DELETE FROM snapshots"))
    flip(harness, first, "body")
    failure = harness.answer(optim_step(), model_id=model_id, seq_id=2)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message.startswith(f"cannot replay request {first}: the stored request is damaged")
    harness.close()


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "answered"])
def test_housekeeping_continues_with_a_damaged_load(tmp_path, is_open: bool) -> None:
    harness = EngineHarness(tmp_path, snapshot_interval_requests=10**6, housekeeping_interval_s=0.01)
    model_id, _ = harness.create()
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    (artifact_id,) = harness.api.read(lambda tx: tx.exec(select(CheckpointRow.artifact_id)).all())
    load = LoadWeights(path=saved.path, artifact_id=artifact_id, spec=SPEC, optimizer=True, create=False)
    loaded = harness.submit(load, model_id=model_id, seq_id=2)
    if not is_open:
        harness.run(loaded)
        harness.api.write(lambda tx: tx.connection().exec_driver_sql("DELETE FROM snapshots"))
    harness.api.write(lambda tx: checkpoints.delete(tx, CheckpointPath.parse(saved.path)))
    assert artifact_id in (harness.api.read(checkpoints.find_referenced_artifacts) or ())

    flip(harness, loaded, "body")
    assert harness.api.read(checkpoints.find_referenced_artifacts) == (None if is_open else set())

    os.utime(harness.artifacts.open(artifact_id).path, (0, 0))
    with live_engine(harness.settings, harness.backend()):
        until(lambda: not harness.artifacts.has(artifact_id))
    if is_open:
        failure = harness.result(loaded)
        assert failure.category == ErrorCategory.SERVER and "the stored request is damaged" in failure.message
    harness.close()


def test_damaged_result_is_not_served(harness: EngineHarness) -> None:
    request_id = harness.submit(sample())
    harness.run(request_id)
    flip(harness, request_id, "result")
    state = harness.api.read(lambda tx: futures.get_state(tx, request_id, "local"))
    assert (state.status, state.result) == ("damaged", None)
