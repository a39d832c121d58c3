"""The time of a run as read from stored rows, and in the report of `skyrl-tx runs show`."""

from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete
from sqlmodel import Session, col

from skyrl_tx.apps.history import kept_samples, points
from skyrl_tx.apps.history.breakdown import read_breakdown
from skyrl_tx.apps.history.hints import describe_last_run
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample
from skyrl_tx.apps.history.points import Point, PointKind, SampleTotals
from skyrl_tx.apps.history.run_report import format_report, read_report
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.store import engine_state, sessions
from skyrl_tx.store.database import Store, execute
from skyrl_tx.store.tables import ModelRow, RequestRow, SamplingSessionRow

RUN, OTHER_RUN = ModelId("session-1:train:0"), ModelId("session-1:train:1")
NUM_STEPS = 5
PERIOD_S = 20.0
"""An iteration saves for 1 s, samples for 12 s, waits 3 s for rewards, and trains for 4 s."""


def add_request(
    tx: Session, session_id: SessionId, kind: str, created_at: float, completed_at: float, number: int, **values: Any
) -> None:
    row = RequestRow(
        request_id=RequestId(f"{kind}-{number}"),
        kind=kind,
        owner="ann",
        session_id=session_id,
        body=b"",
        digest=b"",
        status="done",
        created_at=created_at,
        started_at=created_at + 0.5,
        completed_at=completed_at,
        **values,
    )
    tx.add(row)


def add_point(tx: Session, run: ModelId, kind: PointKind, position: int, step: int, began_at: float, at: float) -> None:
    point = Point(
        position=position,
        model_id=run,
        kind=kind,
        step=step,
        created_at=began_at,
        started_at=began_at,
        at=at,
        device_s=at - began_at,
        tokens=64,
        datums=4,
        values={},
    )
    points.add(tx, point)


def add_iteration(tx: Session, run: ModelId, session_id: SessionId, number: int) -> None:
    # Requests
    began = 1000.0 + PERIOD_S * number
    add_request(tx, session_id, "save_weights", began, began + 1.0, number, model_id=run)
    for index in range(4):
        name = SamplingSessionId("own" if index else "teacher")
        add_request(tx, session_id, "sample", began + 1.0, began + 13.0, 10 * number + index, sampling_session_id=name)
    foreign = SamplingSessionId("foreign")
    add_request(tx, session_id, "sample", began, began + 20.0, 10 * number + 9, sampling_session_id=foreign)

    # Points, and the server at this time
    add_point(tx, run, "train", 1000 + 10 * number, number, began + 16.0, began + 19.0)
    add_point(tx, run, "step", 1005 + 10 * number, number + 1, began + 19.0, began + PERIOD_S)
    engine_state.add_gauges(tx, int(began), {"decode_slots": 64, "decode_slots_used": 4, "compile_share": 0.0})
    engine_state.add_gauges(tx, int(began) + 10, {"training_tokens_per_s": 3.0, "padding_tokens_per_s": 1.0})


