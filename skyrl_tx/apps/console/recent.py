"""Values that several visitors look at in the same second, computed once for them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")
_MAX_KEYS = 256


class Recent(Generic[V]):
    """The newest value of each key, for a time. A key names all that the value depends on, such as who may see it."""

    def __init__(self, lifetime_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of a key, computed at most a lifetime ago. Errors are not kept."""
        with self._lock:
            found = self._values.get(key)
        if found is not None and self._clock() - found[0] < self._lifetime_s:
            return found[1]
        began, value = self._clock(), compute()
        with self._lock:
            self._values[key] = (began, value)
            self._values.move_to_end(key)
            while len(self._values) > _MAX_KEYS:
                self._values.popitem(last=False)
        return value
