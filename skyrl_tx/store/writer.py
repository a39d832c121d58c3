"""Group commit: one thread runs queued write jobs and commits them in groups.

A group is the set of jobs that share one transaction.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from sqlalchemy import Connection, Dialect, Engine
from sqlalchemy.exc import DataError, DBAPIError
from sqlmodel import Session

from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import StoreBlocked, StoreError, ValueRefused

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_GROUP = 256
_MAX_GROUP_S = 0.02
"""After this time the jobs that have run are committed, and the other jobs move to the next group.

A limit is needed because callers get their results only after the commit.
"""
_SAVEPOINT_COMMANDS = {
    "do_savepoint": "SAVEPOINT",
    "do_rollback_to_savepoint": "ROLLBACK TO SAVEPOINT",
    "do_release_savepoint": "RELEASE SAVEPOINT",
}
"""SQL commands by the method of SQLAlchemy's `Dialect` that sends them."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 2.0
_LIMIT_EXCEEDED = "54"
"""Class of PostgreSQL's error codes for a limit, for example the size of an entry in an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Lets a writer retry while the database is full or locked. Without it, such writes fail."""

    until: threading.Event
    """Event that ends the retries: once it is set, blocked writes fail."""
    report: Callable[[Session, str], None]
    """Writes the reason of the wait to the database.

    This small write may succeed when larger writes fail.
    """


def translate_refusal(error: BaseException) -> ValueRefused | None:
    """Return ValueRefused if the database or its driver refused a value; None for other errors.

    The message contains neither the statement nor its values.
    """
    reason: object = error.reason if isinstance(error, UnicodeEncodeError) else None  # half of a surrogate pair
    if isinstance(error, DBAPIError):
        is_too_large = str(getattr(error.orig, "sqlstate", "")).startswith(_LIMIT_EXCEEDED)
        reason = error.orig if is_too_large or isinstance(error, DataError) else None
    if reason is None:
        return None
    refusal = ValueRefused(f"a value cannot be stored: {' '.join(str(reason).split())}")
    refusal.__cause__ = error
    return refusal


def _send_savepoints_as_text(dialect: Dialect) -> None:
    """Send savepoints as text, which halves the CPU time of a job with one small statement.

    Otherwise SQLAlchemy would compile three statements for each savepoint, because each savepoint
    has a new name.
    """

    def sender(command: str) -> Callable[[Connection, str], object]:
        return lambda connection, name: connection.exec_driver_sql(f"{command} {name}")

    for method, command in _SAVEPOINT_COMMANDS.items():
        setattr(dialect, method, sender(command))


class _Job(Generic[T]):
    """A queued write: the work, its outcome, and the future that the caller waits for.

    If the database refuses a value of the work, `if_refused` runs instead.
    """

    def __init__(self, work: Callable[[Session], T], if_refused: Callable[[Session], T] | None = None) -> None:
        self._work = work
        self._if_refused = if_refused
        self._publish: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.future: Future[T] = Future()

    def run(self, connection: Connection) -> None:
        """Run the work in a savepoint. A retry runs it again. Errors are stored, not raised."""
        self._try(connection, self._work)
        if self._if_refused is not None and isinstance(self.error, ValueRefused) and not connection.invalidated:
            _log.error("%s; storing less", self.error)
            self._try(connection, self._if_refused)

    def _try(self, connection: Connection, work: Callable[[Session], T]) -> None:
        self._publish = self.error = None
        try:
            with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as tx:
                result = work(tx)
                tx.commit()
            self._publish = partial(self.future.set_result, result)
        except BaseException as error:  # the caller gets the error; it must not end the writer thread
            self.error = translate_refusal(error) or error

    def publish(self) -> None:
        """Set the caller's future to the result or the error."""
        if self._publish is not None:
            self._publish()
        else:
            self.future.set_exception(self.error)


class _GroupLost(Exception):
    """The transaction was rolled back with all jobs of the group."""


