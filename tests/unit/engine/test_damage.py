"""A bit that the disk changed inside a stored value: its future fails by name, and nothing wrong is served."""

import os
from typing import Any

import pytest
from sqlmodel import Session, col, select

from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, RequestId
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import checkpoints, futures
from skyrl_tx.store.tables import CheckpointRow, RequestRow
from skyrl_tx.testing.engine_house import SPEC, House, forward_backward, optim_step, sample
from skyrl_tx.testing.live_engine import live_engine
from skyrl_tx.testing.waiting import until


def flip(house: House, request_id: RequestId, column: str) -> None:
    """Change one bit, as a disk would: nothing else in the row knows."""

    def work(tx: Session) -> None:
        row = tx.exec(select(RequestRow).where(col(RequestRow.request_id) == request_id)).one()
        value = bytearray(getattr(row, column))
        value[len(value) // 2] ^= 4
        setattr(row, column, bytes(value))

    house.api.write(work)


@pytest.mark.parametrize("make", [forward_backward, sample])
def test_a_damaged_request_fails_and_others_run(house: House, make: Any) -> None:
    model_id, _ = house.create()
    where = {"model_id": model_id, "seq_id": 1} if make is forward_backward else {}
    damaged, intact = house.submit(make(), **where), house.submit(sample())
    flip(house, damaged, "body")
    house.run(damaged, intact)
    failure = house.result(damaged)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message == "the stored request is damaged: its checksum is not that of what was written"
    assert house.result(intact).sequences


def test_the_step_after_a_damaged_pass_fails_too(house: House) -> None:
    model_id, _ = house.create()
    damaged = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = house.submit(optim_step(), model_id=model_id, seq_id=2)
    flip(house, damaged, "body")
    house.run(damaged, step)
    assert "is damaged" in house.result(step).message


def test_a_damaged_effect_is_not_repeated(tmp_path) -> None:
    house = House(tmp_path, snapshot_effects=10**6)
    model_id, _ = house.create()
    first = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.run(first)
    (effect, *_) = house.api.read(lambda tx: futures.effects_since(tx, model_id, 0))[1:]
    assert effect.request_id == first
    house.api.write(lambda tx: tx.connection().exec_driver_sql("DELETE FROM snapshots"))
    flip(house, first, "body")
    failure = house.answer(optim_step(), model_id=model_id, seq_id=2)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message.startswith(f"cannot repeat request {first}: the stored request is damaged")
    house.close()


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "answered"])
def test_a_damaged_load_stops_no_housekeeping(tmp_path, is_open: bool) -> None:
    house = House(tmp_path, snapshot_effects=10**6, housekeeping_interval_s=0.01)
    model_id, _ = house.create()
    saved = house.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    (artifact_id,) = house.api.read(lambda tx: tx.exec(select(CheckpointRow.artifact_id)).all())
    load = LoadWeights(path=saved.path, artifact_id=artifact_id, spec=SPEC, optimizer=True, create=False)
    loaded = house.submit(load, model_id=model_id, seq_id=2)
    if not is_open:
        house.run(loaded)
        house.api.write(lambda tx: tx.connection().exec_driver_sql("DELETE FROM snapshots"))
    house.api.write(lambda tx: checkpoints.delete(tx, CheckpointPath.parse(saved.path)))
    assert artifact_id in (house.api.read(checkpoints.referenced_artifacts) or ())
    flip(house, loaded, "body")
    assert house.api.read(checkpoints.referenced_artifacts) == (None if is_open else set())
    os.utime(house.artifacts.open(artifact_id), (0, 0))
    with live_engine(house.settings, house.backend()):
        until(lambda: not house.artifacts.has(artifact_id))
    if is_open:
        failure = house.result(loaded)
        assert failure.category == ErrorCategory.SERVER and "the stored request is damaged" in failure.message
    house.close()


def test_a_damaged_result_is_not_served(house: House) -> None:
    request_id = house.submit(sample())
    house.run(request_id)
    flip(house, request_id, "result")
    state = house.api.read(lambda tx: futures.result(tx, request_id, "local"))
    assert (state.status, state.result) == ("damaged", None)
