"""Threads that owners share: the work of one owner does not delay the work of another for long."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class FairThreads:
    """Runs work in threads. Owners take turns, and the work of one owner never uses all threads.

    The work of an owner starts in the order of its submission. A thread ends when it finds no work.
    """

    def __init__(self, max_threads: int, per_owner: int, name: str) -> None:
        """Start no thread yet. One owner uses at most `per_owner` of the threads at a time."""
        self._max_threads = max_threads
        self._per_owner = per_owner
        self._name = name
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """The work that has not started, by owner. The owner whose last turn is longest ago comes first."""

    def submit(self, owner: str, work: Callable[[], T]) -> "Future[T]":
        """Run `work` in a thread, and return the future of its result."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
            if self._num_running[owner] < self._per_owner and self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._run_waiting, name=self._name).start()
        return future

    def close(self) -> None:
        """Cancel the work that has not started. Idempotent."""
        with self._lock:
            waiting = [future for queue in self._waiting.values() for future, _ in queue]
            self._waiting.clear()
        for future in waiting:
            future.cancel()

    def _run_waiting(self) -> None:
        """Run work until there is none, or the owners of all of it use their threads, which then run it."""
        owner = None
        while True:
            with self._lock:
                # Count the end of the last work here, because another submission must find this thread or its work
                if owner is not None:
                    self._num_running[owner] -= 1
                owner = next((name for name in self._waiting if self._num_running[name] < self._per_owner), None)
                if owner is None:
                    self._num_running += Counter()  # forgets owners without work
                    self._num_threads -= 1
                    return

                # Put the owner behind all other owners
                queue = self._waiting.pop(owner)
                future, work = queue.popleft()
                if queue:
                    self._waiting[owner] = queue
                self._num_running[owner] += 1

            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # whoever waits for the result gets it
                    future.set_exception(error)
