"""Restarts of the engine process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.launch import supervisor
from skyrl_tx.launch.launcher import EngineEnd
from skyrl_tx.launch.supervisor import EngineSupervisor, RestartPolicy
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.store import StoreBlocked, StoreError, StoreUnreachable
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

READY = FakeBackend("tiny", FakeConfig()).start()
CRASH = EngineEnd(message="killed by SIGSEGV", is_final=False, is_crash=True)
KILL = EngineEnd(message="killed by SIGKILL", is_final=False, is_crash=False, was_killed=True)
CANNOT_START = EngineEnd(message="no such model", is_final=True, is_crash=False)


@dataclass
class FakeProcess:
    """A fake engine process that may become ready, and that exits in a given way or on request."""

    ready: bool
    end: EngineEnd | None
    pid: int = 1
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, on_ready: Callable[[Capabilities], None]) -> EngineEnd:
        if self.ready:
            on_ready(READY)
        if self.end is None:
            await self.stop_requested.wait()
        return self.end or EngineEnd(message="exited with status 0", is_final=False, is_crash=False)

    def request_stop(self) -> None:
        self.stop_requested.set()

    def kill(self) -> None:
        self.stop_requested.set()


@dataclass
class Scenario:
    """A sequence of engine processes, and whether each made progress."""

    processes: list[FakeProcess]
    progressed: list[bool]
    num_ready: int = 0

    def on_ready(self, ready: Capabilities) -> None:
        assert ready == READY
        self.num_ready += 1

    def supervisor(self, max_starts: int) -> EngineSupervisor:
        processes, progressed = iter(self.processes), iter(self.progressed)
        return EngineSupervisor(
            lambda: next(processes),
            RestartPolicy(max_starts, first_delay_s=0.001),
            on_ready=self.on_ready,
            record_end=lambda end, since: next(progressed),
        )


def test_delays_double_up_to_a_limit_and_reset_after_progress() -> None:
    restarts = RestartPolicy(20)
    delays = [restarts.compute_next_delay_s(made_progress=False) for _ in range(9)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert restarts.compute_next_delay_s(made_progress=True) == 0.25


def test_gives_up_after_the_limit_of_starts_without_progress() -> None:
    scenario = Scenario([FakeProcess(True, CRASH)] * 5, [False, True, False, False])
    with pytest.raises(CannotServe, match=r"crashes repeatedly.*SIGSEGV"):
        asyncio.run(scenario.supervisor(3).run())
    assert scenario.num_ready == 1


def test_kills_from_outside_do_not_count_as_starts_without_progress() -> None:
    scenario = Scenario([FakeProcess(True, KILL)] * 5 + [FakeProcess(True, CRASH)] * 2, [False] * 7)
    with pytest.raises(CannotServe, match=r"crashes repeatedly.*SIGSEGV"):
        asyncio.run(scenario.supervisor(3).run())


def test_a_failure_of_the_first_start_is_final() -> None:
    with pytest.raises(CannotServe, match=r"^no such model$"):
        asyncio.run(Scenario([FakeProcess(False, CANNOT_START)], []).supervisor(5).run())


def test_a_crash_during_the_first_start_is_retried() -> None:
    async def run() -> None:
        last = FakeProcess(True, None)
        engine = Scenario([FakeProcess(False, CRASH), last], [False]).supervisor(5)
        running = asyncio.create_task(engine.run())
        while not engine.was_ready:
            await asyncio.sleep(0)
        engine.stop()
        await running

    asyncio.run(run())


def test_a_failed_start_is_retried_after_the_engine_was_ready() -> None:
    scenario = Scenario(
        [FakeProcess(True, CRASH), FakeProcess(False, CANNOT_START), FakeProcess(True, CRASH)], [True, False, False]
    )
    with pytest.raises(CannotServe, match="crashes repeatedly"):
        asyncio.run(scenario.supervisor(3).run())


def is_follower_stopped(process: FakeProcess, *, num_signals: int) -> bool:
    """Return whether the signals alone stopped a follower host, before rank 0 ended."""

    async def run() -> bool:
        follower = Scenario([process], []).supervisor(5)
        running = asyncio.create_task(follower.run())
        for _ in range(5):
            await asyncio.sleep(0)
        for _ in range(num_signals):
            follower.stop_after_rank_0(within_s=60.0)
        await asyncio.sleep(0)
        was_stopped = process.stop_requested.is_set()
        process.stop_requested.set()
        await running
        return was_stopped

    return asyncio.run(run())


def test_a_host_that_follows_is_stopped_when_rank_0_has_ended_or_by_a_second_signal() -> None:
    """Rank 0 is often stopped at the same time, and needs all hosts for its last step and snapshots."""
    assert not is_follower_stopped(FakeProcess(True, None), num_signals=1)
    assert is_follower_stopped(FakeProcess(True, None), num_signals=2)
    assert is_follower_stopped(FakeProcess(False, None), num_signals=1), "it waits for rank 0, or loads"


def test_a_host_that_follows_is_stopped_after_a_time() -> None:
    async def run() -> None:
        follower = Scenario([FakeProcess(True, None)], []).supervisor(5)
        running = asyncio.create_task(follower.run())
        while not follower.was_ready:
            await asyncio.sleep(0)
        follower.stop_after_rank_0(within_s=0.01)
        await running

    asyncio.run(run())


def test_stop_during_the_restart_delay() -> None:
    async def run() -> None:
        engine = EngineSupervisor(
            lambda: FakeProcess(True, CRASH),
            RestartPolicy(5, first_delay_s=60),
            on_ready=scenario.on_ready,
            record_end=lambda end, since: False,
        )
        running = asyncio.create_task(engine.run())
        while not engine.was_ready:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        engine.stop()
        await asyncio.wait_for(running, 5)

    scenario = Scenario([], [])
    asyncio.run(run())


def crashing_engine(monkeypatch: pytest.MonkeyPatch, *answers: bool | StoreError) -> EngineSupervisor:
    """Return a supervisor of crashing engines.

    `answers` are the results of the progress queries.
    """
    monkeypatch.setattr(supervisor, "_DATABASE_RETRY_S", 0.001)
    left = iter(answers)

    def record_end(_end: EngineEnd, _started_at: float) -> bool:
        answer = next(left)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    restarts = RestartPolicy(2, first_delay_s=0.001)
    return EngineSupervisor(lambda: FakeProcess(True, CRASH), restarts, on_ready=lambda _: None, record_end=record_end)


@pytest.mark.parametrize("kind", [StoreUnreachable, StoreBlocked])
def test_exits_while_the_database_is_unavailable_do_not_count(monkeypatch, caplog, kind) -> None:
    unavailable = [kind("database: not now")] * 3
    with pytest.raises(CannotServe, match="crashes repeatedly"):
        asyncio.run(crashing_engine(monkeypatch, *unavailable, False, *unavailable, False, False).run())
    assert caplog.text.count("not now") == 2, "logged once per outage"


def test_a_database_failure_ends_the_server_with_its_message(monkeypatch) -> None:
    with pytest.raises(CannotServe, match=r"^database x: it is damaged$"):
        asyncio.run(crashing_engine(monkeypatch, StoreError("database x: it is damaged")).run())
