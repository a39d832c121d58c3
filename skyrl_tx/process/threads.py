"""Threads that a process cannot work without: none of them dies silently."""

import logging
import os
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Exit status of a process that ends because one of its threads failed (EX_SOFTWARE of sysexits.h)."""


class _Failures:
    """The first failure of a thread of this process, and what the process does about it."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.ends_process = False

    def report(self, thread: str, error: BaseException) -> None:
        self.first = self.first or f"the thread {thread!r} ended: {type(error).__name__}: {error}"
        _log.critical("the thread %r ended", thread, exc_info=error)
        if self.ends_process:
            os._exit(EXIT_STATUS)


_failures = _Failures()


def get_failure() -> str | None:
    """Return which thread of this process died, and of what; None while all are alive or have ended in order."""
    return _failures.first


def end_process_on_failure() -> None:
    """End this process when one of its threads dies, so that its supervisor starts another one.

    Everything that was acknowledged is on disk. Without this call, which programs that embed a server do not make,
    only `failure` reports the death.
    """
    _failures.ends_process = True


class ServiceThread(threading.Thread):
    """A daemon thread whose death is logged with its traceback and ends the process, see `end_process_on_failure`."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        """`work` handles the errors that it expects, and returns when the thread is no longer needed."""
        super().__init__(name=name, daemon=True)
        self._work = work

    def run(self) -> None:
        """Run the thread's work."""
        try:
            self._work()
        except BaseException as error:
            _failures.report(self.name, error)
            raise
