"""Calls that wait: who is woken, by what, and what it costs."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_tx.api import waiters as waiters_module
from skyrl_tx.api.waiters import Waiters, within
from skyrl_tx.contract.ids import RequestId, SamplingSessionId, SessionId
from skyrl_tx.store import completions, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError
from skyrl_tx.store.futures import NewRequest

SAMPLER = SamplingSessionId("s:sample:0")


@pytest.fixture
def session_id(store: Store) -> SessionId:
    about: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": None, "project_id": None}
    return store.write(lambda tx: sessions.create(tx, owner="ann", display_name=None, now=1.0, **about))


def submit(store: Store, session_id: SessionId) -> RequestId:
    new = NewRequest(
        key="", kind="sample", owner="ann", session_id=session_id, body=b"b", sampling_session_id=SAMPLER, seq_id=1
    )
    return store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id


def answer(store: Store, request_id: RequestId) -> None:
    store.write(lambda tx: futures.complete(tx, request_id, b"r", failed=False, effect_order=None, now=2.0))
    store.wake()  # as the engine's bell does


@pytest.fixture
def waiting(store: Store) -> Callable[..., Any]:
    """Run a piece of work on a loop, with waiters that are closed after it."""

    def run(work: Callable[[Waiters], Any]) -> Any:
        async def main() -> Any:
            waiters = Waiters(store)
            waiters.start()
            try:
                return await work(waiters)
            finally:
                waiters.close()

        return asyncio.run(main())

    return run


def test_an_answer_wakes_whoever_waits_for_it_and_nobody_else(
    store: Store, session_id: SessionId, waiting: Callable[..., Any]
) -> None:
    asked, other = submit(store, session_id), submit(store, session_id)

    async def work(waiters: Waiters) -> None:
        mine, others = (asyncio.create_task(waiters.has_news(each, "ann", 20)) for each in (asked, other))
        with waiters.expecting(SAMPLER) as any_of_session:
            await asyncio.sleep(0.05)
            assert not mine.done() and not any_of_session.done()
            await asyncio.to_thread(answer, store, asked)
            assert await mine and await within(any_of_session, 20)
        assert not others.done()
        others.cancel()

    waiting(work)


def test_what_is_answered_already_or_not_ones_own_is_not_waited_for(
    store: Store, session_id: SessionId, waiting: Callable[..., Any]
) -> None:
    answered, running = submit(store, session_id), submit(store, session_id)
    answer(store, answered)

    async def work(waiters: Waiters) -> None:
        assert await waiters.has_news(answered, "ann", 20)
        assert await waiters.has_news(RequestId("never"), "ann", 20)
        assert await waiters.has_news(running, "bob", 20)
        assert not await waiters.has_news(running, "ann", 0.02)
        assert not await waiters.has_news(running, None, 0.02)

    waiting(work)


def test_calls_that_come_together_share_a_look(
    store: Store, session_id: SessionId, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [submit(store, session_id) for _ in range(100)]
    looks: list[int] = []
    look = futures.owners_of_open

    def counted(tx: Any, ids: Any) -> Any:
        looks.append(len(ids))
        return look(tx, ids)

    monkeypatch.setattr(futures, "owners_of_open", counted)

    async def work(waiters: Waiters) -> None:
        assert not any(await asyncio.gather(*(waiters.has_news(each, "ann", 0.3) for each in asked)))

    waiting(work)
    assert sum(looks) == 100 and len(looks) <= 3


def test_the_end_of_the_server_lets_everyone_go(
    store: Store, session_id: SessionId, waiting: Callable[..., Any]
) -> None:
    asked = submit(store, session_id)

    async def work(waiters: Waiters) -> None:
        held = asyncio.create_task(waiters.has_news(asked, "ann", 20))
        await asyncio.sleep(0.02)
        waiters.release()
        assert await held and await waiters.has_news(asked, "ann", 60)

    waiting(work)


def test_a_look_that_fails_is_left_to_the_call(
    store: Store, session_id: SessionId, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tx: Any, ids: Any) -> Any:
        raise StoreError("no disk")

    asked = submit(store, session_id)
    monkeypatch.setattr(futures, "owners_of_open", fail)
    assert waiting(lambda waiters: waiters.has_news(asked, "ann", 20)) is True


def test_answers_come_while_the_database_is_locked(
    store: Store, session_id: SessionId, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is noted of fetched results waits for the lock; nobody who waits for an answer does."""
    monkeypatch.setattr("skyrl_tx.api.waiters._NOTE_FETCHED_EVERY_S", 0.0)
    fetched, asked = submit(store, session_id), submit(store, session_id)
    answer(store, fetched)
    is_over: list[bool] = []

    def keep_busy(tx: Any) -> None:
        end = time.monotonic() + 60
        while not is_over and time.monotonic() < end:
            time.sleep(0.01)

    async def work(waiters: Waiters) -> None:
        answer(store, asked)
        seen = store.read(completions.last_order)
        busy = store.write_soon(keep_busy)
        waiters.note_fetched(fetched)
        store.wake()
        await asyncio.sleep(0.05)
        begun_at = time.monotonic()
        assert seen == 2 and await waiters.has_news(asked, "ann", 20)
        assert time.monotonic() - begun_at < 30
        is_over.append(True)
        await asyncio.to_thread(busy.result)

    waiting(work)


@pytest.mark.parametrize("ends", [None, "finished", "answered"])
def test_whoever_waits_for_an_answer_is_there_though_no_heartbeat_says_so(
    store: Store,
    session_id: SessionId,
    waiting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    ends: str | None,
) -> None:
    monkeypatch.setattr(waiters_module, "_NOTE_ASKERS_EVERY_S", 0.05)
    asked, other = submit(store, session_id), submit(store, session_id)
    if ends == "finished":
        store.write(lambda tx: sessions.finish(tx, session_id, "over", 1.0))
    if ends == "answered":
        answer(store, asked)

    def heard_at() -> float:
        row = store.read(lambda tx: sessions.get(tx, session_id))
        assert row is not None
        return row.last_heartbeat_at

    async def work(waiters: Waiters) -> None:
        asking = asyncio.create_task(waiters.has_news(asked, "ann", 0.5))
        for _ in range(3):
            await asyncio.sleep(0.1)
            store.wake()
        assert await asking is (ends == "answered")

    began = time.time()
    waiting(work)
    assert heard_at() == 1.0 if ends else heard_at() >= began
    answer(store, other)


def test_who_says_so_itself_costs_no_write(store: Store, session_id: SessionId) -> None:
    told = time.time() + 5.0
    store.write(lambda tx: sessions.heartbeat(tx, session_id, told))
    asked = submit(store, session_id)
    assert store.read(lambda tx: sessions.silent_askers(tx, [asked], told)) == set()
    assert store.read(lambda tx: sessions.silent_askers(tx, [asked, RequestId("req-other")], told + 1)) == {session_id}
