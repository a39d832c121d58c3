"""Long polls: which events wake them, and what they cost."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_tx.contract.ids import RequestId, SamplingSessionId, SessionId
from skyrl_tx.server.http import long_poll
from skyrl_tx.server.http.long_poll import ResultWatcher, wait_for
from skyrl_tx.store import StoreError, ValueRefused, completions, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.sqlite import SqliteNotifier
from tests.support.polling import until

SAMPLER = SamplingSessionId("s:sample:0")


@pytest.fixture
def session_id(store: Store) -> SessionId:
    about: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": None, "project_id": None}
    return store.write(lambda tx: sessions.create(tx, owner="ann", now=1.0, **about))


def submit(store: Store, session_id: SessionId) -> RequestId:
    new = NewRequest(
        key="", kind="sample", owner="ann", session_id=session_id, body=b"b", sampling_session_id=SAMPLER, seq_id=1
    )
    return store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id


def complete(store: Store, request_id: RequestId) -> None:
    store.write(lambda tx: futures.complete(tx, request_id, b"r", failed=False, effect_order=None, now=2.0))
    store.wake()  # the engine sends a notification after a commit


@pytest.fixture
def run(store: Store) -> Callable[..., Any]:
    """Return a function that runs a coroutine with a result watcher on a new event loop."""

    def run_on_loop(work: Callable[[ResultWatcher], Any]) -> Any:
        async def main() -> Any:
            watcher = ResultWatcher(store)
            watcher.start()
            try:
                return await work(watcher)
            finally:
                watcher.close()

        return asyncio.run(main())

    return run_on_loop


def test_result_wakes_only_its_polls(store: Store, session_id: SessionId, run: Callable[..., Any]) -> None:
    polled, other = submit(store, session_id), submit(store, session_id)

    async def work(watcher: ResultWatcher) -> None:
        own, others = (
            asyncio.create_task(watcher.wait_for_result(request_id, "ann", 20)) for request_id in (polled, other)
        )
        with watcher.subscribe(SAMPLER) as any_of_session:
            await asyncio.sleep(0.05)
            assert not own.done() and not any_of_session.done()
            await asyncio.to_thread(complete, store, polled)
            assert await own and await wait_for(any_of_session, 20)
        assert not others.done()
        others.cancel()

    run(work)


def test_poll_returns_at_once_for_completed_and_foreign_requests(
    store: Store, session_id: SessionId, run: Callable[..., Any]
) -> None:
    completed, running = submit(store, session_id), submit(store, session_id)
    complete(store, completed)

    async def work(watcher: ResultWatcher) -> None:
        assert await watcher.wait_for_result(completed, "ann", 20)
        assert await watcher.wait_for_result(RequestId("never"), "ann", 20)
        assert await watcher.wait_for_result(running, "bob", 20)
        assert not await watcher.wait_for_result(running, "ann", 0.02)
        assert not await watcher.wait_for_result(running, None, 0.02)

    run(work)


def test_concurrent_polls_share_one_query(
    store: Store, session_id: SessionId, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = [submit(store, session_id) for _ in range(100)]
    queries: list[int] = []
    query = futures.get_open_owners

    def count_query(tx: Any, ids: Any) -> Any:
        queries.append(len(ids))
        return query(tx, ids)

    monkeypatch.setattr(futures, "get_open_owners", count_query)

    async def work(watcher: ResultWatcher) -> None:
        assert not any(
            await asyncio.gather(*(watcher.wait_for_result(request_id, "ann", 0.3) for request_id in polled))
        )

    run(work)
    assert sum(queries) == 100 and len(queries) <= 3


def test_shutdown_releases_open_polls(store: Store, session_id: SessionId, run: Callable[..., Any]) -> None:
    polled = submit(store, session_id)

    async def work(watcher: ResultWatcher) -> None:
        held = asyncio.create_task(watcher.wait_for_result(polled, "ann", 20))
        await asyncio.sleep(0.02)
        watcher.release()
        assert await held and await watcher.wait_for_result(polled, "ann", 60)

    run(work)


def test_poll_is_woken_when_the_query_fails(
    store: Store, session_id: SessionId, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tx: Any, ids: Any) -> Any:
        raise StoreError("no disk")

    polled = submit(store, session_id)
    monkeypatch.setattr(futures, "get_open_owners", fail)
    assert run(lambda watcher: watcher.wait_for_result(polled, "ann", 20)) is True


def test_results_arrive_after_an_error_of_the_look_for_commits(
    store: Store, session_id: SessionId, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = submit(store, session_id)
    read_version, num_errors = SqliteNotifier._version, 0

    def fail_at_first(notifier: SqliteNotifier) -> int:
        nonlocal num_errors
        num_errors += 1
        if num_errors <= 3:
            raise sqlite3.OperationalError("disk I/O error")
        return read_version(notifier)

    async def work(watcher: ResultWatcher) -> None:
        polling = asyncio.create_task(watcher.wait_for_result(polled, "ann", 20))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(SqliteNotifier, "_version", fail_at_first)
        await asyncio.to_thread(until, lambda: num_errors)
        await asyncio.to_thread(complete, store, polled)
        assert await polling

    run(work)


def test_id_that_the_database_refuses_ends_only_its_poll(
    store: Store, session_id: SessionId, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL rejects text with a NUL character."""
    monkeypatch.setattr("skyrl_tx.server.http.long_poll._WAIT_S", 0.02)
    query = futures.get_open_owners

    def refuse(tx: Any, ids: Any) -> Any:
        if "zero" in ids:
            raise ValueRefused("a value cannot be stored")
        return query(tx, ids)

    monkeypatch.setattr(futures, "get_open_owners", refuse)
    polled = submit(store, session_id)

    async def work(watcher: ResultWatcher) -> None:
        assert await watcher.wait_for_result(RequestId("zero"), "ann", 20)
        polling = asyncio.create_task(watcher.wait_for_result(polled, "ann", 20))
        await asyncio.to_thread(complete, store, polled)
        assert await polling

    run(work)


