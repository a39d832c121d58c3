"""New tokens of running samples, from the store to the streams of this process."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import partials
from skyrl_tx.store.database import Store
from skyrl_tx.store.partials import Partial

_PAGE = 1000


class Stream:
    """The new tokens of one request, in the order of writing. Used on the event loop only."""

    def __init__(self, notify: Callable[[], None]) -> None:
        """`notify` is called on the event loop when there is something to take."""
        self._notify = notify
        self._waiting: deque[Partial] = deque()

    def put(self, new: list[Partial]) -> None:
        """Add tokens."""
        self._waiting.extend(new)
        self._notify()

    def take(self) -> list[Partial]:
        """Return the tokens that came since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class PartialStreams:
    """The open streams of this process; one query reads the new tokens of all of them."""

    def __init__(self, store: Store, max_streams: int) -> None:
        self._store = store
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._open: dict[RequestId, tuple[Stream, asyncio.AbstractEventLoop]] = {}
        self._position = 0

    def open(self, request_id: RequestId, notify: Callable[[], None]) -> Stream | None:
        """Open a stream for a request that will be submitted; None if too many are open."""
        with self._lock:
            if len(self._open) >= self._max_streams:
                return None
            stream = Stream(notify)
            self._open[request_id] = stream, asyncio.get_running_loop()
        return stream

    def close(self, request_id: RequestId) -> None:
        """Close a stream. Idempotent."""
        with self._lock:
            self._open.pop(request_id, None)

    def read(self) -> None:
        """Read new tokens and hand them to their streams. Called by the thread that sees the engine's commits."""
        if not self._open:
            return
        is_full = True
        while is_full:
            page = self._store.read(lambda tx: partials.since(tx, self._position, _PAGE))
            is_full = len(page) == _PAGE
            new: dict[RequestId, list[Partial]] = {}
            for position, partial in page:
                self._position = position
                new.setdefault(partial.request_id, []).append(partial)
            with self._lock:
                due = [(self._open[request_id], rows) for request_id, rows in new.items() if request_id in self._open]
            for (stream, loop), rows in due:
                loop.call_soon_threadsafe(stream.put, rows)
