"""Quotas of what runs at once hold over all engines together."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.contract.results import Failure
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, sample
from tests.support.several_engines import SeveralEngines
from tests.unit.engine.test_pauses import Ended, put

VALUE = 3


class AtOnce:
    """The number that runs in the backends of all engines, and the largest so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.by_backend: Counter[int] = Counter()

    def add(self, count: int, backend: FakeBackend) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)
            self.by_backend[id(backend)] += max(count, 0)


class Counted(FakeBackend):
    """Counts samples and passes."""

    def __init__(self, harness: EngineHarness, at_once: AtOnce) -> None:
        sizes = {"micro_batch_tokens": 16, "slice_tokens": 4, "step_delay_s": 0.002}
        super().__init__("tiny", harness.config.model_copy(update=sizes))
        self._at_once = at_once

    def begin_sample(self, batch):
        self._at_once.add(sum(part.num_samples for part in batch.requests), self)
        super().begin_sample(batch)

    def step_sample(self):
        deltas = super().step_sample()
        self._at_once.add(-sum(delta.stop_reason is not None for delta in deltas), self)
        return deltas

    def begin_pass(self, batch, *, backward):
        count = len({example.request_id for example in batch.examples})
        self._at_once.add(count, self)
        return Ended(super().begin_pass(batch, backward=backward), lambda: self._at_once.add(-count, self))


@pytest.fixture
def harness(tmp_path: Path, postgresql_url: str) -> Iterator[EngineHarness]:
    harness = EngineHarness(tmp_path, database_url=postgresql_url, engines=2)
    yield harness
    harness.close()


@pytest.mark.parametrize("limit", ["samples_at_once", "training_steps_at_once"])
def test_two_engines_together_keep_a_quota_of_what_runs_at_once(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    at_once = AtOnce()
    monkeypatch.setattr(harness, "backend", lambda: Counted(harness, at_once))
    put(harness.api, "*", limit, VALUE)
    with SeveralEngines(harness, 2) as engines:
        ids: list[Any] = []
        if limit == "samples_at_once":
            several = sample(max_tokens=20, eos_stops=False)
            several = type(several)(prompt=several.prompt, num_samples=4, sampler=None, params=several.params)
            ids += [harness.submit(several, engine=1 + number % 2) for number in range(30)]
        else:
            data = (datum(length=16),) * 4
            for name in "abcdef":
                model_id, created = harness.create(name)
                ids.append(created)
                ids += [
                    harness.submit(forward_backward(data=data), model_id=model_id, seq_id=seq_id)
                    for seq_id in range(1, 6)
                ]
        engines.wait(*ids)
    assert not any(isinstance(harness.result(each), Failure) for each in ids)
    assert at_once.now == 0 and 0 < at_once.most <= VALUE
    assert len(at_once.by_backend) == 2, "both engines had work"