def test_results_arrive_while_the_database_is_locked(
    store: Store, session_id: SessionId, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marking results as fetched waits for the write lock, but polls do not."""
    monkeypatch.setattr("skyrl_tx.server.http.long_poll._MARK_FETCHED_EVERY_S", 0.0)
    fetched, polled = submit(store, session_id), submit(store, session_id)
    complete(store, fetched)
    is_done: list[bool] = []

    def keep_busy(tx: Any) -> None:
        end = time.monotonic() + 60
        while not is_done and time.monotonic() < end:
            time.sleep(0.01)

    async def work(watcher: ResultWatcher) -> None:
        complete(store, polled)
        seen = store.read(completions.get_last_position)
        busy = store.write_soon(keep_busy)
        watcher.mark_fetched(fetched)
        store.wake()
        await asyncio.sleep(0.05)
        started_at = time.monotonic()
        assert seen == 2 and await watcher.wait_for_result(polled, "ann", 20)
        assert time.monotonic() - started_at < 30
        is_done.append(True)
        await asyncio.to_thread(busy.result)

    run(work)


@pytest.mark.parametrize("ends", [None, "finished", "completed"])
def test_open_poll_counts_as_heartbeat(
    store: Store,
    session_id: SessionId,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    ends: str | None,
) -> None:
    monkeypatch.setattr(long_poll, "_HEARTBEAT_EVERY_S", 0.05)
    polled, other = submit(store, session_id), submit(store, session_id)
    if ends == "finished":
        store.write(lambda tx: sessions.finish(tx, session_id, "over", 1.0))
    if ends == "completed":
        complete(store, polled)

    def last_heartbeat() -> float:
        row = store.read(lambda tx: sessions.get(tx, session_id))
        assert row is not None
        return row.last_heartbeat_at

    async def work(watcher: ResultWatcher) -> None:
        polling = asyncio.create_task(watcher.wait_for_result(polled, "ann", 0.5))
        for _ in range(3):
            await asyncio.sleep(0.1)
            store.wake()
        assert await polling is (ends == "completed")

    started_at = time.time()
    run(work)
    assert last_heartbeat() == 1.0 if ends else last_heartbeat() >= started_at
    complete(store, other)


def test_session_with_heartbeats_costs_no_write(store: Store, session_id: SessionId) -> None:
    heartbeat_at = time.time() + 5.0
    store.write(lambda tx: sessions.record_heartbeat(tx, session_id, heartbeat_at))
    polled = submit(store, session_id)
    assert store.read(lambda tx: sessions.find_waiting_without_heartbeat(tx, [polled], heartbeat_at)) == set()
    assert store.read(
        lambda tx: sessions.find_waiting_without_heartbeat(tx, [polled, RequestId("req-other")], heartbeat_at + 1)
    ) == {session_id}
