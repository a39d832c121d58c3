"""Placement of models on engines, and reassignment of the work of an engine that ended."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.store import (
    StoreError,
    StoreInUse,
    completions,
    dialect,
    engine_state,
    futures,
    models,
    placement,
    sampling_sessions,
    sessions,
)
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import EngineStateRow, ModelRow, SamplingSessionRow
from tests.support.polling import until


@pytest.fixture
def api(tmp_path: Path, postgresql_url: str) -> Iterator[Store]:
    store = Store.open(tmp_path / "api", role="api", url=postgresql_url)
    yield store
    store.close()


@pytest.fixture
def session_id(api: Store) -> SessionId:
    return api.write(lambda tx: sessions.create(tx, owner="ann", now=1.0))


def publish(tx: Session, number: int, status: str = "ready", places: int = 4, age_s: float = 0.0) -> None:
    row = EngineStateRow(
        number=number,
        boot_id=f"boot {number}",
        host="machine",
        pid=100 + number,
        status=status,
        capabilities={"max_models": places},
        base_models=["tiny"],
        updated_at=engine_state.get_shared_time(tx) - age_s,
    )
    engine_state.publish(tx, row)


def add_model(tx: Session, session_id: SessionId, name: str, engine: int) -> ModelId:
    model_id = ModelId(f"{session_id}:train:{name}")
    now = time.time()
    row = ModelRow(
        model_id=model_id,
        session_id=session_id,
        base_model="tiny",
        spec=b"",
        status="ready",
        created_at=now,
        last_request_at=now,
        engine=engine,
    )
    models.create(tx, row)
    tx.flush()
    return model_id


def add_request(
    tx: Session,
    session_id: SessionId,
    engine: int,
    *,
    model_id: ModelId | None = None,
    sampled_from: SamplingSessionId | None = None,
    attempts: int = 0,
) -> RequestId:
    new = NewRequest(
        key="",
        kind="sample" if model_id is None else "optim_step",
        owner="ann",
        session_id=session_id,
        body=b"",
        model_id=model_id,
        sampling_session_id=sampled_from,
        engine=engine,
    )
    request_id = futures.submit(tx, new, 1.0).request_id
    for _ in range(attempts):
        futures.count_delivery_attempt(tx, [request_id])
    return request_id


def waiting(api: Store, engine: int) -> list[RequestId]:
    """Return the open requests of an engine in the order in which the engine reads them."""
    return [row.request_id for row in api.read(lambda tx: futures.list_pending(tx, 0, 100, engine=engine))]


@pytest.mark.parametrize(
    ("engines", "counts", "expected"),
    [
        ([], {}, 1),
        ([(3, "starting", 4, 0.0)], {}, 3),
        ([(1, "ready", 4, 0.0), (2, "ready", 4, 0.0)], {1: 2, 2: 1}, 2),
        ([(1, "ready", 8, 0.0), (2, "ready", 2, 0.0)], {1: 2, 2: 1}, 1),
        ([(1, "ready", 4, 60.0), (2, "ready", 4, 0.0)], {2: 3}, 2),
        ([(1, "stopping", 4, 0.0), (2, "ready", 4, 0.0)], {2: 3}, 2),
        ([(1, "starting", 4, 5.0), (2, "recovering", 4, 0.0)], {}, 2),
    ],
    ids=["none", "one", "fewest models", "most room", "silent", "stopping", "none ready"],
)
def test_a_new_model_goes_to_the_ready_engine_with_the_least_load(
    api: Store, session_id: SessionId, engines, counts, expected
) -> None:
    def work(tx: Session) -> int:
        for number, status, places, age_s in engines:
            publish(tx, number, status, places, age_s)
        for engine, count in counts.items():
            for number in range(count):
                add_model(tx, session_id, f"{engine}-{number}", engine)
        return placement.choose_engine(tx)

    assert api.write(work) == expected


def test_models_and_requests_of_an_ended_engine_are_shared_out_in_order(api: Store, session_id: SessionId) -> None:
    def work(tx: Session) -> tuple[placement.MoveResult, list[RequestId], dict[ModelId, list[RequestId]]]:
        names = [add_model(tx, session_id, f"m{number}", 3) for number in range(4)]
        add_model(tx, session_id, "other", 1)
        requests: dict[ModelId, list[RequestId]] = {name: [] for name in names}
        for _ in range(3):
            for name in names:
                requests[name].append(add_request(tx, session_id, 3, model_id=name))
        samples = [add_request(tx, session_id, 3) for _ in range(6)]
        add_request(tx, session_id, 1)
        return placement.move(tx, 3, [1, 2]), samples, requests

    moved, samples, requests = api.write(work)
    assert sorted(moved.models.values()) == [1, 1, 2, 2], (
        "engine 1 had one; the lower number is first of two equal ones"
    )
    assert waiting(api, 3) == [] and moved.num_requests == 18
    found = {engine: waiting(api, engine) for engine in (1, 2)}
    assert abs(len(found[1]) - len(found[2])) <= 3
    for model_id, engine in moved.models.items():
        assert [name for name in found[engine] if name in requests[model_id]] == requests[model_id]
    assert {name for names in found.values() for name in names} >= {*samples}


def test_a_request_that_moved_is_read_like_one_that_has_just_arrived(api: Store, session_id: SessionId) -> None:
    moving = api.write(lambda tx: add_request(tx, session_id, 2))
    read = api.write(lambda tx: add_request(tx, session_id, 1))
    position = api.read(futures.get_last_position)
    assert waiting(api, 1) == [read]
    api.write(lambda tx: placement.move(tx, 2, [1]))
    (row,) = api.read(lambda tx: futures.list_pending(tx, position, 10, engine=1))
    assert row.request_id == moving
    later = api.write(lambda tx: add_request(tx, session_id, 1))
    assert waiting(api, 1) == [read, moving, later]


@pytest.mark.parametrize(("age_s", "is_held"), [(5.0, True), (2 * placement.QUARANTINE_S, False)])
def test_what_may_have_ended_two_engines_stays_for_a_while_with_its_model(
    api: Store, session_id: SessionId, age_s: float, is_held: bool
) -> None:
    def work(tx: Session) -> tuple[placement.MoveResult, list[RequestId]]:
        publish(tx, 2, age_s=age_s)
        guilty, innocent = (add_model(tx, session_id, name, 2) for name in ("guilty", "innocent"))
        first = add_request(tx, session_id, 2, model_id=guilty, attempts=2)
        second = add_request(tx, session_id, 2, model_id=guilty)
        add_request(tx, session_id, 2, model_id=innocent, attempts=1)
        sampled = add_request(tx, session_id, 2, attempts=2)
        return placement.move(tx, 2, [1]), [first, second, sampled]

    moved, kept = api.write(work)
    assert waiting(api, 2) == (kept if is_held else [])
    assert len(waiting(api, 1)) == (1 if is_held else 4)
    assert moved.num_quarantined == (3 if is_held else 0)


def test_a_request_that_ran_alone_elsewhere_is_not_blamed_for_a_crash_of_its_new_engine(
    api: Store, session_id: SessionId
) -> None:
    def work(tx: Session) -> tuple[placement.MoveResult, RequestId]:
        publish(tx, 2, age_s=2 * placement.QUARANTINE_S)
        moved = add_request(tx, session_id, 2)
        futures.count_delivery_attempt(tx, [moved], is_alone=True)
        return placement.move(tx, 2, [1]), moved

    moved, name = api.write(work)
    assert (moved.num_requests, moved.num_quarantined) == (1, 0)
    api.write(lambda tx: futures.record_engine_end(tx, is_crash=True, engine=1))
    assert api.read(lambda tx: futures.get_max_crashes(tx, [name])) == 0


def test_only_an_engine_that_is_ready_and_has_nothing_is_given_samples(
    api: Store, session_id: SessionId, tmp_path: Path, postgresql_url: str
) -> None:
    def get_position(tx: Session, request_id: RequestId) -> int:
        return next(row.position for row in futures.list_pending(tx, 0, 100) if row.request_id == request_id)

    def give(*request_ids: RequestId) -> list[RequestId]:
        return api.write(
            lambda tx: placement.give_sample_requests(tx, 1, 2, [get_position(tx, name) for name in request_ids])
        )

    first, second, third = (api.write(lambda tx: add_request(tx, session_id, 1)) for _ in range(3))
    api.write(lambda tx: publish(tx, 2))
    assert give(first) == [], "it has no lease"
    with ExitStack() as stack:
        for _ in range(2):
            store = Store.open(tmp_path / "engine", role="engine", url=postgresql_url, is_shared=True)
            stack.enter_context(closing(store))
        api.write(lambda tx: publish(tx, 2, "starting"))
        assert give(first) == []
        api.write(lambda tx: publish(tx, 2))
        positions = api.read(lambda tx: [get_position(tx, name) for name in (first, second)])
        assert api.write(lambda tx: completions.cancel(tx, second, "ann", b"", 2.0)) == "cancelled"
        assert api.write(lambda tx: placement.give_sample_requests(tx, 1, 2, positions)) == [first]
        assert waiting(api, 1) == [third] and waiting(api, 2) == [first]
        assert give(third) == [], "it has a request now"


def test_samples_of_weights_in_memory_follow_their_model(api: Store, session_id: SessionId) -> None:
    name = SamplingSessionId("unwritten")

    def work(tx: Session) -> tuple[placement.MoveResult, ModelId, RequestId]:
        add_model(tx, session_id, "a", 1)
        model_id = add_model(tx, session_id, "b", 3)
        row = SamplingSessionRow(
            sampling_session_id=name,
            session_id=session_id,
            base_model="tiny",
            sampler_id=SamplerId("art-1"),
            model_id=model_id,
            created_at=1.0,
            last_used_at=1.0,
        )
        sampling_sessions.create_session(tx, row)
        for _ in range(3):
            add_request(tx, session_id, 2)
        request_id = add_request(tx, session_id, 3, sampled_from=name)
        return placement.move(tx, 3, [1, 2]), model_id, request_id

    moved, model_id, request_id = api.write(work)

    assert moved.models == {model_id: 2}
    assert request_id in waiting(api, 2), "though engine 1 has fewer requests"


def test_an_engine_that_runs_keeps_what_it_has(api: Store, session_id: SessionId, tmp_path: Path, postgresql_url: str):
    api.write(lambda tx: add_model(tx, session_id, "a", 1))
    assert api.read(placement.find_ended) == {1}
    first, second = (
        Store.open(tmp_path / "engine", role="engine", url=postgresql_url, is_shared=True) for _ in range(2)
    )
    assert (first.engine_number, second.engine_number) == (1, 2)
    assert api.read(placement.get_running).keys() == {1, 2} and api.read(placement.find_ended) == set()
    assert not second.write(lambda tx: placement.take_lease(tx, 1))
    assert first.write(placement.become_keeper) and not second.write(placement.become_keeper)
    first.close()
    until(lambda: second.write(placement.become_keeper))  # the server closes the connection a moment later
    assert second.write(lambda tx: placement.take_lease(tx, 1))
    assert api.read(placement.find_ended) == {1}
    second.close()


def test_no_engine_starts_with_a_number_whose_models_are_being_shared_out(api: Store, postgresql_url: str) -> None:
    def is_free(number: int) -> bool:
        with psycopg.connect(postgresql_url) as other:
            taken = other.execute("SELECT pg_try_advisory_lock(%s, %s)", (dialect.ENGINE_CLASS, number)).fetchone()
            return taken == (True,)

    def work(tx: Session) -> list[bool]:
        assert placement.take_lease(tx, 1)
        return [is_free(1), is_free(2)]

    assert api.write(work) == [False, True]
    assert is_free(1), "the lease was taken for one transaction"


def test_an_engine_that_does_not_share_excludes_those_that_do(tmp_path: Path, postgresql_url: str) -> None:
    alone = Store.open(tmp_path / "one", role="engine", url=postgresql_url)
    with pytest.raises(StoreInUse, match="start all engines that share a database with --engines"):
        Store.open(tmp_path / "two", role="engine", url=postgresql_url, is_shared=True, busy_timeout_s=0.2)
    alone.close()
    shared = Store.open(tmp_path / "two", role="engine", url=postgresql_url, is_shared=True)
    with pytest.raises(StoreInUse, match="is in use by skyrl_tx engine"):
        Store.open(tmp_path / "one", role="engine", url=postgresql_url, busy_timeout_s=0.2)
    shared.close()


def test_sqlite_has_one_engine(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--engines: multiple engines need a PostgreSQL database"):
        Store.open(tmp_path, role="engine", is_shared=True)


def test_a_stuck_engine_loses_its_lease_and_can_commit_no_more(api: Store, tmp_path: Path, postgresql_url: str) -> None:
    engine = Store.open(tmp_path / "engine", role="engine", url=postgresql_url, is_shared=True)
    engine.write(lambda tx: publish(tx, 1))
    api.write(lambda tx: placement.revoke_lease(tx, placement.get_running(tx)[1]))
    with pytest.raises(StoreError):
        engine.write(lambda tx: publish(tx, 1, "stopping"))
    until(lambda: api.read(placement.get_running) == {})
    assert api.read(engine_state.get).status == "ready"
    engine.close()
