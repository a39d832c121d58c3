"""Group commit: one thread runs queued work and commits it in groups."""

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
from skyrl_tx.store.errors import StoreBlocked, StoreError, ValueRefused

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_GROUP = 256
_MAX_GROUP_S = 0.02
"""A group's results are released after its commit. After this time the rest of the group is left to the next one."""
_SAVEPOINT_COMMANDS = {
    "do_savepoint": "SAVEPOINT",
    "do_rollback_to_savepoint": "ROLLBACK TO SAVEPOINT",
    "do_release_savepoint": "RELEASE SAVEPOINT",
}
"""By the names of the methods with which SQLAlchemy's dialects send them."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Makes a writer retry while the database is full or locked, instead of failing."""

    until: threading.Event
    """Once set, blocked work fails."""
    report: Callable[[Session, str], None]
    """Writes the reason of the wait to the database; a small write that may succeed where larger ones fail."""


def translate_refusal(error: DataError) -> ValueRefused:
    """Translate the database's refusal of a value, without the statement and its values."""
    refusal = ValueRefused(f"a value cannot be stored: {' '.join(str(error.orig).split())}")
    refusal.__cause__ = error
    return refusal


def _send_savepoints_as_text(dialect: Dialect) -> None:
    """Let an engine's savepoints be sent as text, which halves the CPU time of a job with one small statement.

    Each savepoint has a new name, so that SQLAlchemy compiles its statements every time.
    """

    def sender(command: str) -> Callable[[Connection, str], object]:
        return lambda connection, name: connection.exec_driver_sql(f"{command} {name}")

    for method, command in _SAVEPOINT_COMMANDS.items():
        setattr(dialect, method, sender(command))


class _Job(Generic[T]):
    """Queued work, its outcome, and the future that the caller holds."""

    def __init__(self, work: Callable[[Session], T]) -> None:
        self._work = work
        self._publish: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.future: Future[T] = Future()

    def run(self, connection: Connection) -> None:
        """Run the work in its own savepoint, possibly a second time; never raises."""
        self._publish = self.error = None
        try:
            with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as tx:
                result = self._work(tx)
                tx.commit()
            self._publish = partial(self.future.set_result, result)
        except DataError as error:
            self.error = translate_refusal(error)
        except BaseException as error:  # any error belongs to the caller and must not end this thread
            self.error = error

    def publish(self) -> None:
        """Set the caller's future to the result or error."""
        if self._publish is not None:
            self._publish()
        else:
            self.future.set_exception(self.error)


class _GroupLost(Exception):
    """The transaction was rolled back with all work of the group."""


class GroupWriter:
    """The one writing thread of a process.

    While one group is committed the next one gathers, so that many small writes share one fsync.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        explain: Callable[[BaseException], StoreError],
        committed: Callable[[], None],
        retry: RetryPolicy | None = None,
    ) -> None:
        """Start the thread. `committed` runs after each commit. With `retry`, work may run more than once.

        Work therefore makes the rows that it adds: an object that was added before is not inserted a second time.

        The engine must invalidate its connection on any error that ends a transaction.
        """
        self._engine = engine
        _send_savepoints_as_text(engine.dialect)
        self._explain = explain
        self._committed = committed
        self._retry = retry
        self._delay_s = 0.0  # before the next retry; 0: the last group was written
        self.observe_seconds: Callable[[float], object] | None = None
        """Called with the seconds of each commit, from the first statement on."""
        self.failure: StoreError | None = None
        """The error of the last group; None if it was written."""
        self._queue: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._end = "the store is closed"  # why no more work is accepted
        self._thread = ServiceThread("store-writer", self._serve)
        self._thread.start()

    def submit(self, work: Callable[[Session], T]) -> Future[T]:
        """Queue work. Raises StoreError once closed."""
        job = _Job(work)
        with self._closing:  # nothing may be queued after the end marker
            if self._is_closed:
                raise StoreError(self._end)
            self._queue.put(job)  # pyright: ignore[reportArgumentType]
        return job.future

    def is_own_thread(self) -> bool:
        """Return whether the caller runs on the writing thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Write the queued work, then end the thread."""
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
        """Fail all queued work and accept no more, so that no caller waits for a thread that has ended."""
        with self._closing:
            self._is_closed, self._end = True, reason
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
        """Add queued jobs to the group, waiting while it is empty; return False at the end marker."""
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
        """Commit as much of a group as fits in the time limit; return the number of finished jobs."""
        num_done, started = 0, time.monotonic()
        try:
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
            failure = self._explain(error.__cause__ if isinstance(error, _GroupLost) and error.__cause__ else error)
            if failure is not error:
                failure.__cause__ = error
            self.failure = failure
            if self._wait_to_retry(failure, len(group)):
                return 0
            for job in group:
                job.future.set_exception(failure)
            return len(group)
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
        """Wait with exponential backoff if the policy allows it; return whether to retry.

        Retries run one job at a time, because a small one may fit where the group did not.
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
        except Exception as error:  # expected: the same cause blocks this write
            _log.debug("the reason of the wait cannot be written either: %s", error)
