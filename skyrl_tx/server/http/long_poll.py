"""Long polls: one thread watches the store for all open polls and wakes those whose result exists.

`ResultWatcher` wakes the polls, `ResponsePriority` lets results go out before new requests come in, and
`LongPollMiddleware` serves the endpoint before routing.
"""

import asyncio
import logging
import random
import threading
import time
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
from skyrl_tx.store import completions, futures, keys, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError, ValueRefused

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_MARK_FETCHED_EVERY_S = 5.0
_CHECK_KEYS_EVERY_S = 1.0
_HEARTBEAT_EVERY_S = 20.0
"""Shorter than the hold time of a poll, so every poll counts. The SDK itself sends a heartbeat every 10 s."""
_MAX_PAUSE_S = 0.05
_PAGE = 5000
_MIN_HOLD_SHARE = 0.75
"""The shortest hold of a poll, as a share of the limit."""

Notification = asyncio.Future[bool]
"""Resolved once: True when there is something to read, False when the time is over."""


async def wait_for(notification: Notification, timeout_s: float) -> bool:
    """Wait for a notification, at most `timeout_s` seconds. Returns False after a timeout."""
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
    """A poll that started; its result may exist already. `owner` None: an admin asks."""

    request_id: RequestId
    owner: str | None
    notification: Notification


class ResultWatcher:
    """Wakes the open polls of one event loop when their results exist. Started and closed on that loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Notification]] = {}
        self._of_key: dict[int, set[Notification]] = {}
        self._new: list[_NewPoll] = []
        self._seen = store.read(completions.get_last_position)
        self._fetched: set[RequestId] = set()
        self._marked_at = self._heartbeat_at = self._keys_checked_at = time.monotonic()
        self._random = random.Random()
        self._is_closed = False
        self._readers: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.observe_wakeup: Callable[[float], object] = lambda _: None
        """Called for each woken poll with the seconds since its result was written."""
        self._thread = ServiceThread("result-watcher", self._run)

    @property
    def is_closed(self) -> bool:
        """Whether the process shuts down and no poll may be held."""
        return self._is_closed

    @property
    def num_waiting(self) -> int:
        """The number of requests and sampling sessions with an open poll."""
        return len(self._waiting)

    def add_reader(self, read: Callable[[], object]) -> None:
        """Call a function on the watcher's thread after each commit of the engine, and each second.

        Called before `start`.
        """
        self._readers.append(read)

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def release(self) -> None:
        """Wake all open polls and hold none from now on. Called on the loop; idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [notification for each in self._waiting.values() for notification in each]
        _notify(waiting)
        self._store.wake()

    def close(self) -> None:
        """Release all polls and join the thread. Idempotent."""
        self.release()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def subscribe(self, name: RequestId | SamplingSessionId, key_id: int | None = None) -> Generator[Notification]:
        """Yield a notification that resolves when a request, or any request of a sampling session, has its result.

        Results that exist already are not announced: the caller looks for them inside the context. About a second after
        the caller's key is revoked or expires, the notification resolves to False, as if the time were over.
        """
        notification: Notification = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(name, []).append(notification)
            if key_id is not None:
                self._of_key.setdefault(key_id, set()).add(notification)
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
                    self._of_key[key_id].remove(notification)
                    if not self._of_key[key_id]:
                        del self._of_key[key_id]

    async def wait_for_result(
        self, request_id: RequestId, owner: str | None, timeout_s: float, key_id: int | None = None
    ) -> bool:
        """Wait until a request has its result, or does not exist for this owner (None: for an admin).

        Waits between 0.75 and 1 times `timeout_s` and returns False after that, or when the caller's key ends.
        Thousands of polls share one query; a query per poll would take a thread for each, twice.
        """
        with self.subscribe(request_id, key_id) as notification:
            with self._lock:
                self._new.append(_NewPoll(request_id, owner, notification))
                is_first = len(self._new) == 1
            if is_first:
                self._store.wake()
            # Polls that started together would always time out together, and results would wait for all of them.
            return await wait_for(notification, timeout_s * self._random.uniform(_MIN_HOLD_SHARE, 1.0))

    def mark_fetched(self, request_id: RequestId) -> None:
        """Record that a client received its result. Written in batches, because only pruning reads it."""
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
            except (StoreError, ValueRefused) as error:  # the polls of a refused id are woken and report it
                _log.error("cannot look for results; retrying: %s", error)
                time.sleep(_WAIT_S)
            # Commits come in bursts: after a query over thousands of polls, let some gather before the next one.
            time.sleep(min(time.monotonic() - started_at, _MAX_PAUSE_S))

    def _check_new_polls(self) -> None:
        """Wake new polls whose request is completed or unknown."""
        with self._lock:
            new, self._new = self._new, []
        owners: dict[RequestId, str] = {}
        try:
            if new:
                owners = self._store.read(lambda tx: futures.get_open_owners(tx, {each.request_id for each in new}))
        finally:  # after an error each poll is woken and reads the store itself
            self._wake(
                each.notification
                for each in new
                if (owner := owners.get(each.request_id)) is None or each.owner not in (None, owner)
            )

    def _notify_completed(self) -> None:
        """Wake the polls of all requests that completed since the last call."""
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
        """End the polls whose key was revoked or expired; their next call is refused."""
        if time.monotonic() - self._keys_checked_at < _CHECK_KEYS_EVERY_S:
            return
        self._keys_checked_at = time.monotonic()
        with self._lock:
            polling = list(self._of_key)
        ended = self._store.read(lambda tx: keys.find_ended(tx, polling, time.time())) if polling else set[int]()
        with self._lock:
            due = [notification for key_id in ended for notification in self._of_key.get(key_id, ())]
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

        if fetched:  # not waited for: the engine may hold the write lock for a while, and results arrive meanwhile
            written = self._store.write_soon(lambda tx: futures.mark_fetched(tx, fetched, time.time()))
            written.add_done_callback(restore_after_error)

    def _write_heartbeats(self) -> None:
        """Refresh the heartbeat of sessions that have an open long poll: not every client sends heartbeats."""
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
            self._store.write_soon(lambda tx: [sessions.record_heartbeat(tx, each, heard_at) for each in silent])


