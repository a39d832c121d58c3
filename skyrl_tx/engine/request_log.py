"""The log of requests: each as the engine holds it, its delivery attempts, and the commit of its result.

Each result is one transaction, in the order of the log.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import ModelPass, ModelSpec, Rejected, Request, Sample
from skyrl_tx.contract.results import Failure, OptimStepOutput, Result
from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.store import futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError
from skyrl_tx.store.futures import PendingRequest, StoredRequest

_log = logging.getLogger(__name__)
_TOUCH_PERIOD_S = 5.0  # `last_request_at` is informative only; updating it seldom keeps commits short
_MAX_TOUCHED = 1000
DEFERRED_BYTES = 1024
"""Estimated memory of a request whose body has not been read."""
Rows = Callable[[Session], object]
"""Writes further rows in the transaction of a result."""
ObserverRows = Callable[[Session, float], object]
"""Writes what observers record about a completed request, at a time, in the transaction of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest(StoredRequest):
    """One decoded request."""

    request: Request | None
    """None for a pass whose body is still only in the database; a `Rejected` with the reason if it is damaged."""
    num_bytes: int = 0
    """Estimated memory of this request."""
    num_deferred_bytes: int = 0
    """Size of a body that has not been read, else 0."""

    @classmethod
    def from_row(cls, pending: PendingRequest) -> "QueuedRequest":
        """Decode a stored request. One that cannot be decoded becomes a `Rejected` with the reason."""
        request: Request | None = None
        try:
            if pending.is_damaged:
                raise codec.CodecError("the stored request is damaged: its checksum is not that of what was written")
            if not pending.num_left_out:
                decoded = codec.decode(pending.body)
                assert not isinstance(decoded, ModelSpec)
                request = decoded  # pyright: ignore[reportAssignmentType]
        except codec.CodecError as error:
            request = Rejected(kind=pending.kind, message=str(error), backward=pending.kind == "model_pass")
        return cls(
            **{field.name: getattr(pending, field.name) for field in fields(StoredRequest)},
            request=request,
            num_bytes=len(pending.body) or DEFERRED_BYTES,
            num_deferred_bytes=pending.num_left_out,
        )

    def check_crashes(self, max_attempts: int) -> None:
        """Raise ServerError if the engine crashed too often while it ran this request alone."""
        if self.crashes >= max_attempts:
            raise ServerError(f"given up: the engine crashed {self.crashes} times while it ran this alone")

    @property
    def is_barrier(self) -> bool:
        """Whether the client sends this request only after all earlier ones were acknowledged."""
        return self.kind in codec.BARRIER_KINDS

    @property
    def num_tokens(self) -> int:
        """Tokens of a pass; 0 for other kinds."""
        return sum(datum.tokens.size for datum in self.model_pass.data) if self.model_pass else 0

    @property
    def model_pass(self) -> ModelPass | None:
        """The request if it is a pass, else None."""
        return self.request if isinstance(self.request, ModelPass) else None


