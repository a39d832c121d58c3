"""Heartbeat timeouts count only the time in which the API was up."""

import time
from types import SimpleNamespace

import pytest

from skyrl_tx.engine import housekeeping
from skyrl_tx.engine.housekeeping import ApiUptime, Housekeeping
from skyrl_tx.store import sessions
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample

DAY_S = 86_400.0


class Scene:
    """A fake clock and an API process that is either up or down."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        self.suspended_s = 0.0
        self.is_there = True
        clocks = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + self.suspended_s)
        monkeypatch.setattr(housekeeping, "time", clocks)
        self.api_uptime = ApiUptime(SimpleNamespace(is_peer_running=lambda: self.is_there))

    def after(self, seconds: float) -> tuple[float, float]:
        self.now += seconds
        return self.api_uptime.get_total_s(), self.api_uptime.get_continuous_s()


def test_uptime_stops_while_the_api_is_down_and_continuous_uptime_restarts(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.after(20.0) == (20.0, 20.0)
    scene.is_there = False
    assert scene.after(5.0) == (20.0, 0.0)
    scene.is_there = True
    assert scene.after(3.0) == (23.0, 3.0)


def test_continuous_uptime_grows_by_a_minute_per_check_at_most(monkeypatch) -> None:
    assert Scene(monkeypatch).after(1800.0) == (1800.0, 60.0)


@pytest.mark.parametrize("step_s", [6.0, -6.0, 8 * DAY_S])
def test_continuous_uptime_restarts_at_a_suspend_or_clock_step(monkeypatch, step_s: float) -> None:
    scene = Scene(monkeypatch)
    assert scene.after(20.0) == (20.0, 20.0)
    scene.suspended_s += step_s
    assert scene.after(0.0) == (20.0, 0.0)
    assert scene.after(3.0) == (23.0, 3.0)


def test_adjustments_of_the_clock_do_not_restart_continuous_uptime(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    for _ in range(100):
        scene.suspended_s += 0.5
        scene.after(10.0)
    assert scene.api_uptime.get_continuous_s() == 1000.0


@pytest.mark.parametrize("step_s", [500 * DAY_S, -500 * DAY_S, 6.0])
def test_nothing_expires_for_an_hour_after_the_clock_was_set(monkeypatch, step_s: float) -> None:
    scene = Scene(monkeypatch)
    assert scene.api_uptime.has_steady_clock()

    # The clock is wrong for 12 seconds. Both steps count.
    scene.suspended_s = step_s
    assert not scene.api_uptime.has_steady_clock()
    scene.after(12.0)
    scene.suspended_s = 0.0
    assert not scene.api_uptime.has_steady_clock()
    scene.after(3590.0)
    assert not scene.api_uptime.has_steady_clock()
    scene.after(10.0)
    assert scene.api_uptime.has_steady_clock()


@pytest.mark.parametrize(("last_active_at", "is_steady"), [(900.0, True), (None, True), (-3000.0, False), (1e9, False)])
def test_a_start_with_a_wrong_clock_waits_too(monkeypatch, last_active_at: float | None, is_steady: bool) -> None:
    Scene(monkeypatch)
    store = SimpleNamespace(is_peer_running=lambda: True)
    assert ApiUptime(store, last_active_at).has_steady_clock() == is_steady


def test_housekeeping_removes_nothing_while_the_clock_may_be_wrong() -> None:
    uptime = SimpleNamespace(has_steady_clock=lambda: False)
    keeper = Housekeeping(context=None, artifacts=None, sampling=None, retention=None, api_uptime=uptime)
    keeper.expire(1e12)
    keeper.collect_garbage(0, 1e12)
    assert keeper.prune(1e12) is False


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


@pytest.mark.parametrize("away_s", [1860.0, 8 * DAY_S])
def test_suspend_of_a_running_engine_is_not_a_heartbeat_timeout(tmp_path, monkeypatch, away_s: float) -> None:
    timeout_s = 2.0  # on a busy machine, processes have been observed to stall for more than half a second
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.01, session_timeout_s=timeout_s)
    harness.config = harness.config.model_copy(update={"slice_tokens": 1})
    model_id, _ = harness.create()
    harness.answer(forward_backward(), model_id=model_id, seq_id=1)
    real, started = time.time, time.monotonic()
    suspended: list[float] = []

    class SuspendingBackend(FakeBackend):
        """Suspends the machine once the timeout applies.

        The client sends heartbeats until the suspend and resumes half a timeout later.
        """

        def step_sample(self):
            time.sleep(0.015)
            uptime_s = time.monotonic() - started
            if not suspended and uptime_s > 1.1 * timeout_s:
                suspended.append(uptime_s)
                monkeypatch.setattr(time, "time", lambda: real() + away_s)
            if not suspended or uptime_s > suspended[0] + timeout_s / 2:
                harness.api.write(lambda tx: sessions.record_heartbeat(tx, harness.session_id, time.time()))
            return super().step_sample()

    waiting = harness.submit(sample(max_tokens=300, eos_stops=False))
    harness.run(waiting, backend=SuspendingBackend("tiny", harness.config))
    assert suspended and len(harness.result(waiting).sequences[0].tokens) == 300
    step = harness.answer(optim_step(), model_id=model_id, seq_id=2)
    assert step.metrics["unclipped_grad_l2:mean"] > 0
    harness.close()
