"""How long the API was there: while it is away no client can send what is missing, or a heartbeat."""

import time

from skyrl_tx.store.database import Store

_LOOK_EVERY_S = 0.05
_ONE_LOOK_S = 60.0
"""What is taken for granted between two looks; an engine that was busy for longer cannot know."""


class Presence:
    """The time during which an engine saw the API."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = time.monotonic()
        self._seconds = self._unbroken_s = 0.0

    def seconds(self) -> float:
        """All of it: a clock that stands still while the API is away."""
        self._look()
        return self._seconds

    def unbroken_s(self) -> float:
        """How long the API has been there without a gap."""
        self._look()
        return self._unbroken_s

    def _look(self) -> None:
        """Go on, in steps of a fraction of a second: looking at the API is not free."""
        elapsed = time.monotonic() - self._last
        if elapsed < _LOOK_EVERY_S:
            return
        self._last += elapsed
        if self._store.peer_lives():
            self._seconds += elapsed
            self._unbroken_s += min(elapsed, _ONE_LOOK_S)
        else:
            self._unbroken_s = 0.0
