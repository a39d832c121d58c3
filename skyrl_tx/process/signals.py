"""Handle signals on a separate thread, dump stacks, and end the process if one of its threads dies.

Python runs signal handlers on the main thread, which may be busy in one long backend call. So this
module reads signals on its own thread.
"""

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Exit status of a process that ends because one of its threads failed (EX_SOFTWARE of sysexits.h).
"""
_UNINTERRUPTED_S = 5.0
"""Longer than it takes to walk all stacks."""


class _Receiver:
    """The thread that calls the signal handlers. It runs until the process ends."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int], object]] = {}
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        ServiceThread("signals", self._receive).start()

    def set_handler(self, number: signal.Signals, on_signal: Callable[[int], object]) -> Any:
        """Set the handler of a signal. Returns the previous Python handler."""
        self.handlers[number] = on_signal
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        return signal.signal(number, _ignore)

    def _receive(self) -> None:
        while True:
            (number,) = os.read(self._readable, 1)
            if handler := self.handlers.get(number):
                handler(number)


@contextmanager
def handle_signals(numbers: set[signal.Signals], on_signal: Callable[[int], object]) -> Generator[None]:
    """Call `on_signal(number)` on the signal thread inside the context.

    Only the main thread may enter it.

    A program that uses this must not call `signal.set_wakeup_fd`, for example through
    `add_signal_handler` of `asyncio`.
    """
    before = {number: _get_receiver().set_handler(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
            del _get_receiver().handlers[number]


def enable_stack_dumps() -> None:
    """Write the stacks of all threads to standard error on SIGQUIT, and when the process crashes.

    The SIGQUIT handler of `faulthandler` is not used: it reads the stacks while other threads
    change them, which sometimes crashes the process. The signal thread holds the interpreter's lock
    while it reads them.
    """
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    _get_receiver().set_handler(signal.SIGQUIT, _write_stacks)


@functools.cache
def _get_receiver() -> _Receiver:
    """Return the receiver of this process. The first call starts it."""
    return _Receiver()


def _write_stacks(_: int) -> None:
    """Write the stacks in one call, because the processes of a server usually share a log."""
    with suppress(OSError):  # the reader of the log has ended
        os.write(2, describe_stacks().encode())


def describe_stacks() -> str:
    """Return the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _block_other_threads():
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        walked = [(names.get(thread, thread), [*traceback.walk_stack(frame)]) for thread, frame in frames.items()]

    # Format them after other threads run again, because this reads the source files.
    stacks = [
        f'Thread "{name}" (most recent call last):\n{"".join(traceback.StackSummary.extract(reversed(calls)).format())}'
        for name, calls in walked
    ]
    return "\n".join((f"Stacks of process {os.getpid()}:", *stacks, ""))


@contextmanager
def _block_other_threads() -> Generator[None]:
    """Keep other threads from running Python code, so that their stacks do not change."""
    interval = sys.getswitchinterval()
    time.sleep(0)  # let threads run that have already requested the interpreter's lock
    sys.setswitchinterval(_UNINTERRUPTED_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing.

    Without a Python handler, the signal would end the process instead of waking the signal thread.
    """


class _Failures:
    """The first failure of a thread of this process, and whether it ends the process."""

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
    """Return which thread of this process died and why. None if no thread has died."""
    return _failures.first


def end_process_on_failure() -> None:
    """End this process if one of its threads dies, so that its supervisor starts it again.

    No acknowledged request is lost, because all are on disk. Programs that embed a server do not
    call this. In such a program only `get_failure` reports the failure.
    """
    _failures.ends_process = True


class ServiceThread(threading.Thread):
    """A daemon thread.

    If it dies, the traceback is logged and the process ends, see `end_process_on_failure`.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        """`work` must handle expected errors, and return when the thread is no longer needed."""
        super().__init__(name=name, daemon=True)
        self._work = work

    def run(self) -> None:
        """Run the thread's work."""
        try:
            self._work()
        except BaseException as error:
            _failures.report(self.name, error)
            raise
