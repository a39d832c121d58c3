"""Handles signals on a thread of their own, because the main thread may be busy in one long call."""

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

_UNINTERRUPTED_S = 5.0
"""Longer than it takes to walk all stacks."""


class _Receiver:
    """The thread that calls the handlers of this process; it runs until the process ends."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int], object]] = {}
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        ServiceThread("signals", self._receive).start()

    def set_handler(self, number: signal.Signals, on_signal: Callable[[int], object]) -> Any:
        """Return Python's handler until now."""
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
    """Call `on_signal(number)` on the thread of signals. Only the main thread may enter; it may be busy afterwards.

    A program that uses it must not set `signal.set_wakeup_fd`, as `asyncio`'s `add_signal_handler` does.
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

    `faulthandler` has a handler of its own, but it reads the stacks while other threads change them, which crashes
    the process now and then. The thread of signals holds the interpreter's lock meanwhile.
    """
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    _get_receiver().set_handler(signal.SIGQUIT, _write_stacks)


@functools.cache
def _get_receiver() -> _Receiver:
    """Return that of this process, which the first use starts."""
    return _Receiver()


def _write_stacks(_: int) -> None:
    """Write in one call, because the processes of a server usually share a log."""
    with suppress(OSError):  # the log's reader has ended
        os.write(2, describe_stacks().encode())


def describe_stacks() -> str:
    """Return the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _block_other_threads():
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        found = [(names.get(thread, thread), [*traceback.walk_stack(frame)]) for thread, frame in frames.items()]
    stacks = [  # which reads the files of the code
        f'Thread "{name}" (most recent call last):\n{"".join(traceback.StackSummary.extract(reversed(calls)).format())}'
        for name, calls in found
    ]
    return "\n".join((f"Stacks of process {os.getpid()}:", *stacks, ""))


@contextmanager
def _block_other_threads() -> Generator[None]:
    """Let no other thread run Python code, for a moment: a call that returns loses its place in the stack it was in."""
    interval = sys.getswitchinterval()
    time.sleep(0)  # then no thread has requested the interpreter's lock yet
    sys.setswitchinterval(_UNINTERRUPTED_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; without a Python handler the signal would end the process and not reach the wakeup descriptor."""


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