class GroupWriter:
    """The only thread of a process that writes to the database.

    While a group is being committed, the next group gathers in the queue. Thus many small writes
    share one fsync.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        explain: Callable[[BaseException], StoreError],
        committed: Callable[[], None],
        retry: RetryPolicy | None = None,
    ) -> None:
        """Start the thread.

        `committed` is called after each commit. With `retry`, work may run more than once. It must
        therefore create the rows that it adds, because SQLAlchemy does not insert the same object a
        second time.

        `engine` must invalidate its connection after any error that ends a transaction.
        """
        self._engine = engine
        _send_savepoints_as_text(engine.dialect)
        self._explain = explain
        self._committed = committed
        self._retry = retry
        self._delay_s = 0.0  # wait before the next retry; 0 if the last group was written

        self.observe_seconds: Callable[[float], object] | None = None
        """Called with the duration of each group: running its jobs and committing them."""
        self.failure: StoreError | None = None
        """The error of the last group, or None if it was written."""

        self._queue: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._close_reason = "the store is closed"
        self._thread = ServiceThread("store-writer", self._serve)
        self._thread.start()

    def submit(self, work: Callable[[Session], T], if_refused: Callable[[Session], T] | None = None) -> Future[T]:
        """Queue work, and work to do instead if the database refuses a value.

        Raises StoreError after `close`.
        """
        job = _Job(work, if_refused)
        with self._closing:  # nothing may be queued after the end marker
            if self._is_closed:
                raise StoreError(self._close_reason)
            self._queue.put(job)  # pyright: ignore[reportArgumentType]
        return job.future

    def is_own_thread(self) -> bool:
        """Return whether the caller runs on the writer thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Write the queued jobs, then end the thread."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        group: list[_Job[object]] = []
        try:
            is_open = True
            while is_open or group:
                is_open = self._gather(group) and is_open
                if group:
                    del group[: self._write(group[:1] if self._delay_s else group)]
        except BaseException as error:
            self._abandon(group, f"the thread that writes to the database ended: {type(error).__name__}: {error}")
            raise

    def _abandon(self, group: list[_Job[object]], reason: str) -> None:
        """Fail all queued jobs and accept no more, so that no caller waits for a dead thread."""
        with self._closing:
            self._is_closed, self._close_reason = True, reason
        self.failure = failure = StoreError(reason)
        self._queue.put(None)
        is_open = True
        while is_open:
            is_open = self._gather(group)
            while group:
                future = group.pop().future
                if not future.done():
                    future.set_exception(failure)

    def _gather(self, group: list[_Job[object]]) -> bool:
        """Add queued jobs to the group.

        Wait for a job if the group is empty. Return False at the end marker.
        """
        while len(group) < _MAX_GROUP:
            try:
                job = self._queue.get(block=not group)
            except Empty:
                break
            if job is None:
                return False
            if job.future.set_running_or_notify_cancel():
                group.append(job)
        return True

    def _write(self, group: list[_Job[object]]) -> int:
        """Run the jobs of a group and commit them.

        Return how many finished within `_MAX_GROUP_S`.
        """
        num_done, started = 0, time.monotonic()
        try:
            # Run the jobs and commit.
            with self._engine.connect() as connection, connection.begin():
                end = time.monotonic() + _MAX_GROUP_S
                for job in group:
                    job.run(connection)
                    num_done += 1
                    if connection.invalidated or self._is_blocked(job.error):
                        raise _GroupLost from job.error
                    if time.monotonic() >= end:
                        break
                failpoint("store.commit")
        except BaseException as error:
            # Retry later, or fail all jobs of the group.
            failure = self._explain(error.__cause__ if isinstance(error, _GroupLost) and error.__cause__ else error)
            if failure is not error:
                failure.__cause__ = error
            self.failure = failure
            if self._wait_to_retry(failure, len(group)):
                return 0
            for job in group:
                job.future.set_exception(failure)
            return len(group)

        # Notify the peer and the callers.
        failpoint("store.committed")
        if self._delay_s:
            _log.warning("database is writable again")
        self.failure, self._delay_s = None, 0.0
        self._committed()
        if self.observe_seconds is not None:
            self.observe_seconds(time.monotonic() - started)
        for job in group[:num_done]:
            job.publish()
        return num_done

    def _is_blocked(self, error: BaseException | None) -> bool:
        return isinstance(error, DBAPIError) and isinstance(self._explain(error), StoreBlocked)

    def _wait_to_retry(self, failure: StoreError, num_jobs: int) -> bool:
        """Wait with exponential backoff if the policy allows it. Return whether to retry.

        Retries run one job at a time, because a small job may succeed where the whole group failed.
        """
        if self._retry is None or not isinstance(failure, StoreBlocked):
            return False
        if not self._delay_s:
            _log.warning("%s; retrying until the write succeeds", failure)
        self._delay_s = min(2 * self._delay_s or _FIRST_DELAY_S, _MAX_DELAY_S)
        self._report(failure, self._retry)
        return not self._retry.until.wait(self._delay_s) or num_jobs > 1

    def _report(self, failure: StoreError, retry: RetryPolicy) -> None:
        try:
            with self._engine.connect() as connection, connection.begin():
                _Job(lambda tx: retry.report(tx, str(failure))).run(connection)
        except Exception as error:  # expected, because the same problem may block this write
            _log.debug("the reason of the wait cannot be written either: %s", error)
