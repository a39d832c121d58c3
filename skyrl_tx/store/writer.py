"""Group commit: one thread runs what waits to be written, and commits it together."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError
from sqlmodel import Session

from skyrl_tx.failpoints import reach
from skyrl_tx.store.errors import StoreBlocked, StoreError, ValueRefused
from skyrl_tx.store.patience import Patience

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_GROUP = 256
_LONGEST_GROUP_S = 0.02
"""What a group wrote can be read when all of it is committed: what would begin later than this is left to the next."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0


def refused(error: DataError) -> ValueRefused:
    """Say what the database has against a value, without the statement and all its values."""
    refusal = ValueRefused(f"a value cannot be stored: {' '.join(str(error.orig).split())}")
    refusal.__cause__ = error
    return refusal


class _Job(Generic[T]):
    """A piece of work, what came of it, and who waits for that."""

    def __init__(self, work: Callable[[Session], T]) -> None:
        self._work = work
        self._tell: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.future: Future[T] = Future()

    def run(self, connection: Connection) -> None:
        """Run in a savepoint of its own, perhaps once more; never raises."""
        self._tell = self.error = None
        try:
            with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as tx:
                result = self._work(tx)
                tx.commit()
            self._tell = partial(self.future.set_result, result)
        except DataError as error:
            self.error = refused(error)
        except BaseException as error:  # whatever it is belongs to the caller, and must not end this thread
            self.error = error

    def tell(self) -> None:
        """Give the caller what came of it."""
        if self._tell is not None:
            self._tell()
        else:
            self.future.set_exception(self.error)


class _GroupLost(Exception):
    """The transaction is gone, and with it all that the group wrote."""


class GroupWriter:
    """The one thread of a process that writes.

    While one group is being committed the next gathers, so that many small writes share one fsync.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        explain: Callable[[BaseException], StoreError],
        committed: Callable[[], None],
        patience: Patience | None = None,
    ) -> None:
        """Start the thread. `committed` runs after each commit. With `patience` work may run more than once.

        The engine must invalidate its connection on any error that ends a transaction.
        """
        self._engine = engine
        self._explain = explain
        self._committed = committed
        self._patience = patience
        self._delay_s = 0.0  # until what the database did not take is tried again; 0: it took the last
        self.failure: StoreError | None = None
        """Why the last group was not written; None: it was."""
        self._queue: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Session], T]) -> Future[T]:
        """Queue work. Raises StoreError once closed."""
        job = _Job(work)
        with self._closing:  # so that nothing is queued behind the end
            if self._is_closed:
                raise StoreError("the store is closed")
            self._queue.put(job)  # pyright: ignore[reportArgumentType]
        return job.future

    def is_own_thread(self) -> bool:
        """Whether the caller is work that is being written."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Write what was queued, then end."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        is_open = True
        group: list[_Job[object]] = []
        while is_open or group:
            is_open = self._gather(group) and is_open
            if group:
                del group[: self._write(group[:1] if self._delay_s else group)]

    def _gather(self, group: list[_Job[object]]) -> bool:
        """Add what waits; if there is nothing yet, wait for it. False at the end of all work."""
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
        """Commit a group, or as much of it as takes its time; returns how many are settled."""
        num_done = 0
        try:
            with self._engine.connect() as connection, connection.begin():
                end = time.monotonic() + _LONGEST_GROUP_S
                for job in group:
                    job.run(connection)
                    num_done += 1
                    if connection.invalidated or self._is_blocked(job.error):
                        raise _GroupLost from job.error
                    if time.monotonic() >= end:
                        break
                reach("store.commit")
        except BaseException as error:
            failure = self._explain(error.__cause__ if isinstance(error, _GroupLost) and error.__cause__ else error)
            if failure is not error:
                failure.__cause__ = error
            self.failure = failure
            if self._waits_out(failure, len(group)):
                return 0
            for job in group:
                job.future.set_exception(failure)
            return len(group)
        reach("store.committed")
        if self._delay_s:
            _log.warning("the database takes what is written again")
        self.failure, self._delay_s = None, 0.0
        self._committed()
        for job in group[:num_done]:
            job.tell()
        return num_done

    def _is_blocked(self, error: BaseException | None) -> bool:
        return isinstance(error, DBAPIError) and isinstance(self._explain(error), StoreBlocked)

    def _waits_out(self, failure: StoreError, num_jobs: int) -> bool:
        """Wait, if it may pass, and say whether to try again: later each time, and one by one, so that some may fit."""
        if self._patience is None or not isinstance(failure, StoreBlocked):
            return False
        if not self._delay_s:
            _log.warning("%s; waiting until it takes what is to be written", failure)
        self._delay_s = min(2 * self._delay_s or _FIRST_DELAY_S, _LONGEST_DELAY_S)
        self._say(failure, self._patience)
        return not self._patience.until.wait(self._delay_s) or num_jobs > 1

    def _say(self, failure: StoreError, patience: Patience) -> None:
        try:
            with self._engine.connect() as connection, connection.begin():
                _Job(lambda tx: patience.tell(tx, str(failure))).run(connection)
        except Exception as error:  # it is what nothing can be written for
            _log.debug("nor can it be written down that it waits: %s", error)
