"""Long polls: one thread looks for answers and wakes every call that waits for one."""

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
_NOTE_FETCHED_EVERY_S = 5.0
_LONGEST_PAUSE_S = 0.05


class Waiters:
    """The calls of one event loop that wait for results. Started and closed on that loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: dict[RequestId, list[asyncio.Event]] = {}
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
    def expecting(self, request_id: RequestId) -> Generator[asyncio.Event]:
        """Give an event that is set once the request is answered.

        Look at the request inside: an answer given before is not announced.
        """
        event = asyncio.Event()
        with self._lock:
            self._waiting.setdefault(request_id, []).append(event)
            if self._is_closed:
                event.set()
        try:
            yield event
        finally:
            with self._lock:
                events = self._waiting[request_id]
                events.remove(event)
                if not events:
                    del self._waiting[request_id]

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
            except StoreError:
                _log.exception("cannot look for answers; trying again")
                time.sleep(_WAIT_S)
            # Commits come in bursts: after a look over thousands of calls, let some gather before the next one.
            time.sleep(min(time.monotonic() - begun_at, _LONGEST_PAUSE_S))

    def _announce(self) -> None:
        with self._lock:
            request_ids = list(self._waiting)
        if not request_ids:
            return
        answered = self._store.read(lambda tx: futures.statuses(tx, request_ids))
        if answered and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, answered.keys())

    def _wake(self, request_ids: Collection[RequestId]) -> None:
        with self._lock:
            events = [event for name in request_ids for event in self._waiting.get(name, ())]
        for event in events:
            event.set()

    def _write_fetched(self) -> None:
        now = time.monotonic()
        if now - self._noted_at < _NOTE_FETCHED_EVERY_S:
            return
        self._noted_at = now
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        if fetched:
            self._store.write(lambda tx: futures.mark_fetched(tx, fetched, time.time()))
