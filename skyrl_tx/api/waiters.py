"""Long polls: one thread looks for answers, for all calls that wait for one, and wakes those that have it."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store import completions, futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_NOTE_FETCHED_EVERY_S = 5.0
_NOTE_ASKERS_EVERY_S = 20.0
"""Less than a call waits, so that each that finds no answer is noted; the SDK tells each 10 s that it is there."""
_LONGEST_PAUSE_S = 0.05
_PAGE = 5000
_SHORTEST = 0.75
"""Of the time that a call may wait."""

News = asyncio.Future[bool]
"""Resolved once: whether there is something to tell; False: the time is over."""


async def within(news: News, timeout_s: float) -> bool:
    """Wait for news, for a while."""
    timer = asyncio.get_running_loop().call_later(timeout_s, _resolve, news, False)
    try:
        return await news
    finally:
        timer.cancel()


def _resolve(news: News, value: bool) -> None:
    if not news.done():
        news.set_result(value)


def _tell(all_news: Iterable[News]) -> None:
    for news in all_news:
        _resolve(news, True)


@dataclass(frozen=True, slots=True)
class _Question:
    """A call that began to wait, for an answer that may be there already."""

    request_id: RequestId
    reach: str | None
    news: News


class Waiters:
    """The calls of one event loop that wait for results. Started and closed on that loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[str, list[News]] = {}
        self._new: list[_Question] = []
        self._seen = store.read(completions.last_order)
        self._fetched: set[RequestId] = set()
        self._noted_at = self._askers_noted_at = time.monotonic()
        self._dice = random.Random()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="waiters", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether the process is on its way out, so that no call should be held any more."""
        return self._is_closed

    def start(self) -> None:
        """Begin to look for answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def release(self) -> None:
        """Let every waiting call go, and hold none from now on; on the loop. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting = [news for each in self._waiting.values() for news in each]
        _tell(waiting)
        self._store.wake()

    def close(self) -> None:
        """Release all calls and end the thread. Idempotent."""
        self.release()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def expecting(self, name: RequestId | SamplingSessionId) -> Generator[News]:
        """Give what is told once a request is answered, or any of a sampling session.

        Look for answers inside: one given before is not announced.
        """
        news: News = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(name, []).append(news)
            if self._is_closed:
                news.set_result(True)
        try:
            yield news
        finally:
            with self._lock:
                waiting = self._waiting[name]
                waiting.remove(news)
                if not waiting:
                    del self._waiting[name]

    async def has_news(self, request_id: RequestId, reach: str | None, timeout_s: float) -> bool:
        """Wait until there is something to tell of a request: its answer, or that there is none for this owner.

        No longer than was said, and not much less. Thousands of calls share one look at the
        database; a call by itself would take a thread for it, twice.
        """
        with self.expecting(request_id) as news:
            with self._lock:
                self._new.append(_Question(request_id, reach, news))
                is_first = len(self._new) == 1
            if is_first:
                self._store.wake()
            # Calls that began together would for ever end together, and answers would wait for all of them.
            return await within(news, timeout_s * self._dice.uniform(_SHORTEST, 1.0))

    def note_fetched(self, request_id: RequestId) -> None:
        """Remember that a client has its result; written now and then, because only pruning reads it."""
        with self._lock:
            self._fetched.add(request_id)

    def _run(self) -> None:
        while not self._is_closed:
            self._store.wait(_WAIT_S)
            begun_at = time.monotonic()
            try:
                self._look_for_new()
                self._announce()
                self._write_fetched()
                self._write_askers()
            except StoreError as error:
                _log.error("cannot look for answers; trying again: %s", error)
                time.sleep(_WAIT_S)
            # Commits come in bursts: after a look over thousands of calls, let some gather before the next one.
            time.sleep(min(time.monotonic() - begun_at, _LONGEST_PAUSE_S))

    def _look_for_new(self) -> None:
        """Wake those calls that need not have begun to wait."""
        with self._lock:
            new, self._new = self._new, []
        owners: dict[RequestId, str] = {}
        try:
            if new:
                owners = self._store.read(lambda tx: futures.owners_of_open(tx, {each.request_id for each in new}))
        finally:  # if it failed, each will find out why
            self._wake(
                each.news
                for each in new
                if (owner := owners.get(each.request_id)) is None or each.reach not in (None, owner)
            )

    def _announce(self) -> None:
        """Wake those that wait for what was answered since the last look."""
        while page := self._store.read(lambda tx: completions.since(tx, self._seen, _PAGE)):
            self._seen = page[-1][0]
            with self._lock:
                waiting = [news for _, *names in page for name in names if name for news in self._waiting.get(name, ())]
            self._wake(waiting)

    def _wake(self, all_news: Iterable[News]) -> None:
        told = list(all_news)
        if told and self._loop is not None:
            self._loop.call_soon_threadsafe(_tell, told)

    def _write_fetched(self) -> None:
        now = time.monotonic()
        if now - self._noted_at < _NOTE_FETCHED_EVERY_S:
            return
        self._noted_at = now
        with self._lock:
            fetched, self._fetched = self._fetched, set()

        def keep(written: Future[None]) -> None:
            if written.exception() is not None:
                with self._lock:
                    self._fetched |= fetched

        if fetched:  # not waited for: the engine may keep the database locked for a while, and answers come meanwhile
            written = self._store.write_soon(lambda tx: futures.mark_fetched(tx, fetched, time.time()))
            written.add_done_callback(keep)

    def _write_askers(self) -> None:
        """Have it known that whoever waits for an answer is there: not every client says so itself."""
        now = time.monotonic()
        if now - self._askers_noted_at < _NOTE_ASKERS_EVERY_S:
            return
        self._askers_noted_at = now
        with self._lock:
            asked = [RequestId(name) for name in self._waiting]
        heard_at = time.time()
        silent = self._store.read(lambda tx: sessions.silent_askers(tx, asked, heard_at - _NOTE_ASKERS_EVERY_S))
        if silent:
            self._store.write_soon(lambda tx: [sessions.heartbeat(tx, each, heard_at) for each in silent])
