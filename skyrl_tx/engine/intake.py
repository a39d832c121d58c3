"""Reads new requests in order of arrival, as far as there is memory for them."""

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
_DEFERRED_BODY_BYTES = 65_536  # a pass of this size takes much longer than the extra statement that reads its body


class Intake:
    """Hands stored requests to the schedule and the sampling queue.

    While the memory for waiting requests is full, an owner with more than its share of it falls behind: its training
    requests stay in the database and are read in order once there is memory for them. Those of other owners are read.
    Samples are always read, because back-pressure bounds their memory.
    """

    def __init__(self, context: EngineContext, schedule: Schedule, sampling: SamplingExecutor) -> None:
        self._context = context
        self._schedule = schedule
        self._sampling = sampling
        self._engine = context.store.engine_number
        self.position = 0
        """The last request that was read, or is left to an owner that is behind."""
        self._behind: dict[str, int] = {}  # the last request of each owner that was read

    @property
    def complete_position(self) -> int:
        """The position up to which all requests of all owners were read."""
        return min(self._behind.values(), default=self.position)

    def read(self, is_busy: bool) -> bool:
        """Read new requests, for a limited time while the device is busy. Returns whether there was any."""
        end = time.monotonic() + _MAX_READ_TIME_S
        worked = False
        while self._read_page(is_busy):
            worked = True
            if not is_busy or time.monotonic() >= end:
                break
        return worked

    def _has_memory(self, owner: str, is_busy: bool) -> bool:
        """Whether an owner's requests may be read. If nothing runs, all in memory may wait for unread ones."""
        limit, by_owner = self._context.settings.max_backlog_bytes, self._schedule.num_bytes_by_owner
        if not is_busy or self._schedule.num_bytes + self._sampling.num_bytes < limit:
            return True
        num_owners = len({owner, *(other for other, num_bytes in by_owner.items() if num_bytes)})
        return by_owner[owner] < (limit - self._sampling.num_bytes) // num_owners

    def _read_page(self, is_busy: bool) -> bool:
        """Read a page of requests. Large passes are queued without bodies, so one client's backlog hides no others."""
        is_full = self._schedule.num_bytes >= self._context.settings.max_backlog_bytes // 2
        max_body_bytes = 0 if is_full else _DEFERRED_BODY_BYTES
        for owner in list(self._behind):
            if self._has_memory(owner, is_busy) and self._catch_up(owner, max_body_bytes):
                return True
        position = self.position

        def look(tx: Session) -> tuple[int, list[futures.PendingRequest]]:
            last = futures.get_last_position(tx)  # read before the page, so that no request between them is skipped
            return last, futures.list_pending(tx, position, _PAGE_REQUESTS, max_body_bytes, engine=self._engine)

        last, page = self._context.store.read(look)
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
        if len(page) < _PAGE_REQUESTS:  # requests after the page were cancelled before they were read
            self.position = max(self.position, last)
        return bool(page)

    def _catch_up(self, owner: str, max_body_bytes: int) -> bool:
        """Read a page of an owner that is behind. Returns whether there was any request."""
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
            self._context.request_log.wait_for_commits()  # the model may have been forgotten just now
            self._schedule.add_model(queued.model_id, self._context.recovery.read_sequence_cursor(queued.model_id))
        self._schedule.add(queued)

    def read_bodies(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Read deferred bodies."""
        request_ids = [queued.request_id for queued in requests]
        rows = self._context.store.read(lambda tx: futures.list_by_id(tx, request_ids))
        found = {row.request_id: row for row in rows}
        return [QueuedRequest.from_row(found[request_id]) for request_id in request_ids]
