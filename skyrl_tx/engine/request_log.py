"""Requests in the engine: decoded requests, delivery attempts and commits of results.

Each result is committed in its own transaction. Commits keep the order in which the engine calls
`RequestLog.commit`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import ModelPass, ModelSpec, Rejected, Request, Sample
from skyrl_tx.contract.results import Failure, OptimStepOutput, Result
from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.store import StoreError, futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import PendingRequest, StoredRequest

_log = logging.getLogger(__name__)
_TOUCH_PERIOD_S = 5.0  # `last_request_at` is only informative: rare updates keep commits short
_MAX_TOUCHED = 1000
_PLAIN_FAILURE = "the request failed, and the database refused to store the reason"
DEFERRED_BYTES = 1024
"""Estimated memory of a request whose body has not been read."""
Rows = Callable[[Session], object]
"""Writes additional rows in the transaction of a result."""
WriteRows = Callable[[Session, float], object]
"""Writes the rows of observers in the transaction of a result.

The second argument is the time of the commit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest(StoredRequest):
    """A decoded request."""

    request: Request | None
    """The content of the request.

    None for a pass whose body has not been read. The content of a damaged request is a `Rejected`
    with the reason.
    """
    num_bytes: int = 0
    """Estimated memory of this request."""
    num_deferred_bytes: int = 0
    """Size of the body if it has not been read, else 0."""

    @classmethod
    def from_row(cls, pending: PendingRequest) -> "QueuedRequest":
        """Decode a stored request.

        A request that cannot be decoded becomes a `Rejected` with the reason.
        """
        request: Request | None = None
        try:
            if pending.is_damaged:
                raise codec.CodecError("the stored request is damaged: its checksum does not match")
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
        """Raise ServerError if the engine crashed or hung too often while it ran this request alone."""
        if self.crashes >= max_attempts:
            raise ServerError(
                f"given up: the engine crashed or hung {self.crashes} times while it ran this request alone"
            )

    @property
    def is_barrier(self) -> bool:
        """Whether the client sends this only after all earlier requests were acknowledged."""
        return self.kind in codec.BARRIER_KINDS

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a pass. 0 for requests of other kinds."""
        return sum(datum.tokens.size for datum in self.model_pass.data) if self.model_pass else 0

    @property
    def model_pass(self) -> ModelPass | None:
        """The request if it is a pass, else None."""
        return self.request if isinstance(self.request, ModelPass) else None


class DeliveryAttempts:
    """Counts delivery attempts in the database. Thread-safe.

    An attempt is counted before the engine starts a request. The count is removed when the request
    has a result, and when the engine stops cleanly. A crash leaves the count, so the next engine
    knows which requests were running. While `runs_one_at_a_time` is set, requests run one at a
    time, so a crash is caused by the request that was running.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # held until a write is queued, so that writes keep the order of the calls
        self._counted: dict[RequestId, float] = {}  # Unix time of the start of the attempt
        self._is_counting = True
        self.runs_one_at_a_time = False

    def count(self, request_ids: Collection[RequestId]) -> None:
        """Count an attempt of each request, and wait for the commit. Does nothing after a stop."""
        with self._lock:
            if not self._is_counting:
                return
            self._counted.update(dict.fromkeys(request_ids, time.time()))
            is_alone = self.runs_one_at_a_time
            written = self._store.write_soon(
                lambda tx: futures.count_delivery_attempt(tx, request_ids, is_alone=is_alone)
            )
        written.result()
        failpoint("engine.attempt")

    def forget(self, request_ids: Collection[RequestId]) -> None:
        """Forget requests that have a result. The commit of the result has reset their counts."""
        with self._lock:
            for request_id in request_ids:
                self._counted.pop(request_id, None)

    def get_start_time(self, request_id: RequestId) -> float:
        """Return when the attempt of a request started (seconds since the epoch), or 0."""
        return self._counted.get(request_id, 0.0)

    def undo(self, request_ids: Collection[RequestId]) -> None:
        """Undo the counts of requests that were stopped cleanly and will run again."""
        with self._lock:
            undone = self._counted.keys() & set(request_ids)
            if not undone:
                return
            for request_id in undone:
                del self._counted[request_id]
            written = self._store.write_soon(lambda tx: futures.undo_delivery_attempt(tx, undone))
        written.result()

    def undo_all_on_stop(self, stop: threading.Event) -> None:
        """Wait for `stop`, then undo the counts of all running requests and count no more.

        Then no count is left even if the process is killed because it stops too slowly. A separate
        thread calls this method, because the engine's thread may be waiting for the device.
        """
        stop.wait()
        with self._lock:
            self._is_counting = False
        try:
            self.undo(list(self._counted))
        except StoreError as error:
            _log.error("cannot undo the delivery attempts of running requests: %s", error)

    def close(self) -> None:
        """Stop counting. Counts that are in the database stay there."""
        with self._lock:
            self._is_counting = False
            self._counted.clear()


