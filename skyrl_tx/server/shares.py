"""Fair shares: how much of the API process and of the database one owner may use.

All owners share the threads, the interpreter lock and the memory of the API process. Each resource
has an `OwnerBudget`, in which every owner has a fixed share. A request beyond the share of its
owner waits in the queue of this owner, so the requests of other owners are not delayed. The shares
are constants and not settings or quotas, because they only protect the process.

`StoredBytes` limits what an owner stores in the database. These bytes count: sessions, requests,
results that were not removed yet, logged metrics, and samples for the console. An owner that has
reached its share gets 429 for calls that store more, so it cannot fill the disk of the other
owners. Calls that only poll, cancel or delete are never refused.

The owners that store more than 64 MiB share the disk space equally, and one more share always stays
free. For example, two such owners on a disk with 90 GB for the database may store 30 GB each.
"""

import asyncio
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from sqlmodel import Session

from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.server.errors import Refusal, too_many_requests
from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store
from skyrl_tx.store.totals import count_stored_bytes

_MAX_WAIT_S = 20.0
"""How long a request may wait for its share. The SDK gives up an attempt after 60 s."""
SMALL_BYTES = 2**16
"""Bodies and results up to this size need no reservation, so heartbeats never wait for memory.

The number of connections limits the memory of small bodies.
"""
HEAVY_BYTES = 2**22
"""Calls whose body takes more memory than this to decode use the few threads of `heavy_calls`.

Decoding such a body also takes long. A JSON body reaches this size at 512 KiB.
"""
_RESULT_BYTES = 256 * 2**20
"""Memory for encoded results that clients have not received yet. An owner may use a quarter."""
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


