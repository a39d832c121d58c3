"""Long polls: clients wait for results without a thread or a query per client.

`ResultWatcher` watches the store with one thread and wakes the polls whose results have arrived.
`ResponsePriority` makes new requests wait while completed results of their owner are being sent.
`LongPollMiddleware` serves the polling endpoint before routing.
"""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPMethod

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.server.submission.validation import check_text
from skyrl_tx.store import StoreError, ValueRefused, completions, futures, keys, sessions
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_MARK_FETCHED_EVERY_S = 5.0
_CHECK_KEYS_EVERY_S = 1.0
_HEARTBEAT_EVERY_S = 20.0
"""Minimum time between two heartbeats that are written for a session with an open poll.

It is shorter than the hold time of a poll, so a client that only polls keeps its session alive. The
SDK itself also sends a heartbeat every 10 s.
"""
_MAX_PAUSE_S = 0.05
_PAGE = 5000
_MIN_HOLD_SHARE = 0.75
"""Minimum hold time of a poll, as a fraction of the configured hold time."""

Notification = asyncio.Future[bool]
"""A future that is resolved once: True if there may be a result to read, False after a timeout."""


async def wait_for(notification: Notification, timeout_s: float) -> bool:
    """Wait for a notification. Returns False after `timeout_s` seconds."""
    timer = asyncio.get_running_loop().call_later(timeout_s, _resolve, notification, False)
    try:
        return await notification
    finally:
        timer.cancel()


def _resolve(notification: Notification, value: bool) -> None:
    if not notification.done():
        notification.set_result(value)


def _notify(notifications: Iterable[Notification], value: bool = True) -> None:
    for notification in notifications:
        _resolve(notification, value)


@dataclass(frozen=True, slots=True)
class _NewPoll:
    """A poll that has just started. Its result may exist already. `owner` is None for an admin."""

    request_id: RequestId
    owner: str | None
    notification: Notification


