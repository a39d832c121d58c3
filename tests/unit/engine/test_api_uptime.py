"""Heartbeat timeouts count only the time in which the API was up."""

import time
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import housekeeping
from skyrl_tx.engine.housekeeping import ApiUptime
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample

DAY_S = 86_400.0


class Scene:
    """A clock, and an API that is up or down."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        self.is_there = True
        monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.api_uptime = ApiUptime(SimpleNamespace(is_peer_running=lambda: self.is_there))

    def after(self, seconds: float) -> tuple[float, float]:
        self.now += seconds
        return self.api_uptime.total_s(), self.api_uptime.continuous_s()


def test_uptime_stops_while_the_api_is_down_and_continuous_uptime_restarts(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.after(20.0) == (20.0, 20.0)
    scene.is_there = False
    assert scene.after(5.0) == (20.0, 0.0)
    scene.is_there = True
    assert scene.after(3.0) == (23.0, 3.0)


def test_continuous_uptime_grows_by_a_minute_per_check_at_most(monkeypatch) -> None:
    assert Scene(monkeypatch).after(1800.0) == (1800.0, 60.0)


@pytest.mark.parametrize("away_s", [1860.0, 8 * DAY_S])
def test_api_outage_is_not_a_heartbeat_timeout(tmp_path, monkeypatch, away_s: float) -> None:
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.answer(optim_step(), model_id=model_id, seq_id=2)
    before = harness.answer(forward_backward(9, backward=False), model_id=model_id)
    waiting = harness.submit(sample(max_tokens=200, eos_stops=False))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + away_s)
    harness.run(waiting)
    assert len(harness.result(waiting).sequences[0].tokens) == 200
    after = harness.answer(forward_backward(9, backward=False), model_id=model_id)
    assert after.logprobs[0].tobytes() == before.logprobs[0].tobytes()
    harness.close()
