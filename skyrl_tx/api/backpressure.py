"""Telling clients to send their samples later, before memory is short."""

import threading
import time
from collections import deque
from http import HTTPStatus

from skyrl_tx.api.errors import ApiError
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import REQUEST_BYTES, SampleLoad

_LOOK_EVERY_S = 0.25
# The header by which a client says that it takes 429 for a pause (SDK 0.38, lib/public_interfaces/sampling_client.py).
_HEADERS = {"Retry-After": "1", "X-Tinker-Sampling-Backpressure": "1"}


class SampleBudget:
    """What the engine said that it holds, and what this process has submitted since."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._load: SampleLoad | None = None
        self._submitted: deque[tuple[int, int]] = deque()  # positions, and bytes
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise ApiError 429 if one more sample of this size is too much now; it has taken no place then.

        One that is too much by itself is let through: the engine refuses it with the numbers.
        """
        self._look()
        with self._lock:
            if self._load is None or num_bytes + REQUEST_BYTES > self._load.max_bytes:
                return
            held = self._load.num_bytes + self._num_bytes
            if held + num_bytes + REQUEST_BYTES <= self._load.max_bytes:
                return
            detail = f"samples that wait take {held} bytes of {self._load.max_bytes}: send this one later"
        raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, headers=_HEADERS)

    def note(self, position: int, num_bytes: int) -> None:
        """Count a sample that was submitted."""
        with self._lock:
            self._submitted.append((position, num_bytes + REQUEST_BYTES))
            self._num_bytes += num_bytes + REQUEST_BYTES

    def _look(self) -> None:
        """Hear the engine's last word now and then, and forget what it has counted itself."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        load = self._store.read(engine_state.sample_load)
        with self._lock:
            self._load = load
            counted = 0 if load is None else load.position
            # Submissions are noted by many threads, so their order is only about that of their positions.
            while self._submitted and self._submitted[0][0] <= counted:
                self._num_bytes -= self._submitted.popleft()[1]
