"""Samples that wait on a busy engine are executed by an idle engine, exactly once."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.store import futures, sampling_sessions
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, sample
from tests.support.several_engines import SeveralEngines

NUM_SAMPLES = 12


class BlockedBackend(FakeBackend):
    """A backend with one slot. Its samples produce no tokens until `released` is set."""

    def __init__(self, harness: EngineHarness, executed: list[RequestId], released: threading.Event) -> None:
        super().__init__("tiny", harness.config.model_copy(update={"sample_slots": 1}))
        self._executed, self._released = executed, released

    def begin_sample(self, batch):
        self._executed += [part.request_id for part in batch.requests]
        super().begin_sample(batch)

    def step_sample(self):
        if self._released.is_set():
            return super().step_sample()
        time.sleep(0.005)  # duration of a slice
        no_tokens, no_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return [SampleDelta(request_id=self._executed[-1], index=0, tokens=no_tokens, logprobs=no_logprobs)]


@pytest.fixture
def harness(tmp_path: Path, postgresql_url: str) -> Iterator[EngineHarness]:
    harness = EngineHarness(tmp_path, database_url=postgresql_url, engines=2)
    yield harness
    harness.close()


@pytest.fixture
def world(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RequestId], threading.Event]:
    """Use blocked backends and short membership and status periods."""
    executed, released = list[RequestId](), threading.Event()
    monkeypatch.setattr(harness, "backend", lambda: BlockedBackend(harness, executed, released))
    monkeypatch.setattr("skyrl_tx.engine.membership.PERIOD_S", 0.05)
    monkeypatch.setattr("skyrl_tx.engine.metrics._STATUS_PERIOD_S", 0.05)
    return executed, released


def submit(harness: EngineHarness, engine: int) -> list[RequestId]:
    return [harness.submit(sample(temperature=1.0, seed=seed), engine=engine) for seed in range(NUM_SAMPLES)]


def tokens(harness: EngineHarness, request_ids: list[RequestId]) -> list[list[int]]:
    return [list(harness.result(request_id).sequences[0].tokens) for request_id in request_ids]


def count_started(harness: EngineHarness) -> Counter[int]:
    """Return how many samples have started on each engine."""
    found = harness.api.read(lambda tx: tx.connection().execute(text("SELECT engine FROM requests WHERE attempts > 0")))
    return Counter(engine for (engine,) in found)


@pytest.mark.parametrize("victim", [None, "giver", "taker"])
def test_an_idle_engine_gets_half_of_what_waits_elsewhere(harness, world, tmp_path_factory, victim) -> None:
    executed, released = world

    with SeveralEngines(harness, 2) as engines:
        request_ids = submit(harness, 1)
        engines.until(lambda: count_started(harness).keys() == {1, 2})
        if victim is not None:
            engines.get_engine(1 if victim == "giver" else 2).lose()
        released.set()
        engines.wait(*request_ids)

    assert set(executed) == set(request_ids)

    if victim is None:
        assert len(executed) == NUM_SAMPLES, "each was executed once"
    alone = EngineHarness(tmp_path_factory.mktemp("alone"))
    expected = submit(alone, 1)
    alone.run(*expected)
    assert tokens(harness, request_ids) == tokens(alone, expected)

    alone.close()


def test_samples_of_weights_that_are_only_in_memory_stay(harness, world, monkeypatch) -> None:
    _, released = world
    name = SamplingSessionId(f"{harness.session_id}:sample:0")
    with SeveralEngines(harness, 2) as engines:
        model_id, created = harness.create()
        engines.wait(created)

        def fail(*_args: object, **_named: object) -> None:
            raise OSError("no space")

        monkeypatch.setattr(harness.artifacts, "create", fail)
        save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
        engines.wait(harness.submit(save, model_id=model_id, seq_id=1))
        in_memory = harness.api.read(lambda tx: sampling_sessions.get(tx, name)).sampler_id
        staying = [
            harness.submit(sample(sampler=in_memory), sampling_session_id=name, seq_id=number) for number in range(4)
        ]
        moving = submit(harness, 1)
        engines.until(lambda: count_started(harness).keys() == {1, 2})
        elsewhere = {row.request_id for row in harness.api.read(lambda tx: futures.list_pending(tx, 0, 100, engine=2))}
        assert elsewhere and elsewhere <= set(moving)
        released.set()
        engines.wait(*staying, *moving)
