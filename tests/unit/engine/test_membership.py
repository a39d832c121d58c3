"""Multiple engines share a PostgreSQL database.

Work of an engine that ended continues on another engine, bit for bit.
"""

import threading
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.engine.membership import STUCK_S, Membership
from skyrl_tx.store import StoreUnreachable, engine_state, futures, models, placement, sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample
from tests.support.polling import until
from tests.support.several_engines import SeveralEngines

NUM_STEPS = 6


@pytest.fixture
def harness(tmp_path, postgresql_url):
    harness = EngineHarness(tmp_path, database_url=postgresql_url, engines=2)
    yield harness
    harness.close()


@pytest.fixture
def alone(tmp_path_factory):
    harness = EngineHarness(tmp_path_factory.mktemp("alone"))
    yield harness
    harness.close()


def get_engine(harness: EngineHarness, model_id: ModelId) -> int:
    return harness.api.read(lambda tx: models.get_engine_number(tx, model_id)) or 0


def steps(harness: EngineHarness, model_id: ModelId, first: int, count: int) -> list[RequestId]:
    """Submit training steps and return the request ids of the passes."""
    passes = []
    for step in range(first, first + count):
        passes.append(harness.submit(forward_backward(step), model_id=model_id, seq_id=2 * step + 1))
        harness.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    return passes


def losses(harness: EngineHarness, passes: list[RequestId]) -> list[float]:
    return [harness.result(name).metrics["loss:sum"] for name in passes]


def train_undisturbed(alone: EngineHarness) -> list[float]:
    model_id, _ = alone.create()
    passes = steps(alone, model_id, 0, 2 * NUM_STEPS)
    alone.run(*passes)
    return losses(alone, passes)


def test_new_models_are_shared_out(harness):
    with SeveralEngines(harness, 2) as engines:
        created = [harness.create(f"m{number}") for number in range(6)]
        engines.wait(*(request_id for _, request_id in created))
        assert Counter(get_engine(harness, model_id) for model_id, _ in created) == {1: 3, 2: 3}


@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_models_of_an_ended_engine_go_on_elsewhere_with_the_same_bits(harness, alone, how):
    with SeveralEngines(harness, 2) as engines:
        names = [harness.create(f"m{number}")[0] for number in range(4)]
        before = [steps(harness, model_id, 0, NUM_STEPS) for model_id in names]
        engines.wait(before[0][0])
        victim = engines.get_engine(get_engine(harness, names[0]))
        victim.lose() if how == "lost" else victim.stop()
        after = [steps(harness, model_id, NUM_STEPS, NUM_STEPS) for model_id in names]
        engines.wait(*(name for passes in after for name in passes))
        assert {get_engine(harness, model_id) for model_id in names} == {3 - victim.number}
        expected = train_undisturbed(alone)
        for first, second in zip(before, after, strict=True):
            assert losses(harness, first + second) == expected
        logs = [harness.api.read(lambda tx, name=name: models.get(tx, name)) for name in names]
        assert [row.effect_order for row in logs] == [1 + 4 * NUM_STEPS] * 4


def test_a_sampler_that_was_in_memory_only_is_made_again_elsewhere(harness, monkeypatch):
    name = SamplingSessionId(f"{harness.session_id}:sample:0")
    with SeveralEngines(harness, 2) as engines:
        model_id, _ = harness.create()
        passes = steps(harness, model_id, 0, 2)
        save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)

        def fail(*_args: object, **_named: object) -> None:
            raise OSError("no space")

        with monkeypatch.context() as patched:
            patched.setattr(harness.artifacts, "create", fail)
            saved = harness.submit(save, model_id=model_id, seq_id=5)
            engines.wait(saved, *passes)
            victim = engines.get_engine(get_engine(harness, model_id))
            victim.lose()
        row = harness.api.read(lambda tx: sampling_sessions.get(tx, name))
        request = harness.submit(
            sample(sampler=row.sampler_id), sampling_session_id=name, seq_id=0, engine=victim.number
        )
        engines.wait(request)
        assert len(harness.result(request).sequences[0].tokens) == 8
        assert get_engine(harness, model_id) == 3 - victim.number


def test_an_engine_that_starts_gets_models_of_one_that_has_more(harness, alone, monkeypatch):
    monkeypatch.setattr("skyrl_tx.engine.membership._BALANCE_PERIOD_S", 0.05)
    monkeypatch.setattr("skyrl_tx.engine.membership.PERIOD_S", 0.05)
    with SeveralEngines(harness, 1) as engines:
        names = [harness.create(f"m{number}")[0] for number in range(4)]
        before = [steps(harness, model_id, 0, NUM_STEPS) for model_id in names]
        engines.wait(*(name for passes in before for name in passes))
        engines.start()
        engines.until(lambda: Counter(get_engine(harness, name) for name in names) == {1: 2, 2: 2})
        after = [steps(harness, model_id, NUM_STEPS, NUM_STEPS) for model_id in names]
        engines.wait(*(name for passes in after for name in passes))
        expected = train_undisturbed(alone)
        for first, second in zip(before, after, strict=True):
            assert losses(harness, first + second) == expected


def test_a_request_that_ended_two_engines_waits_for_one_of_its_number(harness):
    with SeveralEngines(harness, 2) as engines:
        model_id, created = harness.create()
        engines.wait(created)
        victim = engines.get_engine(get_engine(harness, model_id))
        other = 3 - victim.number
        victim.lose()
        quarantined = harness.submit(sample(), engine=victim.number, num_attempts=2)
        harness.api.write(lambda tx: record_status(tx, victim.number))
        innocent = harness.submit(sample(), engine=victim.number)
        engines.wait(innocent)
        assert harness.api.read(lambda tx: futures.get_outcomes(tx, [quarantined])) == {}
        assert [row.request_id for row in harness.api.read(lambda tx: futures.list_in_flight(tx, victim.number))] == [
            quarantined
        ]
        assert get_engine(harness, model_id) == other, "only what the request needs stays"
        assert engines.start().number == victim.number

        engines.wait(quarantined)


def record_status(tx: Session, number: int) -> None:
    """Record a status for an engine that has ended, as if it had just been published."""
    row = next(row for row in engine_state.list_engines(tx) if row.number == number)
    row.updated_at = engine_state.get_shared_time(tx)


def test_a_stuck_engine_is_ended_while_it_holds_the_write_lock(harness, tmp_path, postgresql_url) -> None:
    def open_engine(name: str, busy_timeout_s: float) -> Store:
        data_dir = tmp_path / name
        return Store.open(data_dir, role="engine", url=postgresql_url, is_shared=True, busy_timeout_s=busy_timeout_s)

    with closing(open_engine("stuck", 60.0)) as stuck, closing(open_engine("watching", 1.0)) as watching:
        started, go_on = threading.Event(), threading.Event()
        written = stuck.write_soon(lambda tx: started.set() or go_on.wait(30))
        assert started.wait(10)

        # The other engine waits until the status is too old.
        number = stuck.engine_number
        row = EngineStateRow(number=number, boot_id="b", pid=1, status="ready", capabilities={}, base_models=[])
        row.updated_at = 1.0
        membership = Membership(SimpleNamespace(store=watching), schedule=None, sampling=None)
        for now in (0.0, STUCK_S + 1):
            holders = watching.read(placement.get_running)
            membership._end_if_stuck(row, holders[number], now)

        until(lambda: number not in watching.read(placement.get_running))
        go_on.set()
        with pytest.raises(StoreUnreachable):
            written.result(10)