class ResponsePriority:
    """Writes completed results before new requests are accepted, for the calls of one event loop.

    Hundreds of requests may complete at once, and each client that has its result sends its next request, which costs
    more than writing a result. Without priority the last results wait for the requests of the first clients.
    """

    def __init__(self, *, max_wait_s: float = 0.25) -> None:
        """A new request waits at most `max_wait_s` seconds."""
        self._max_wait_s = max_wait_s
        self._num_writing = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def mark_writing(self) -> Generator[None]:
        """Mark that a result is read and encoded inside the context."""
        self._num_writing += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_writing -= 1
            if not self._num_writing:
                self._is_idle.set()

    async def wait_for_results(self) -> None:
        """Wait until no result is being written, at most `max_wait_s` seconds."""
        if self._num_writing:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), self._max_wait_s)


@dataclass(frozen=True, slots=True)
class LongPollMiddleware:
    """Serves the POSTs of the long-poll endpoint before routing; every other request first yields to results.

    Each layer between the socket and the endpoint stays in memory as long as a poll, and the garbage collector
    traverses all of them. Without the router's layers ten thousand polls take half the time and memory.
    """

    app: ASGIApp
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    handle_error: Callable[[Request, Exception], Awaitable[Response]]
    wait_for_results: Callable[[], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or scope["path"] != self.path or scope["method"] != HTTPMethod.POST:
            if scope["type"] == "http":
                await self.wait_for_results()
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self.endpoint(request)
        except Exception as error:
            response = await self.handle_error(request, error)
        await response(scope, receive, send)