def add_samples(tx: Session, run: ModelId, number: int) -> None:
    """Add four samples of two prompts, from four requests."""
    sums = SampleTotals(step=number, samples=4, cut=0, tokens=8, scored_tokens=8, logprob_sum=-8.0)
    points.add_sampled(tx, run, "ann", sums)
    tokens, logprobs = np.array([1], np.int32), np.array([-1.0], np.float32)
    for index in range(4):
        sample = KeptSample(sequence_id=f"{number}-{index}", tokens=tokens, logprobs=logprobs, stop_reason="stop")
        group = KeptGroup(
            request_id=RequestId(f"sample-{10 * number + index}"),
            model_id=run,
            step=number,
            owner="ann",
            prompt=np.array([index // 2], np.int32),
            samples=[sample],
        )
        kept_samples.add(tx, group, 1000.0)


def add_session(tx: Session) -> SessionId:
    """Add a session with two runs and three samplers."""
    session_id = sessions.create(tx, owner="ann", now=1.0, session_id=SessionId("session-1"))
    tx.flush()
    spec = codec.encode(ModelSpec(lora=LoraSpec(rank=16, seed=1)))
    common: dict[str, Any] = {"session_id": session_id, "base_model": "tiny", "created_at": 1.0}
    for name, last_request_at in ((RUN, 3.0), (OTHER_RUN, 2.0)):
        tx.add(ModelRow(model_id=name, spec=spec, last_request_at=last_request_at, **common))

    paths = {"own": f"tinker://{RUN}/sampler_weights/a", "foreign": f"tinker://{OTHER_RUN}/sampler_weights/a"}
    for name, path in {**paths, "teacher": "tinker://session-0:train:0/sampler_weights/a"}.items():
        name = SamplingSessionId(name)
        tx.add(SamplingSessionRow(sampling_session_id=name, model_path=path, last_used_at=1.0, **common))
    tx.flush()
    return session_id


@pytest.fixture
def run(store: Store) -> ModelId:
    def fill(tx: Session) -> None:
        session_id = add_session(tx)
        for number in range(NUM_STEPS):
            add_iteration(tx, RUN, session_id, number)
            add_samples(tx, RUN, number)
        usage.add(tx, "bob", SessionId("session-2"), "b", 1050.0, [Work(kind="training", device_s=50.0)])
        usage.add(tx, "bob", SessionId("session-2"), "b", 1e6, [Work(kind="training", device_s=1e6)])

    store.write(fill)
    return RUN


def read(store: Store, run: ModelId):
    def work(tx: Session):
        model = tx.get(ModelRow, run)
        assert model is not None
        return read_breakdown(tx, model, lambda _: True)

    return store.read(work)


def test_the_time_of_a_run_is_read_from_its_rows(store: Store, run: ModelId) -> None:
    breakdown = read(store, run)
    assert [iteration.step for iteration in breakdown.iterations] == [2, 3, 4, 5], "samples of the first may be deleted"
    for iteration in breakdown.iterations:
        parts = {"sampling": 11.5, "training": 4.0, "weights": 0.5, "compilation": 0.0, "queued": 1.0, "client": 3.0}
        assert iteration.parts == pytest.approx(parts)
        assert (iteration.passes, iteration.datums, iteration.sample_requests) == (1, 4, 4)
    assert (breakdown.decode_fill, breakdown.batch_fill, breakdown.has_single_samples) == (1 / 16, 0.75, True)
    assert [(user.name, user.device_s) for user in breakdown.other_users] == [("bob", 50.0)]


def test_nothing_is_said_after_sample_requests_were_deleted(store: Store, run: ModelId) -> None:
    store.write(lambda tx: execute(tx, delete(RequestRow).where(col(RequestRow.kind) == "sample")))
    assert read(store, run).iterations == []


def test_the_report_has_the_time_and_the_advice(store: Store, run: ModelId) -> None:
    lines = list(format_report(store.read(lambda tx: read_report(tx, run))))
    assert any(line.startswith("note: 4 sample requests per step with one sample each") for line in lines)
    words = [line.split() for line in lines]
    assert ["TIME", "OF", "A", "STEP", "SHARE", "SECONDS", "CURVE"] in words
    assert ["sampling", "57%", "11.5", "▄▄▄▄"] in words
    assert ["waiting", "for", "the", "client", "15%", "3", "▄▄▄▄"] in words


def test_the_next_session_of_an_owner_gets_the_advice_once(store: Store, run: ModelId) -> None:
    def describe_in_new_session(owner: str, now: float) -> str | None:
        def work(tx: Session) -> str | None:
            session_id = sessions.create(tx, owner=owner, now=now)
            tx.flush()
            return describe_last_run(tx, owner, session_id)

        return store.write(work)

    assert describe_in_new_session("bob", 10.0) is None, "it is not his run"
    line = describe_in_new_session("ann", 10.0)
    assert line is not None and line.startswith(f"last run {run}: ") and "\n" not in line
    assert describe_in_new_session("ann", 11.0) is None
