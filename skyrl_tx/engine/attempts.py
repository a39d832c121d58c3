"""What is under way, as the disk has it: what an engine that ends is suspected of."""

import logging
import threading
from collections.abc import Collection

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.failpoints import reach
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store, StoreError

_log = logging.getLogger(__name__)


class Attempts:
    """Marks requests as begun, and takes marks back from those that are not to blame. For any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # held until a write is queued, so that writes come in the order of decisions
        self._marked: set[RequestId] = set()
        self._counts = True

    def mark(self, request_ids: Collection[RequestId]) -> None:
        """Have it on disk that these are begun; not any more once all marks were given back."""
        with self._lock:
            if not self._counts:
                return
            self._marked.update(request_ids)
            written = self._store.write_soon(lambda tx: futures.mark_attempt(tx, request_ids))
        written.result()
        reach("engine.attempt")

    def forget(self, request_ids: Collection[RequestId]) -> None:
        """Let go of those that are answered: their marks went with that."""
        with self._lock:
            self._marked.difference_update(request_ids)

    def give_back(self, request_ids: Collection[RequestId]) -> None:
        """Take marks back: these end in good order, and will be begun anew."""
        with self._lock:
            given = self._marked.intersection(request_ids)
            self._marked -= given
            written = self._store.write_soon(lambda tx: futures.release_attempt(tx, given))
        written.result()

    def give_back_when(self, stop: threading.Event) -> None:
        """Wait until the engine is told to stop; then take all marks back, and set no more.

        What still runs then is ended if it takes too long, and is not to blame for that. Waits for no device, so this
        is done on a thread of its own.
        """
        stop.wait()
        with self._lock:
            self._counts = False
            given, self._marked = self._marked, set()
            if not given:
                return
            written = self._store.write_soon(lambda tx: futures.release_attempt(tx, given))
        try:
            written.result()
        except StoreError as error:
            _log.error("%d requests under way stay marked, as if they had ended this engine: %s", len(given), error)

    def close(self) -> None:
        """Leave the marks where they are: the engine has ended."""
        with self._lock:
            self._counts = False
            self._marked.clear()