@dataclass(slots=True)
class RequestLog:
    """Commits results in order, with log sequence numbers and dependent rows."""

    store: Store
    attempts: DeliveryAttempts
    meters: EngineMetrics = field(default_factory=EngineMetrics)
    on_result: Callable[[QueuedRequest, Result], None] | None = None
    """Called for each request that has a result."""
    _pending: deque[Future[Any]] = field(default_factory=deque[Future[Any]])
    _touched: dict[ModelId, float] = field(default_factory=dict[ModelId, float])
    """When the time of the last request was last written for each model."""

    def commit(
        self,
        queued: QueuedRequest,
        result: Result,
        rows: Rows | None = None,
        *,
        effect_order: int | None = None,
        observed: WriteRows | None = None,
    ) -> None:
        """Commit a result and `rows` in one transaction, without waiting for the disk.

        Args:
            queued: The request.
            result: Its result.
            rows: Writes dependent rows.
            effect_order: The log sequence number. None if the request did not change its model.
            observed: Writes the rows of observers. Skipped if the request already has a result,
                for example because it was cancelled, and if the database refuses one of their values.
        """
        write = self._make_transaction(queued, result, rows, observed, effect_order)
        self._commit(
            queued, result, write, lambda tx: self._make_transaction(queued, result, rows, None, effect_order)(tx)
        )

    def commit_failure(self, queued: QueuedRequest, failure: Failure, incomplete: tuple[ModelId, str] | None) -> None:
        """Commit a failure.

        `incomplete` names a model whose gradient is incomplete from now on, and the reason. A
        failure can always be committed: if the database refuses its message or the reason,
        `_PLAIN_FAILURE` is stored instead.
        """

        def make(failure: Failure, reason: str) -> Callable[[Session], None]:
            rows = None
            if incomplete is not None:
                rows = partial(models.set_incomplete_gradient, model_id=incomplete[0], message=reason)
            return self._make_transaction(queued, failure, rows, None)

        plain = make(replace(failure, message=_PLAIN_FAILURE), _PLAIN_FAILURE)
        self._commit(queued, failure, make(failure, "" if incomplete is None else incomplete[1]), plain)

    def _commit(
        self,
        queued: QueuedRequest,
        result: Result,
        write: Callable[[Session], None],
        if_refused: Callable[[Session], None],
    ) -> None:
        failpoint("engine.result")
        written = self.store.write_soon(write, if_refused)
        self._count_result(queued, result)
        written.add_done_callback(lambda _: None if written.exception() else self.attempts.forget([queued.request_id]))
        self._pending.append(written)
        failpoint("engine.answer")

    def commit_and_wait(self, queued: QueuedRequest, result: Result, rows: Rows, observed: WriteRows | None) -> None:
        """Like `commit`, but wait for the commit.

        If `rows` raises an error, nothing is committed.
        """
        self.store.write(self._make_transaction(queued, result, rows, observed))
        self._count_result(queued, result)
        self.attempts.forget([queued.request_id])

    def write_rows(self, rows: WriteRows) -> None:
        """Write the rows of observers without a result, and without waiting for the disk."""
        self._pending.append(self.store.write_soon(lambda tx: rows(tx, time.time())))

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
        """Raise the error of a finished commit, if there is one."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def wait_for_commits(self) -> None:
        """Wait until all results are committed. Raises the first error."""
        while self._pending:
            self._pending.popleft().result()

    def _make_transaction(
        self,
        queued: QueuedRequest,
        result: Result,
        rows: Rows | None,
        observed: WriteRows | None,
        effect_order: int | None = None,
    ) -> Callable[[Session], None]:
        data, failed, model_id = codec.encode(result), isinstance(result, Failure), queued.model_id
        is_step = isinstance(result, OptimStepOutput)

        def write(tx: Session) -> None:
            now = time.time()
            if failed:
                _log.debug("%s %s failed: %s", queued.kind, queued.request_id, result)

            # The log record of a request that changed its model.
            if effect_order is not None:
                assert model_id is not None
                counted = models.assign_effect_order(tx, model_id, is_step=is_step)
                assert counted == effect_order, f"log record {effect_order} of {model_id} is no. {counted} on disk"

            # The result. A sample may have been cancelled.
            if futures.complete(tx, queued.request_id, data, failed=failed, effect_order=effect_order, now=now):
                if observed is not None:
                    observed(tx, now)
            else:
                level = logging.DEBUG if isinstance(queued.request, Sample) else logging.WARNING
                _log.log(level, "%s request %s already has a result or was removed", queued.kind, queued.request_id)

            # The time of the model's last request, and dependent rows.
            if model_id is not None and now - self._touched.get(model_id, 0.0) >= _TOUCH_PERIOD_S:
                if len(self._touched) >= _MAX_TOUCHED:
                    self._touched.clear()
                self._touched[model_id] = now
                with suppress(LookupError):
                    models.touch(tx, model_id, now)
            if rows is not None:
                rows(tx)

        return write
