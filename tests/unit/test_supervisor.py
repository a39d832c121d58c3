"""When the engine is started again, when not, and how both halves end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from skyrl_tx import supervisor
from skyrl_tx.engine_process import EngineEnd, EngineReady
from skyrl_tx.listening import CannotServe
from skyrl_tx.store.errors import StoreBlocked, StoreError, StoreUnreachable
from skyrl_tx.supervisor import EngineKeeper, Restarts

READY = EngineReady(num_parameters=1, devices=("cpu",))
CRASH = EngineEnd(message="killed by SIGKILL", is_final=False)
REFUSAL = EngineEnd(message="no such model", is_final=True)


@dataclass
class Life:
    """An engine that gets ready or not, and ends as told, or when asked to."""

    ready: bool
    end: EngineEnd | None
    pid: int = 1
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def live(self, on_ready: Callable[[EngineReady], None]) -> EngineEnd:
        if self.ready:
            on_ready(READY)
        if self.end is None:
            await self.asked.wait()
        return self.end or EngineEnd(message="exited with status 0", is_final=False)

    def ask_to_stop(self) -> None:
        self.asked.set()

    def kill(self) -> None:
        self.asked.set()


@dataclass
class Story:
    lives: list[Life]
    progressed: list[bool]
    greetings: int = 0

    def greet(self, ready: EngineReady) -> None:
        assert ready == READY
        self.greetings += 1

    def keeper(self, max_starts: int) -> EngineKeeper:
        lives, progressed = iter(self.lives), iter(self.progressed)
        return EngineKeeper(
            lambda: next(lives),
            Restarts(max_starts, first_delay_s=0.001),
            on_ready=self.greet,
            has_progressed=lambda since: next(progressed),
        )


def test_delays_double_up_to_a_limit_and_start_over_after_progress() -> None:
    restarts = Restarts(20)
    delays = [restarts.next_delay_s(made_progress=False) for _ in range(9)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert restarts.next_delay_s(made_progress=True) == 0.25


def test_it_gives_up_after_so_many_starts_without_progress() -> None:
    story = Story([Life(True, CRASH)] * 5, [False, True, False, False])
    with pytest.raises(CannotServe, match=r"keeps dying.*SIGKILL"):
        asyncio.run(story.keeper(3).run())
    assert story.greetings == 1


def test_a_refusal_at_the_first_start_is_final_and_told_as_it_is() -> None:
    with pytest.raises(CannotServe, match=r"^no such model$"):
        asyncio.run(Story([Life(False, REFUSAL)], []).keeper(5).run())


def test_a_crash_at_the_first_start_is_tried_again() -> None:
    async def run() -> None:
        last = Life(True, None)
        keeper = Story([Life(False, CRASH), last], [False]).keeper(5)
        running = asyncio.create_task(keeper.run())
        while not keeper.is_ready:
            await asyncio.sleep(0)
        keeper.stop()
        await running

    asyncio.run(run())


def test_a_refusal_after_the_engine_was_ready_once_is_tried_again() -> None:
    story = Story([Life(True, CRASH), Life(False, REFUSAL), Life(True, CRASH)], [True, False, False])
    with pytest.raises(CannotServe, match="keeps dying"):
        asyncio.run(story.keeper(3).run())


def test_stopping_while_waiting_to_start_again_starts_no_more() -> None:
    async def run() -> None:
        keeper = EngineKeeper(
            lambda: Life(True, CRASH),
            Restarts(5, first_delay_s=60),
            on_ready=story.greet,
            has_progressed=lambda _: False,
        )
        running = asyncio.create_task(keeper.run())
        while not keeper.is_ready:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        keeper.stop()
        await asyncio.wait_for(running, 5)

    story = Story([], [])
    asyncio.run(run())


def keeper_told(monkeypatch: pytest.MonkeyPatch, *answers: bool | StoreError) -> EngineKeeper:
    """Of engines that crash, on a database that answers so when it is asked for progress."""
    monkeypatch.setattr(supervisor, "_DATABASE_AGAIN_S", 0.001)
    left = iter(answers)

    def has_progressed(_since: float) -> bool:
        answer = next(left)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    restarts = Restarts(2, first_delay_s=0.001)
    return EngineKeeper(lambda: Life(True, CRASH), restarts, on_ready=lambda _: None, has_progressed=has_progressed)


@pytest.mark.parametrize("kind", [StoreUnreachable, StoreBlocked])
def test_a_database_that_cannot_be_asked_for_now_is_no_engines_fault(monkeypatch, caplog, kind) -> None:
    away = [kind("database: not now")] * 3
    with pytest.raises(CannotServe, match="keeps dying"):
        asyncio.run(keeper_told(monkeypatch, *away, False, *away, False, False).run())
    assert caplog.text.count("not now") == 2, "said once for each time"


def test_a_database_that_fails_for_good_ends_the_server_in_words(monkeypatch) -> None:
    with pytest.raises(CannotServe, match=r"^database x: it is damaged$"):
        asyncio.run(keeper_told(monkeypatch, StoreError("database x: it is damaged")).run())
