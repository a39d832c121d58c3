"""The database size is bounded for any number of requests, and no request runs twice."""

import time
from functools import partial

import pytest
from sqlmodel import func, select

from skyrl_tx.apps.history import points
from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store import futures, models, sessions
from skyrl_tx.store.futures import NewRequest, RequestPruned
from skyrl_tx.store.tables import ModelRow, PrunedRow, RequestRow, SamplingSessionRow, SessionRow, SnapshotRow
from tests.support.engine_harness import OWNER, EngineHarness, forward_backward, optim_step, sample
from tests.support.live_engine import live_engine
from tests.support.polling import until

SAMPLER = SamplingSessionId("s:sample:0")
A_ROUND = 30
BODIES = (forward_backward(), optim_step(), sample())


def new_request(harness: EngineHarness, model_id, number: int) -> NewRequest:
    """Return the session's n-th request. Requests cycle through pass, optim_step and sample."""
    request = BODIES[number % 3]
    is_sample = isinstance(request, requests.Sample)
    where = {"sampling_session_id": SAMPLER} if is_sample else {"model_id": model_id}
    return NewRequest(
        key=f"{'sample' if is_sample else 'model'}/{number}",
        kind=codec.get_kind(request),
        owner=OWNER,
        session_id=harness.session_id,
        body=codec.encode(request),
        seq_id=number,
        **where,
    )


def send(harness: EngineHarness, model_id, first: int, count: int) -> None:
    """Send requests, wait for their results, and mark them as fetched."""
    names: list[RequestId] = []
    for number in range(first, first + count):
        new = new_request(harness, model_id, number)
        names.append(futures.make_request_id(new.key))
        harness.api.write_soon(lambda tx, new=new: futures.submit(tx, new, time.time()))
    while len(answered := harness.api.read(lambda tx: futures.get_outcomes(tx, names))) < count:
        harness.api.wait(1.0)
    assert set(answered.values()) == {"done"}
    harness.api.write(lambda tx: futures.mark_fetched(tx, names, time.time()))


def num_rows(harness: EngineHarness) -> int:
    return harness.api.read(lambda tx: tx.exec(select(func.count()).select_from(RequestRow)).one())


def size(harness: EngineHarness) -> int:
    """Return the size of the database in bytes."""
    return harness.api.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA page_count").scalar_one()) * 4096


def wait_until_pruned(harness: EngineHarness) -> int:
    """Wait until the database is pruned and return its size."""
    until(lambda: num_rows(harness) <= 1)
    until(
        lambda: harness.api.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA freelist_count").scalar_one()) == 0
    )
    return size(harness)


