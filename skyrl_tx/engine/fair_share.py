"""Shares by weight: the owner with the least virtual time is next.

Virtual time grows by what an owner gets, divided by its weight. An owner that comes back starts at the virtual time of
the work that started last, so that a time without work saves up nothing (start-time fair queuing, Goyal, Vin and Cheng
1996). Owners of weight 0 come after all others, and share among themselves as equals.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

_MAX_OWNERS = 1024


class VirtualTime(NamedTuple):
    """The work that an owner has got, divided by its weight. That of an owner of weight 0 is after all others."""

    is_last: bool
    at: float


class FairShare:
    """The virtual time of each owner, for one kind of capacity. Without weights every owner has weight 1."""

    def __init__(self, weights: Callable[[], Mapping[str, int]] = dict) -> None:
        self._weights = weights
        self._times: dict[str, VirtualTime] = {}
        # Virtual times of the work that started last: of owners with a weight, and of those of weight 0.
        self._started = {False: 0.0, True: 0.0}

    @property
    def is_weighted(self) -> bool:
        """Whether any owner has another share than the others."""
        return any(weight != 1 for weight in self._weights().values())

    def get_weight(self, owner: str) -> int:
        """Return the weight of an owner."""
        return self._weights().get(owner, 1)

    def get_virtual_time(self, owner: str) -> VirtualTime:
        """Return the virtual time of an owner."""
        is_last, found = self.get_weight(owner) == 0, self._times.get(owner)
        if found is None or found.is_last != is_last:  # new, or its weight has changed from 0 or to it
            return VirtualTime(is_last, self._started[is_last])
        return found

    def reset(self) -> None:
        """Forget what owners got."""
        self._times.clear()
        self._started = {False: 0.0, True: 0.0}

    def record_arrival(self, owner: str) -> None:
        """Note that an owner has work, and had none that could start."""
        if len(self._times) >= _MAX_OWNERS:
            self._times = {name: time for name, time in self._times.items() if time.at > self._started[time.is_last]}
        is_last, at = self.get_virtual_time(owner)
        self._times[owner] = VirtualTime(is_last, max(at, self._started[is_last]))

    def charge(self, owner: str, amount: float) -> None:
        """Count work that starts now."""
        is_last, start = self.get_virtual_time(owner)
        self._started[is_last] = max(self._started[is_last], start)
        self._times[owner] = VirtualTime(is_last, start + amount / (self.get_weight(owner) or 1))
