"""However many requests one session makes, the database keeps the size of what is recent; and nothing is done twice."""

import time
from functools import partial

import pytest
from sqlmodel import func, select

from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store import futures, models, sessions
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.pruning import RequestForgotten
from skyrl_tx.store.tables import PrunedRow, RequestRow, SamplingSessionRow, SnapshotRow
from skyrl_tx.testing.engine_house import OWNER, House, forward_backward, optim_step, sample
from skyrl_tx.testing.live_engine import live_engine
from skyrl_tx.testing.waiting import until

SAMPLER = SamplingSessionId("s:sample:0")
A_ROUND = 60
BODIES = (forward_backward(), optim_step(), sample())


def new_request(house: House, model_id, number: int) -> NewRequest:
    """The session's n-th: a pass, a step and a prompt in turn."""
    request = BODIES[number % 3]
    is_sample = isinstance(request, requests.Sample)
    where = {"sampling_session_id": SAMPLER} if is_sample else {"model_id": model_id}
    return NewRequest(
        key=f"{'sample' if is_sample else 'model'}/{number}",
        kind=codec.kind_of(request),
        owner=OWNER,
        session_id=house.session_id,
        body=codec.encode(request),
        seq_id=number,
        **where,
    )


def send(house: House, model_id, first: int, count: int) -> None:
    """Send requests, wait for them, and note that they were fetched."""
    names: list[RequestId] = []
    for number in range(first, first + count):
        new = new_request(house, model_id, number)
        names.append(futures.request_id(new.key))
        house.api.write_soon(lambda tx, new=new: futures.submit(tx, new, time.time()))
    while len(answered := house.api.read(lambda tx: futures.statuses(tx, names))) < count:
        house.api.wait(1.0)
    assert set(answered.values()) == {"done"}
    house.api.write(lambda tx: futures.mark_fetched(tx, names, time.time()))


def num_rows(house: House) -> int:
    return house.api.read(lambda tx: tx.exec(select(func.count()).select_from(RequestRow)).one())


def size(house: House) -> int:
    """Bytes of the database."""
    return house.api.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA page_count").scalar_one()) * 4096


def settled(house: House) -> int:
    """The database's size once all that may go has gone."""
    until(lambda: num_rows(house) <= 1)
    until(lambda: house.api.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA freelist_count").scalar_one()) == 0)
    return size(house)


@pytest.mark.parametrize("num_rounds", [4, pytest.param(80, marks=pytest.mark.slow)])
def test_the_database_keeps_its_size(tmp_path, num_rounds: int) -> None:
    quick = {"result_retention_s": 0.0, "request_retention_s": 0.0, "housekeeping_interval_s": 0.05}
    house = House(tmp_path, snapshot_interval_s=0.05, **quick)
    model_id, created = house.create()
    sizes: list[int] = []
    with live_engine(house.settings, house.backend()):
        for number in range(num_rounds):
            send(house, model_id, 1 + A_ROUND * number, A_ROUND)
            if number % (num_rounds // 4) == 0:
                sizes.append(settled(house))
        sizes.append(settled(house))
        last = A_ROUND * num_rounds
        row = house.api.read(lambda tx: models.get(tx, model_id))
        for number in (1, 2, last - 1, last):
            with pytest.raises(RequestForgotten):
                house.api.write(partial(futures.submit, new=new_request(house, model_id, number), now=time.time()))
        send(house, model_id, last + 1, 3)
    assert max(sizes[1:]) <= sizes[0] * 1.25, sizes
    assert row.effect_order == 1 + 2 * last // 3, "the creation, and every pass and step once"
    assert house.api.read(lambda tx: futures.statuses(tx, [created])) == {created: "done"}
    house.run(house.submit(optim_step(), model_id=model_id, seq_id=last + 4))
    house.close()


NUM_SAVES = 6


def sampled_and_killed(house: House) -> None:
    """A client that saves and samples in turn, fetches half of what it asked for, and is not heard of again."""
    house.session_id = house.new_session()
    model_id, _ = house.create()
    names = [SamplingSessionId(f"{house.session_id}:sample:{number}") for number in range(NUM_SAVES)]
    asked = []
    for number, name in enumerate(names):
        save = requests.SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
        asked += [
            house.submit(save, model_id=model_id, seq_id=number + 1),
            house.submit(sample(max_tokens=2), sampling_session_id=name, seq_id=0),
        ]
    until(lambda: len(house.api.read(lambda tx: futures.statuses(tx, asked))) == len(asked))
    house.api.write(lambda tx: futures.mark_fetched(tx, asked[:NUM_SAVES], time.time()))


def left(house: House) -> dict[str, int]:
    """Rows of what grows with requests."""
    tables = {"requests": RequestRow, "samplers": SamplingSessionRow, "marks": PrunedRow, "snapshots": SnapshotRow}

    def count(tx):
        return {name: tx.exec(select(func.count()).select_from(table)).one() for name, table in tables.items()}

    return house.api.read(count)


@pytest.mark.usefixtures("api_is_there_for_long")
def test_clients_that_were_killed_leave_nothing_that_grows_but_their_runs(tmp_path, monkeypatch) -> None:
    house = House(tmp_path, result_retention_s=0.0, request_retention_s=0.0, housekeeping_interval_s=0.1)
    real, ahead_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    with live_engine(house.settings, house.backend()):
        for num_runs in (1, 2):
            sampled_and_killed(house)
            ahead_s += 8 * 86_400.0
            if num_runs == 1:  # nearly
                house.api.write(lambda tx: sessions.heartbeat(tx, house.session_id, time.time()))
                until(lambda: left(house)["samplers"] == 4)  # the newest of its model
                ahead_s += 8 * 86_400.0
            until(lambda: {**left(house), "marks": 0} == {"requests": 0, "samplers": 0, "marks": 0, "snapshots": 0})
            assert left(house)["marks"] == num_runs, "of the models alone"
            row = house.api.read(lambda tx: sessions.get(tx, house.session_id))
            assert row.finish_reason == "no heartbeat for 604800 s"
    house.close()