class DeliveryAttempts:
    """Counts delivery attempts on disk. A crash leaves the count, a result or a clean stop removes it. Thread-safe.

    While `is_alone` is set, the counted requests run alone on the device: a crash is their fault.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # held until a write is queued, so that writes are in the order of decisions
        self._counted: dict[RequestId, float] = {}  # when the attempt began, in seconds since the epoch
        self._is_counting = True
        self.is_alone = False

    def count(self, request_ids: Collection[RequestId]) -> None:
        """Count one more attempt of each request, and wait for the commit. No effect after `undo_all_on_stop`."""
        with self._lock:
            if not self._is_counting:
                return
            self._counted.update(dict.fromkeys(request_ids, time.time()))
            is_alone = self.is_alone
            written = self._store.write_soon(
                lambda tx: futures.count_delivery_attempt(tx, request_ids, is_alone=is_alone)
            )
        written.result()
        failpoint("engine.attempt")

    def forget(self, request_ids: Collection[RequestId]) -> None:
        """Forget requests that have a result: its commit reset their counts."""
        with self._lock:
            for request_id in request_ids:
                self._counted.pop(request_id, None)

    def get_start_time(self, request_id: RequestId) -> float:
        """Return when the counted attempt of a request began, in seconds since the epoch; 0 if none is counted."""
        return self._counted.get(request_id, 0.0)

    def undo(self, request_ids: Collection[RequestId]) -> None:
        """Uncount requests that were stopped cleanly and will run again."""
        with self._lock:
            undone = self._counted.keys() & set(request_ids)
            if not undone:
                return
            for request_id in undone:
                del self._counted[request_id]
            written = self._store.write_soon(lambda tx: futures.undo_delivery_attempt(tx, undone))
        written.result()

    def undo_all_on_stop(self, stop: threading.Event) -> None:
        """Wait for `stop`, then uncount all running requests and count no more.

        A process that is killed because it stops too slowly then leaves no count. Needs a thread of its own, because
        the engine's thread may be waiting for the device.
        """
        stop.wait()
        with self._lock:
            self._is_counting = False
        try:
            self.undo(list(self._counted))
        except StoreError as error:
            _log.error("cannot reset the delivery attempts of running requests: %s", error)

    def close(self) -> None:
        """Stop counting and leave the counts on disk."""
        with self._lock:
            self._is_counting = False
            self._counted.clear()


@dataclass(slots=True)
class RequestLog:
    """Commits results in the given order, with their log sequence numbers and dependent rows."""

    store: Store
    attempts: DeliveryAttempts
    meters: EngineMetrics = field(default_factory=EngineMetrics)
    on_result: Callable[[QueuedRequest, Result], None] | None = None
    """Called for each request that gets its result."""
    _pending: deque[Future[None]] = field(default_factory=deque[Future[None]])
    _touched: dict[ModelId, float] = field(default_factory=dict[ModelId, float])

    def commit(
        self,
        queued: QueuedRequest,
        result: Result,
        rows: Rows | None = None,
        *,
        effect_order: int | None = None,
        observed: ObserverRows | None = None,
    ) -> None:
        """Commit a request's result and `rows` in one transaction, without waiting for the disk.

        `effect_order` is the request's log sequence number; None if it did not change its model. `observed` is left out
        if the request was completed before, by a cancellation.
        """
        failpoint("engine.result")
        written = self.store.write_soon(self._make_transaction(queued, result, rows, observed, effect_order))
        self._count_result(queued, result)
        written.add_done_callback(lambda _: None if written.exception() else self.attempts.forget([queued.request_id]))
        self._pending.append(written)
        failpoint("engine.answer")

    def commit_and_wait(self, queued: QueuedRequest, result: Result, rows: Rows, observed: ObserverRows | None) -> None:
        """Like `commit`, but wait. Raises what `rows` raises; nothing is committed then."""
        self.store.write(self._make_transaction(queued, result, rows, observed))
        self._count_result(queued, result)
        self.attempts.forget([queued.request_id])

    def _count_result(self, queued: QueuedRequest, result: Result) -> None:
        self.meters.record_completion(
            queued.kind,
            queued.owner,
            queued.request,
            result,
            created_at=queued.created_at,
            started_at=self.attempts.get_start_time(queued.request_id),
        )
        if self.on_result is not None:
            self.on_result(queued, result)

    def check_commits(self) -> None:
        """Raise the error of a finished commit, if any."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def wait_for_commits(self) -> None:
        """Wait until all results are on disk. Raises the first error."""
        while self._pending:
            self._pending.popleft().result()

    def _make_transaction(
        self,
        queued: QueuedRequest,
        result: Result,
        rows: Rows | None,
        observed: ObserverRows | None,
        effect_order: int | None = None,
    ) -> Callable[[Session], None]:
        data, failed, model_id = codec.encode(result), isinstance(result, Failure), queued.model_id
        is_step = isinstance(result, OptimStepOutput)

        def write(tx: Session) -> None:
            now = time.time()
            if failed:
                _log.debug("%s %s failed: %s", queued.kind, queued.request_id, result)
            if effect_order is not None:
                assert model_id is not None
                counted = models.assign_effect_order(tx, model_id, is_step=is_step)
                assert counted == effect_order, f"log record {effect_order} of {model_id} is no. {counted} on disk"
            if futures.complete(tx, queued.request_id, data, failed=failed, effect_order=effect_order, now=now):
                if observed is not None:
                    observed(tx, now)
            else:
                level = logging.DEBUG if isinstance(queued.request, Sample) else logging.WARNING  # samples: cancelled
                _log.log(level, "%s request %s already has a result or was removed", queued.kind, queued.request_id)
            if model_id is not None and now - self._touched.get(model_id, 0.0) >= _TOUCH_PERIOD_S:
                if len(self._touched) >= _MAX_TOUCHED:
                    self._touched.clear()
                self._touched[model_id] = now
                with suppress(LookupError):
                    models.touch(tx, model_id, now)
            if rows is not None:
                rows(tx)

        return write