class OwnerBudget:
    """An amount, such as threads or bytes, that the requests of one event loop share.

    An owner can reserve at most `per_owner` of it. A request that is larger than this waits until
    its owner holds no other reservation. A request that is larger than the whole budget waits until
    there is no reservation at all. So every request can run eventually.
    """

    def __init__(
        self, total: int, *, per_owner: int, unit: str, uncounted: int = 0, reason: Refusal = "calls_full"
    ) -> None:
        """Divide `total` among owners.

        Requests of up to `uncounted` need no reservation. `unit` names the shared resource in the
        plural, for example "threads". `reason` is the label of refusals in the metrics.
        """
        self.total = total
        self._per_owner = per_owner
        self._unit = unit
        self._uncounted = uncounted
        self._reason: Refusal = reason
        self._num_reserved = 0
        self._reserved: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, deque[tuple[int, asyncio.Future[None]]]] = defaultdict(deque)

    @property
    def num_reserved(self) -> int:
        """The amount that is reserved now."""
        return self._num_reserved

    @asynccontextmanager
    async def reserve(self, owner: str, amount: int = 1) -> AsyncGenerator[None]:
        """Reserve an amount inside the context.

        Raises ApiError 429 if none becomes free within 20 s.
        """
        if amount <= self._uncounted:
            yield
            return

        if self._waiting or not self._fits(owner, amount) or not self._has_capacity(amount):
            await self._wait(owner, amount)
        else:
            self._take(owner, amount)

        try:
            yield
        finally:
            self._take(owner, -amount)
            self._admit()

    async def _wait(self, owner: str, amount: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = amount, admitted
        self._waiting[owner].append(entry)
        self._admit()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await admitted
        except BaseException as error:
            # Undo the reservation if the request was admitted just before the timeout.
            if admitted.done() and not admitted.cancelled():
                self._take(owner, -amount)
            else:
                self._waiting[owner].remove(entry)
            self._admit()

            if isinstance(error, TimeoutError):
                held = self._reserved.get(owner, 0)
                detail = f"requests of {owner!r} already hold {held} {self._unit}: send this one later"
                raise too_many_requests(detail, reason=self._reason) from error
            raise

    def _admit(self) -> None:
        """Admit waiting requests while a part of the budget is free.

        The owner with the smallest reservation comes first. Requests of one owner are admitted in
        the order of arrival.
        """
        for owner in [owner for owner, queue in self._waiting.items() if not queue]:
            del self._waiting[owner]

        while self._waiting:
            # Choose the owner that holds least.
            may_hold_more = [owner for owner, queue in self._waiting.items() if self._fits(owner, queue[0][0])]
            if not may_hold_more:
                return
            owner = min(may_hold_more, key=lambda candidate: self._reserved.get(candidate, 0))
            amount, admitted = self._waiting[owner][0]

            # A large request keeps its turn, or smaller requests could delay it forever.
            if not self._has_capacity(amount):
                return

            self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not admitted.done():
                self._take(owner, amount)
                admitted.set_result(None)

    def _fits(self, owner: str, amount: int) -> bool:
        """Return whether a request fits into its owner's share."""
        reserved = self._reserved.get(owner, 0)
        return not reserved or reserved + amount <= self._per_owner

    def _has_capacity(self, amount: int) -> bool:
        """Return whether a request fits into the whole budget."""
        return not self._num_reserved or self._num_reserved + amount <= self.total

    def _take(self, owner: str, amount: int) -> None:
        self._num_reserved += amount
        self._reserved[owner] += amount
        if not self._reserved[owner]:
            del self._reserved[owner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The budgets of one API process.

    The budgets of threads together have fewer threads than the process, so that authentication and
    health checks always find a free one.
    """

    calls: OwnerBudget
    """Threads for calls that only wait for the database."""
    heavy_calls: OwnerBudget
    """Threads for calls that decode large bodies."""
    lists: OwnerBudget
    """Threads for calls that return lists.

    Only one thread can compute at a time, so a second one would not finish the lists of an owner
    earlier, but it would double the time that calls of other owners wait.
    """
    result_readers: OwnerBudget
    """Threads that read and encode results.

    If hundreds of threads did this in parallel, all results would be finished late.
    """
    weight_files: OwnerBudget
    """Threads that hash weight files, or wait for an object store that may not respond."""
    adapter_imports: OwnerBudget
    """Threads that wait for a child process, which reads an uploaded adapter."""
    received_bodies: OwnerBudget
    """Memory for request bodies that are being received."""
    decoded_bodies: OwnerBudget
    """Memory for request bodies that are being decoded and stored."""
    result_bytes: OwnerBudget
    """Memory for large encoded results, until the client has received them."""

    @classmethod
    def divide(cls, num_threads: int, max_body_bytes: int) -> Self:
        """Divide the threads of a process and the memory for request bodies."""

        def share_threads(total: int, per_owner: int) -> OwnerBudget:
            return OwnerBudget(max(total, 1), per_owner=max(per_owner, 1), unit="threads")

        def share_bytes(total: int, per_owner: int) -> OwnerBudget:
            return OwnerBudget(total, per_owner=per_owner, unit="bytes", uncounted=SMALL_BYTES, reason="bodies_full")

        return cls(
            calls=share_threads(num_threads * 2 // 3, num_threads // 4),
            heavy_calls=share_threads(6, 2),
            lists=share_threads(4, 1),
            result_readers=share_threads(4, 2),
            weight_files=share_threads(8, 2),
            adapter_imports=share_threads(2, 1),
            received_bodies=share_bytes(max_body_bytes // 2, max_body_bytes // 4),
            decoded_bodies=share_bytes(max_body_bytes // 2, max_body_bytes // 4),
            result_bytes=share_bytes(_RESULT_BYTES, _RESULT_BYTES // 4),
        )


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
            raise too_many_requests(
                f"the sessions, requests, results and metrics of {owner} take {stored:,.0f} bytes of the database, and "
                f"an owner may store {share:,.0f} bytes: fetch results, finish sessions, and send this again later",
                reason="stored_bytes",
                retry_after_s=10,
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
