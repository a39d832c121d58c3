"""Read new requests from the database in order of arrival, while there is memory for them."""

import time
from collections.abc import Sequence

from sqlmodel import Session

from skyrl_tx.contract.requests import Sample
from skyrl_tx.engine.context import EngineContext
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sampling import SamplingExecutor
from skyrl_tx.engine.schedule import Schedule
from skyrl_tx.store import futures

_PAGE_REQUESTS = 256
_MAX_READ_TIME_S = 0.1
_DEFERRED_BODY_BYTES = 65_536
"""Bodies of passes that are larger than this are read later, when the pass is about to run.

That takes an additional database statement, which is much shorter than the pass itself.
"""


class Intake:
    """Adds stored requests to the schedule and to the sampling queue.

    If the memory for waiting requests is full, an owner that uses more than its share falls behind:
    its training requests stay in the database until there is memory for them. The requests of
    other owners are read. Samples are always read, because back-pressure bounds their memory.
    """

    def __init__(self, context: EngineContext, schedule: Schedule, sampling: SamplingExecutor) -> None:
        self._context = context
        self._schedule = schedule
        self._sampling = sampling
        self._engine = context.store.engine_number
        self.position = 0
        """Position of the last request that was read or skipped because its owner is behind."""
        self._behind: dict[str, int] = {}  # owners that are behind, and the position of the last request that was read

    @property
    def complete_position(self) -> int:
        """All requests up to this position were read, for every owner."""
        return min(self._behind.values(), default=self.position)

    def read(self, is_busy: bool) -> bool:
        """Read new requests, for a limited time if the device is busy.

        Returns True if there were any.
        """
        end = time.monotonic() + _MAX_READ_TIME_S
        worked = False
        while self._read_page(is_busy):
            worked = True
            if not is_busy or time.monotonic() >= end:
                break
        return worked

    def _has_memory(self, owner: str, is_busy: bool) -> bool:
        """Whether requests of an owner may be read.

        True if the device is idle, because all requests in memory may be waiting for requests that
        are not read yet.
        """
        limit, by_owner = self._context.settings.max_backlog_bytes, self._schedule.num_bytes_by_owner
        if not is_busy or self._schedule.num_bytes + self._sampling.num_bytes < limit:
            return True
        num_owners = len({owner, *(other for other, num_bytes in by_owner.items() if num_bytes)})
        return by_owner[owner] < (limit - self._sampling.num_bytes) // num_owners

    def _read_page(self, is_busy: bool) -> bool:
        """Read a page of requests. Returns True if there were any.

        Large passes are queued without their bodies, so that the backlog of one client does not
        fill the memory and keep the requests of other clients from being read.
        """
        is_full = self._schedule.num_bytes >= self._context.settings.max_backlog_bytes // 2
        max_body_bytes = 0 if is_full else _DEFERRED_BODY_BYTES

        # Owners that are behind come first.
        for owner in list(self._behind):
            if self._has_memory(owner, is_busy) and self._catch_up(owner, max_body_bytes):
                return True

        # Read the next page of all owners.
        position = self.position

        def read_next(tx: Session) -> tuple[int, list[futures.PendingRequest]]:
            last = futures.get_last_position(tx)  # before the page, so that no new request is skipped
            return last, futures.list_pending(tx, position, _PAGE_REQUESTS, max_body_bytes, engine=self._engine)

        last, page = self._context.store.read(read_next)

        # Add the requests of the page. An owner without memory falls behind.
        for pending in page:
            self.position = pending.position
            if pending.model_id is None:
                self._add(pending)
            elif pending.owner in self._behind:
                continue
            elif self._has_memory(pending.owner, is_busy):
                self._add(pending)
            else:
                self._behind[pending.owner] = pending.position - 1
        if len(page) < _PAGE_REQUESTS:  # requests between the page and `last` were cancelled before they were read
            self.position = max(self.position, last)
        return bool(page)

    def _catch_up(self, owner: str, max_body_bytes: int) -> bool:
        """Read a page of requests of an owner that is behind. Returns True if there were any."""
        after, up_to = self._behind[owner], self.position
        page = self._context.store.read(
            lambda tx: futures.list_pending_by_owner(
                tx, owner, after, up_to, _PAGE_REQUESTS, max_body_bytes, engine=self._engine
            )
        )
        for pending in page:
            self._behind[owner] = pending.position
            self._add(pending)
        if len(page) < _PAGE_REQUESTS:
            del self._behind[owner]
        return bool(page)

    def _add(self, pending: futures.PendingRequest) -> None:
        queued = QueuedRequest.from_row(pending)
        if queued.model_id is None or isinstance(queued.request, Sample):
            self._sampling.add(queued)
            return
        if queued.model_id not in self._schedule:
            self._context.request_log.wait_for_commits()  # the cursor depends on committed results
            self._schedule.add_model(queued.model_id, self._context.recovery.read_sequence_cursor(queued.model_id))
        self._schedule.add(queued)

    def read_bodies(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Return the same requests with their bodies, which `_read_page` did not read."""
        request_ids = [queued.request_id for queued in requests]
        rows = self._context.store.read(lambda tx: futures.list_by_id(tx, request_ids))
        row_by_id = {row.request_id: row for row in rows}
        return [QueuedRequest.from_row(row_by_id[request_id]) for request_id in request_ids]