class ResultWatcher:
    """Wakes the open polls of one event loop when their results exist.

    Must be started and closed on that loop.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Notification]] = {}
        self._by_key: dict[int, set[Notification]] = {}
        self._new: list[_NewPoll] = []
        self._seen = store.read(completions.get_last_position)
        self._fetched: set[RequestId] = set()
        self._marked_at = self._heartbeat_at = self._keys_checked_at = time.monotonic()
        self._random = random.Random()
        self._is_closed = False
        self._readers: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.observe_wakeup: Callable[[float], object] = lambda _: None
        """Called with the seconds since a result was written, for each poll that it wakes."""
        self._thread = ServiceThread("result-watcher", self._run)

    @property
    def is_closed(self) -> bool:
        """Whether the process is shutting down. No poll may be held then."""
        return self._is_closed

    @property
    def num_waiting(self) -> int:
        """The number of requests and sampling sessions that have an open poll."""
        return len(self._waiting)

    def add_reader(self, read: Callable[[], object]) -> None:
        """Register a function for the watcher's thread. Must be called before `start`.

        The thread calls it after each commit of the engine, and at least once a second.
        """
        self._readers.append(read)

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def release(self) -> None:
        """Wake all open polls, and hold no polls from now on. Called on the event loop.

        Idempotent.
        """
        with self._lock:
            self._is_closed = True
            waiting = [notification for notifications in self._waiting.values() for notification in notifications]
        _notify(waiting)
        self._store.wake()

    def close(self) -> None:
        """Release all polls and join the thread. Idempotent."""
        self.release()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def subscribe(self, name: RequestId | SamplingSessionId, key_id: int | None = None) -> Generator[Notification]:
        """Yield a notification for the result of a request, or any result of a sampling session.

        The notification does not cover results that exist already, so the caller must look for them
        inside the context. If the caller's key is revoked or expires, the notification resolves to
        False within about a second, as after a timeout.

        Raises UserError for an id that the database refuses, because with this id the watcher's
        queries would fail for all polls.
        """
        check_text(name, "id")
        notification: Notification = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(name, []).append(notification)
            if key_id is not None:
                self._by_key.setdefault(key_id, set()).add(notification)
            if self._is_closed:
                notification.set_result(True)

        try:
            yield notification
        finally:
            with self._lock:
                waiting = self._waiting[name]
                waiting.remove(notification)
                if not waiting:
                    del self._waiting[name]
                if key_id is not None:
                    self._by_key[key_id].remove(notification)
                    if not self._by_key[key_id]:
                        del self._by_key[key_id]

    async def wait_for_result(
        self, request_id: RequestId, owner: str | None, timeout_s: float, key_id: int | None = None
    ) -> bool:
        """Wait until a request has a result, or turns out not to exist for this owner.

        `owner` is None for an admin, who may read the results of all owners. Returns False after
        between 0.75 and 1 times `timeout_s` seconds, or when the caller's key ends.

        All new polls share one query. With a query per poll, thousands of polls would each occupy a
        thread twice.
        """
        with self.subscribe(request_id, key_id) as notification:
            with self._lock:
                self._new.append(_NewPoll(request_id, owner, notification))
                is_first = len(self._new) == 1
            if is_first:
                self._store.wake()
            # Random hold times, or polls that start together would always time out together, and
            # results would have to wait for hundreds of responses.
            return await wait_for(notification, timeout_s * self._random.uniform(_MIN_HOLD_SHARE, 1.0))

    def mark_fetched(self, request_id: RequestId) -> None:
        """Record that a client has received a result.

        The database gets such records in batches every 5 s. Only pruning reads them, and pruning can
        wait.
        """
        with self._lock:
            self._fetched.add(request_id)

    def _run(self) -> None:
        while not self._is_closed:
            self._store.wait(_WAIT_S)
            started_at = time.monotonic()
            try:
                self._check_new_polls()
                for read in self._readers:
                    read()
                self._notify_completed()
                self._release_polls_of_ended_keys()
                self._write_fetched()
                self._write_heartbeats()
            except (StoreError, ValueRefused) as error:
                _log.error("cannot read new results from the database; retrying in a second: %s", error)
                time.sleep(_WAIT_S)
            # Commits come in bursts. After a slow query over thousands of polls, let more commits
            # arrive before the next query.
            time.sleep(min(time.monotonic() - started_at, _MAX_PAUSE_S))

    def _check_new_polls(self) -> None:
        """Wake new polls whose request is completed, unknown, or belongs to another owner."""
        with self._lock:
            new, self._new = self._new, []
        owners: dict[RequestId, str] = {}
        try:
            if new:
                owners = self._store.read(lambda tx: futures.get_open_owners(tx, {poll.request_id for poll in new}))
        except ValueRefused as error:
            _log.error("the database refuses the id of a poll: %s", error)
        finally:  # after an error, every poll is woken, reads the store itself and reports its own error
            self._wake(
                poll.notification
                for poll in new
                if (owner := owners.get(poll.request_id)) is None or poll.owner not in (None, owner)
            )

    def _notify_completed(self) -> None:
        """Wake the polls of all requests that have completed since the last call."""
        is_more = True
        while is_more and (page := self._store.read(lambda tx: completions.list_completed(tx, self._seen, _PAGE))):
            self._seen, is_more = page[-1][0], len(page) == _PAGE
            with self._lock:
                due = [
                    (notification, completed_at)
                    for _, request_id, session_id, completed_at in page
                    for name in (request_id, session_id)
                    if name
                    for notification in self._waiting.get(name, ())
                ]
            self._wake(notification for notification, _ in due)
            now = time.time()
            for _, completed_at in due:
                self.observe_wakeup(max(now - completed_at, 0.0))

    def _release_polls_of_ended_keys(self) -> None:
        """End the polls whose key was revoked or has expired. Their next call gets a 401."""
        if time.monotonic() - self._keys_checked_at < _CHECK_KEYS_EVERY_S:
            return
        self._keys_checked_at = time.monotonic()
        with self._lock:
            polling = list(self._by_key)
        ended = self._store.read(lambda tx: keys.find_ended(tx, polling, time.time())) if polling else set[int]()
        with self._lock:
            due = [notification for key_id in ended for notification in self._by_key.get(key_id, ())]
        self._wake(due, False)

    def _wake(self, notifications: Iterable[Notification], value: bool = True) -> None:
        due = list(notifications)
        if due and self._loop is not None:
            self._loop.call_soon_threadsafe(_notify, due, value)

    def _write_fetched(self) -> None:
        now = time.monotonic()
        if now - self._marked_at < _MARK_FETCHED_EVERY_S:
            return
        self._marked_at = now
        with self._lock:
            fetched, self._fetched = self._fetched, set()

        def restore_after_error(written: Future[None]) -> None:
            if written.exception() is not None:
                with self._lock:
                    self._fetched |= fetched

        if fetched:  # do not wait: the engine may hold the write lock for a while, and more results arrive meanwhile
            written = self._store.write_soon(lambda tx: futures.mark_fetched(tx, fetched, time.time()))
            written.add_done_callback(restore_after_error)

    def _write_heartbeats(self) -> None:
        """Record heartbeats for sessions with an open poll, because some clients send none."""
        now = time.monotonic()
        if now - self._heartbeat_at < _HEARTBEAT_EVERY_S:
            return
        self._heartbeat_at = now
        with self._lock:
            polled = [RequestId(name) for name in self._waiting]
        heard_at = time.time()
        silent = self._store.read(
            lambda tx: sessions.find_waiting_without_heartbeat(tx, polled, heard_at - _HEARTBEAT_EVERY_S)
        )
        if silent:
            self._store.write_soon(lambda tx: [sessions.record_heartbeat(tx, name, heard_at) for name in silent])


class ResponsePriority:
    """Lets the results of an owner go out before its new requests come in. Used on one event loop.

    Hundreds of requests may complete at the same time. Every client that has its result sends a new
    request at once, and serving a request takes longer than writing a result. Without this
    priority, the last clients would get their results only after the new requests of the first
    clients. Requests of other owners do not wait.
    """

    def __init__(self, *, max_wait_s: float = 0.25) -> None:
        """`max_wait_s` is the longest time that a new request waits, in seconds."""
        self._max_wait_s = max_wait_s
        self._num_writing: Counter[str] = Counter()
        self._are_written: dict[str, asyncio.Event] = {}

    @contextmanager
    def mark_writing(self, owner: str) -> Generator[None]:
        """Inside the context, the caller reads and encodes a result of an owner."""
        self._num_writing[owner] += 1
        self._are_written.setdefault(owner, asyncio.Event())
        try:
            yield
        finally:
            self._num_writing[owner] -= 1
            if not self._num_writing[owner]:
                del self._num_writing[owner]
                self._are_written.pop(owner).set()

    @property
    def is_idle(self) -> bool:
        """Whether no result is being written."""
        return not self._are_written

    async def wait_for_results(self, owner: str) -> None:
        """Wait until no result of an owner is being written, for at most `max_wait_s` seconds."""
        are_written = self._are_written.get(owner)
        if are_written is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(are_written.wait(), self._max_wait_s)


@dataclass(frozen=True, slots=True)
class LongPollMiddleware:
    """ASGI middleware that serves POST requests of the polling endpoint, before routing.

    All other requests first wait for the results of their owner, see `ResponsePriority`.

    Every layer between socket and endpoint stays in memory as long as a poll is open, and the
    garbage collector traverses all of them. Without the layers of the router, 10,000 polls take
    half the time and memory.
    """

    app: ASGIApp
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    handle_error: Callable[[Request, Exception], Awaitable[Response]]
    wait_for_results: Callable[[Scope], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or scope["path"] != self.path or scope["method"] != HTTPMethod.POST:
            if scope["type"] == "http":
                await self.wait_for_results(scope)
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self.endpoint(request)
        except Exception as error:
            response = await self.handle_error(request, error)
        await response(scope, receive, send)
