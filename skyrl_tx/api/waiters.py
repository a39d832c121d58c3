"""Long polls: one thread looks for answers and wakes every call that waits for one."""

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store import completions, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_NOTE_FETCHED_EVERY_S = 5.0
_LONGEST_PAUSE_S = 0.05
_PAGE = 5000


class Waiters:
    """The calls of one event loop that wait for results. Started and closed on that loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._seen = store.read(completions.last_order)
        self._fetched: set[RequestId] = set()
        self._noted_at = time.monotonic()
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
        """Let every waiting call go, and hold none from now on. Idempotent."""
        with self._lock:
            self._is_closed = True
            events = [event for events in self._waiting.values() for event in events]
        for event in events:
            event.set()
        self._store.wake()

    def close(self) -> None:
        """Release all calls and end the thread. Idempotent."""
        self.release()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def expecting(self, name: RequestId | SamplingSessionId) -> Generator[asyncio.Event]:
        """Give an event that is set once a request is answered, or any of a sampling session.

        Look for answers inside: one given before is not announced.
        """
        event = asyncio.Event()
        with self._lock:
            self._waiting.setdefault(name, []).append(event)
            if self._is_closed:
                event.set()
        try:
            yield event
        finally:
            with self._lock:
                events = self._waiting[name]
                events.remove(event)
                if not events:
                    del self._waiting[name]

    def note_fetched(self, request_id: RequestId) -> None:
        """Remember that a client has its result; written now and then, because only pruning reads it."""
        with self._lock:
            self._fetched.add(request_id)

    def _run(self) -> None:
        while not self._is_closed:
            self._store.wait(_WAIT_S)
            begun_at = time.monotonic()
            try:
                self._announce()
                self._write_fetched()
            except StoreError as error:
                _log.error("cannot look for answers; trying again: %s", error)
                time.sleep(_WAIT_S)
            # Commits come in bursts: after a look over thousands of calls, let some gather before the next one.
            time.sleep(min(time.monotonic() - begun_at, _LONGEST_PAUSE_S))

    def _announce(self) -> None:
        """Wake those that wait for what was answered since the last look."""
        while page := self._store.read(lambda tx: completions.since(tx, self._seen, _PAGE)):
            self._seen = page[-1][0]
            with self._lock:
                names = {name for _, *pair in page for name in pair if name in self._waiting}
            if names and self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake, names)

    def _wake(self, names: Collection[str]) -> None:
        with self._lock:
            events = [event for name in names for event in self._waiting.get(name, ())]
        for event in events:
            event.set()

    def _write_fetched(self) -> None:
        now = time.monotonic()
        if now - self._noted_at < _NOTE_FETCHED_EVERY_S:
            return
        self._noted_at = now
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        try:
            if fetched:
                self._store.write(lambda tx: futures.mark_fetched(tx, fetched, time.time()))
        except StoreError:
            with self._lock:
                self._fetched |= fetched
            raise
