"""The progress of work that takes long while a process starts, for logs and the engine's status."""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_PERIOD_S = 5.0

_log = logging.getLogger(__name__)
_current: str | None = None


def get_progress() -> str | None:
    """Return what this process is doing and how far it is, or None if it reports nothing."""
    return _current or _describe()


@contextmanager
def report_progress(describe: Callable[[], str | None]) -> Generator[None]:
    """Report what `describe` returns, until the context ends. Any thread may call `describe`."""
    global _describe
    _describe = describe
    try:
        yield
    finally:
        _describe = _report_nothing


def _report_nothing() -> str | None:
    return None


_describe: Callable[[], str | None] = _report_nothing


class ByteProgress:
    """Counts the bytes of a task, and reports the bytes and their rate. Thread-safe."""

    def __init__(self, task: str, total: int) -> None:
        """`task` is what the process does, for example `loading weights`."""
        self._task, self._total = task, total
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._started = self._logged = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes. Logs the progress every five seconds."""
        global _current
        with self._lock:
            self._num_bytes += num_bytes
            now = time.monotonic()
            _current = self._describe(f"{self._num_bytes / 1e9:.1f} of {self._total / 1e9:.1f} GB", now)
            if now - self._logged >= _PERIOD_S:
                self._logged = now
                _log.info(_current)

    def close(self) -> None:
        """Log the total, and report nothing any more."""
        global _current
        now = time.monotonic()
        _log.info(self._describe(f"{self._num_bytes / 1e9:.2f} GB in {now - self._started:.1f} s", now))
        _current = None

    def _describe(self, amount: str, now: float) -> str:
        rate = self._num_bytes / 1e9 / max(now - self._started, 1e-3)
        return f"{self._task}: {amount}, {rate:.2f} GB/s"
