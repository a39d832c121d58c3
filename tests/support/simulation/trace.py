"""The trace of a history: a hash of all events, and the events themselves when they are wanted."""

import hashlib
from collections.abc import Callable


class Trace:
    """Events with their time and fiber. Equal seeds give equal traces."""

    def __init__(self, *, directory: str, is_kept: bool) -> None:
        """`directory` is left out of all events, because its name is random."""
        self._directory = directory
        self._digest = hashlib.blake2b(digest_size=16)
        self._is_kept = is_kept
        self.lines: list[str] = []
        self.num_faults = 0
        self.where: Callable[[], str] = lambda: ""

    def __call__(self, event: str) -> None:
        """Record an event."""
        self.num_faults += event.startswith("FAULT")
        line = f"{self.where()} {event.replace(self._directory, '')}"
        self._digest.update(line.encode())
        if self._is_kept:
            self.lines.append(line)

    @property
    def hash(self) -> str:
        """The hash of all events."""
        return self._digest.hexdigest()
