"""Activities of the engine loop are published and have time limits."""

import errno
import threading
from types import SimpleNamespace

import pytest

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.engine import activity as activity_module
from skyrl_tx.engine import metrics
from skyrl_tx.engine.activity import LoopActivity, Watchdog, monitor_backend
from skyrl_tx.launch.launcher import EngineEnd
from skyrl_tx.server.engine_status import EngineHealth
from skyrl_tx.store import engine_state
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, forward_backward
from tests.support.polling import until


class SlowBackend(FakeBackend):
    """Runs `during` inside each optimizer step, and reports compilation when `compiles` is set."""

    compiles = False

    def __init__(self, harness):
        super().__init__("tiny", harness.config)
        self.during = lambda: None

    def is_compiling(self):
        return self.compiles

    def clear_gradient(self, model_id):
        self.during()


@pytest.fixture
def slow(harness):
    return SlowBackend(harness)


@pytest.fixture
def activity():
    return LoopActivity()


@pytest.fixture
def stuck():
    return []


@pytest.fixture
def guard(harness, slow, activity, stuck):
    settings = harness.settings.model_copy(update={"step_timeout_s": 10.0, "compile_timeout_s": 100.0})
    return Watchdog(activity, slow, settings, stuck.append)


def replace_clock(monkeypatch, monotonic):
    """Replace the clock of the modules under test only, so that event loops of other tests keep the real clock."""
    monkeypatch.setattr(activity_module, "time", SimpleNamespace(monotonic=monotonic))


@pytest.fixture
def later(monkeypatch):
    """Advance the fake clock and check the watchdog."""
    clock = [1000.0]
    replace_clock(monkeypatch, lambda: clock[0])

    def pass_by(seconds, guard):
        clock[0] += seconds
        guard.check(seconds)

    return pass_by


def test_call_beyond_the_step_timeout_is_stuck(slow, activity, guard, stuck, later):
    def wait():
        later(6.0, guard)
        assert not stuck and not guard.overdue
        later(6.0, guard)
        assert guard.overdue == "clear_gradient has taken longer than --step-timeout-s, which is 10 s", "names no model"

    slow.during = wait
    monitor_backend(slow, activity).clear_gradient("model-7")
    assert stuck == ["clear_gradient (model-7) has taken longer than --step-timeout-s, which is 10 s"]
    later(1.0, guard)
    assert not guard.overdue and len(stuck) == 1


def test_time_of_compilation_has_its_own_limit(slow, activity, guard, stuck, later):
    def compile_and_compute():
        later(9.0, guard)
        slow.compiles = True
        later(99.0, guard)
        assert guard.describe_activity() == ("clear_gradient (compiling)", 108.0)
        assert not stuck
        later(2.0, guard)
        slow.compiles = False

    slow.during = compile_and_compute
    monitor_backend(slow, activity).clear_gradient("m")
    assert stuck == ["clear_gradient (m) has taken longer than --compile-timeout-s, which is 100 s"]


def test_each_call_has_the_whole_limit(slow, activity, guard, stuck, later):
    slow.during = lambda: later(9.0, guard)
    for _ in range(3):
        monitor_backend(slow, activity).clear_gradient("m")
    assert not stuck and not guard.overdue


def test_wait_for_files_is_reported_and_ends_nothing(activity, guard, stuck, later):
    with activity.track("waiting for files to be written"):
        later(11.0, guard)
        assert guard.overdue.startswith("waiting for files to be written has taken longer")
    assert not stuck
    activity.mark_idle()
    later(1000.0, guard)
    assert not guard.overdue and guard.describe_activity() is None


def test_suspended_time_does_not_count(slow, activity, guard, stuck, monkeypatch):
    """The watchdog limits how much time one check may count, so that a resumed process does not end immediately."""
    checks = []
    monkeypatch.setattr(guard, "check", checks.append)
    clock = iter((0.0, 3600.0, 3601.0))
    replace_clock(monkeypatch, lambda: next(clock))
    monkeypatch.setattr(guard._ended, "wait", lambda _: len(checks) == 2)
    guard._repeat()
    assert checks == [2.0, 1.0]


def test_hung_call_is_published_and_ends_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_STATUS_PERIOD_S", 0.02)
    harness = EngineHarness(tmp_path, step_timeout_s=0.2)
    released = threading.Event()
    reasons, reports = [], []

    class Hung(FakeBackend):
        def begin_pass(self, batch, *, backward):
            assert released.wait(60)
            return super().begin_pass(batch, backward=backward)

    model_id, _ = harness.create()
    passed = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    health = EngineHealth(harness.api, silence_s=0.1)

    def observe():
        until(lambda: "forward_backward" in (health.read_report().activity or ""))
        reports.append(health.read_report().activity)
        until(lambda: reasons and "--step-timeout-s" in (health.read_report().problem or ""))
        reports.append(health.read_report().problem)
        released.set()

    observer = threading.Thread(target=observe)
    observer.start()
    harness.run(passed, backend=Hung("tiny", harness.config), on_stuck=reasons.append)
    observer.join()
    assert reports[0].startswith("the engine has been busy for") and reports[0].endswith(": forward_backward")
    assert "forward_backward has taken longer than --step-timeout-s" in reports[1]
    assert reasons[0].startswith(f"forward_backward ({model_id}) has taken longer")
    assert harness.api.read(engine_state.get).detail == ""
    harness.close()


def test_an_error_while_the_backend_starts_is_not_taken_for_a_lost_device(activity) -> None:
    class CannotStart(FakeBackend):
        def start(self) -> Capabilities:
            raise PermissionError(errno.EACCES, "Permission denied", "/models/config.json")

        def check_devices(self) -> None:
            raise AttributeError("'CannotStart' object has no attribute '_params'")

    with pytest.raises(PermissionError) as raised:
        monitor_backend(CannotStart("fake", FakeConfig()), activity).start()
    end = EngineEnd.from_error(raised.value)
    assert end.is_final and not end.is_crash and end.message.startswith("/models/config.json: ")


def test_long_compilations_are_logged(slow, activity, guard, later, caplog):
    caplog.set_level("INFO", "skyrl_tx")

    def compile_program():
        slow.compiles = True
        for _ in range(12):
            later(1.0, guard)
        slow.compiles = False
        later(7.0, guard)

    slow.during = compile_program
    monitor_backend(slow, activity).clear_gradient("m")
    assert [record.message for record in caplog.records] == [
        f"clear_gradient (m) has been compiling for {seconds} s, because its shapes are new" for seconds in (5, 10)
    ]
