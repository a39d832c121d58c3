"""Handles signals on a thread of their own, because the main thread may be busy in one long call."""

import faulthandler
import functools
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

from skyrl_tx.process.threads import ServiceThread

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
