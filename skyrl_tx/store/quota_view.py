"""The quotas and weights as a process sees them: in memory, and at most about a second old."""

import time
from collections.abc import Callable, Mapping

from skyrl_tx.store import quotas
from skyrl_tx.store.database import Store
from skyrl_tx.store.quotas import NO_RULES, Rules

_PERIOD_S = 1.0


class QuotaView:
    """Reads the rows once a second, so that requests need no query to learn that no quota concerns them."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._read_at = float("-inf")
        self.rules: Rules = NO_RULES

    def weights(self) -> Mapping[str, int]:
        """Return the weights of owners; others have 1."""
        return self.rules.weights

    def refresh(self) -> bool:
        """Read the rows again if a second has passed; return whether they have changed."""
        now = self._clock()
        if now - self._read_at < _PERIOD_S:
            return False
        self._read_at = now
        before, self.rules = self.rules, self._store.read(quotas.read)
        return self.rules != before