@pytest.mark.parametrize("num_rounds", [4, pytest.param(80, marks=(pytest.mark.slow, pytest.mark.exhaustive))])
def test_database_size_is_bounded(tmp_path, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Points are kept as long as their run. Reaching the limit of 200,000 would take too long.
    monkeypatch.setattr(points, "find_superfluous", partial(points.find_superfluous, max_points=2 * A_ROUND))
    quick = {"result_retention_s": 0.0, "request_retention_s": 0.0, "housekeeping_interval_s": 0.05}
    harness = EngineHarness(tmp_path, snapshot_interval_s=0.05, **quick)
    model_id, created = harness.create()
    sizes: list[int] = []

    with live_engine(harness.settings, harness.backend()):
        for number in range(num_rounds):
            send(harness, model_id, 1 + A_ROUND * number, A_ROUND)
            if number % (num_rounds // 4) == 0:
                sizes.append(wait_until_pruned(harness))
        sizes.append(wait_until_pruned(harness))
        last = A_ROUND * num_rounds
        row = harness.api.read(lambda tx: models.get(tx, model_id))
        for number in (1, 2, last - 1, last):
            with pytest.raises(RequestPruned):
                harness.api.write(partial(futures.submit, new=new_request(harness, model_id, number), now=time.time()))
        send(harness, model_id, last + 1, 3)

    assert max(sizes[1:]) <= sizes[0] * 1.25, sizes
    assert row.effect_order == 1 + 2 * last // 3, "the creation, and each pass and step once"
    assert harness.api.read(lambda tx: futures.get_outcomes(tx, [created])) == {created: "done"}

    harness.run(harness.submit(optim_step(), model_id=model_id, seq_id=last + 4))
    harness.close()


NUM_SAVES = 6


def run_killed_client(harness: EngineHarness) -> None:
    """Run a client that alternates saves and samples, fetches half of the results, and is then killed."""
    harness.session_id = harness.new_session()
    model_id, _ = harness.create()
    names = [SamplingSessionId(f"{harness.session_id}:sample:{number}") for number in range(NUM_SAVES)]
    asked = []
    for number, name in enumerate(names):
        save = requests.SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
        asked += [
            harness.submit(save, model_id=model_id, seq_id=number + 1),
            harness.submit(sample(max_tokens=2), sampling_session_id=name, seq_id=0),
        ]
    until(lambda: len(harness.api.read(lambda tx: futures.get_outcomes(tx, asked))) == len(asked))
    harness.api.write(lambda tx: futures.mark_fetched(tx, asked[:NUM_SAVES], time.time()))


def count_rows(harness: EngineHarness) -> dict[str, int]:
    """Count the rows in each table that grows with the number of requests."""
    tables = {"requests": RequestRow, "samplers": SamplingSessionRow, "marks": PrunedRow, "snapshots": SnapshotRow}

    def count(tx):
        return {name: tx.exec(select(func.count()).select_from(table)).one() for name, table in tables.items()}

    return harness.api.read(count)


@pytest.mark.usefixtures("api_is_there_for_long")
def test_killed_clients_leave_only_their_runs(tmp_path, monkeypatch) -> None:
    harness = EngineHarness(tmp_path, result_retention_s=0.0, request_retention_s=0.0, housekeeping_interval_s=0.1)
    real, ahead_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)

    with live_engine(harness.settings, harness.backend()):
        for num_runs in (1, 2):
            run_killed_client(harness)
            ahead_s += 8 * 86_400.0
            if num_runs == 1:  # nearly
                harness.api.write(lambda tx: sessions.record_heartbeat(tx, harness.session_id, time.time()))
                until(lambda: count_rows(harness)["samplers"] == 4)  # the newest sampler of the model
                ahead_s += 8 * 86_400.0
            until(
                lambda: (
                    {**count_rows(harness), "marks": 0} == {"requests": 0, "samplers": 0, "marks": 0, "snapshots": 0}
                )
            )
            assert count_rows(harness)["marks"] == num_runs, "one per model"
            row = harness.api.read(lambda tx: sessions.get(tx, harness.session_id))
            assert row.finish_reason == "no heartbeat for 604800 s"

    harness.close()


@pytest.mark.usefixtures("api_is_there_for_long")
def test_ended_runs_without_checkpoints_and_their_sessions_are_removed(tmp_path, monkeypatch) -> None:
    harness = EngineHarness(tmp_path, result_retention_s=0.0, request_retention_s=0.0, housekeeping_interval_s=0.1)
    real, ahead_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)

    def num_runs_and_sessions() -> tuple[int, ...]:
        tables = (ModelRow, SessionRow)
        return harness.api.read(
            lambda tx: tuple(tx.exec(select(func.count()).select_from(table)).one() for table in tables)
        )

    with live_engine(harness.settings, harness.backend()):
        empty_id, empty = harness.create("empty")
        kept_id, _ = harness.create("kept")
        save = requests.SaveWeights(kind="weights", name="kept", sampling_session_id=None)
        asked = [empty, harness.submit(save, model_id=kept_id, seq_id=1)]
        until(lambda: len(harness.api.read(lambda tx: futures.get_outcomes(tx, asked))) == len(asked))
        killed = harness.new_session()
        ahead_s += 8 * 86_400.0  # past --session-retention-s
        until(lambda: harness.api.read(lambda tx: models.get(tx, empty_id)).status == "expired")
        assert num_runs_and_sessions() == (2, 2)
        ahead_s += 31 * 86_400.0  # past --run-retention-s
        until(lambda: num_runs_and_sessions() == (1, 1))
        assert harness.api.read(lambda tx: models.get(tx, kept_id)) is not None, "it has a checkpoint"
        assert harness.api.read(lambda tx: sessions.get(tx, killed)) is None
    harness.close()
