"""The bytes that each owner stores in the database, and the share that an owner may store.

These bytes count: sessions, requests, results that were not removed yet, logged metrics, and
samples for the console. An owner that has reached its share gets 429 for calls that store more, so
it cannot fill the disk of the other owners. Calls that only poll, cancel or delete are never
refused.

The owners that store more than 64 MiB share the disk space equally, and one more share always stays
free. For example, two such owners on a disk with 90 GB for the database may store 30 GB each.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from sqlmodel import Session

from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.server.errors import ApiError
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError
from skyrl_tx.store.totals import count_stored_bytes

CountBytes = Callable[[Session], Mapping[str, int]]
"""Returns the bytes of each owner in some tables."""
_MIN_SHARE, _MAX_SHARE = 64 * 2**20, 64 * 2**30
"""A share is never smaller or larger than this.

It is the maximum before the first count, and for PostgreSQL, whose free space is unknown.
"""
_MIN_PERIOD_S = 10.0
_MAX_LOAD = 0.01
"""Maximum fraction of the time that counting takes.

For example, after a count that took 1 s, the next count begins 100 s later at the earliest.
"""
# The SDK sends a request again after a 429. The second header makes its sampling client pause first.
_HEADERS = {"Retry-After": "10", "X-Tinker-Sampling-Backpressure": "1"}


class StoredBytes:
    """Refuses calls of owners that store too much. Thread-safe.

    The tables are counted every 10 s at most, in the background. In between, the bytes of new calls
    are added.
    """

    def __init__(self, store: Store, counts: Sequence[CountBytes] = ()) -> None:
        """`counts` count the bytes in the tables of optional features."""
        self._store = store
        self._counts = (count_stored_bytes, *counts)
        self._lock = threading.Lock()
        self._stored: Counter[str] = Counter()
        self._added: Counter[str] = Counter()  # since the last count began
        self._share: float = _MAX_SHARE
        self._is_counting = False
        self._next_count_at = -math.inf

    def add(self, owner: str, num_bytes: int) -> None:
        """Count bytes that a call is about to store. Raises ApiError 429 if they exceed the share."""
        with self._lock:
            if is_due := not self._is_counting and time.monotonic() >= self._next_count_at:
                self._is_counting = True
            stored, share = self._stored[owner] + self._added[owner], self._share
            is_refused = stored + num_bytes > share
            if not is_refused:
                self._added[owner] += num_bytes

        if is_due:
            ServiceThread("stored-bytes", self.count).start()
        if is_refused:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the sessions, requests, results and metrics of {owner} take {stored:,.0f} bytes of the database, and "
                f"an owner may store {share:,.0f} bytes: fetch results, finish sessions, and send this again later",
                headers=_HEADERS,
                reason="stored_bytes",
            )

    def count(self) -> None:
        """Count the tables."""
        started = time.monotonic()
        with self._lock:
            added, self._added = self._added, Counter()
        try:
            stored = self._store.read(self._count_all)
            num_sharing = max(sum(num_bytes > _MIN_SHARE for num_bytes in stored.values()), 1)
            share = (self._store.get_free_bytes() + stored.total()) / (num_sharing + 1)
        except (StoreError, OSError):  # counted again later
            stored, share = self._stored + added, self._share

        ended = time.monotonic()
        with self._lock:
            self._stored = stored
            self._share = min(max(share, _MIN_SHARE), _MAX_SHARE)
            self._next_count_at = ended + max(_MIN_PERIOD_S, (ended - started) / _MAX_LOAD)
            self._is_counting = False

    def _count_all(self, tx: Session) -> Counter[str]:
        total: Counter[str] = Counter()
        for count in self._counts:
            total.update(count(tx))
        return total
