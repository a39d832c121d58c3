"""Share the device between owners by weight: the owner with the least virtual time is next.

An owner's virtual time grows by the work that the owner gets, divided by the owner's weight. An
owner whose virtual time is behind has credit: the owner is served first until it has
caught up. An owner that was idle starts again at the virtual time of the work that started last, so
idle time earns no credit (start-time fair queuing, Goyal, Vin and Cheng 1996).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

_MAX_OWNERS = 1024
"""When `FairShare` has this many owners, it forgets some of them.

It forgets each owner whose virtual time is not above the current one. A forgotten owner loses only
its credit: with the next request, the owner gets the current virtual time.
"""


class VirtualTime(NamedTuple):
    """The amount of work that an owner received, divided by its weight.

    The owner with the smallest virtual time is served next. Owners of weight 0 come last.
    """

    is_last: bool
    """Whether the owner has weight 0, so that it is served after the owners with a weight."""
    work: float


class FairShare:
    """The virtual time of each owner, for one kind of capacity.

    An owner without a weight has weight 1.
    """

    def __init__(self, weights: Callable[[], Mapping[str, int]] = dict) -> None:
        self._weights = weights
        self._times: dict[str, VirtualTime] = {}
        # The current virtual time: the highest one at which work was started. It is separate for
        # owners with a weight above 0 (key False) and owners of weight 0 (key True).
        self._current = {False: 0.0, True: 0.0}

    @property
    def is_weighted(self) -> bool:
        """Whether any owner has a weight other than 1."""
        return any(weight != 1 for weight in self._weights().values())

    def get_weight(self, owner: str) -> int:
        """Return the weight of an owner."""
        return self._weights().get(owner, 1)

    def get_virtual_time(self, owner: str) -> VirtualTime:
        """Return the virtual time of an owner."""
        is_last, recorded = self.get_weight(owner) == 0, self._times.get(owner)
        if recorded is None or recorded.is_last != is_last:  # a new owner, or its weight has become 0 or was 0
            return VirtualTime(is_last, self._current[is_last])
        return recorded

    def reset(self) -> None:
        """Forget all virtual times."""
        self._times.clear()
        self._current = {False: 0.0, True: 0.0}

    def drop_credit(self, owner: str) -> None:
        """Raise the virtual time of an owner to the current one, so that the owner has no credit.

        Called when an idle owner has a new request, and while an owner waits, for example for a
        quota. Otherwise the owner would be served first, to make up for the time without work.
        """
        if len(self._times) >= _MAX_OWNERS:
            self._times = {name: time for name, time in self._times.items() if time.work > self._current[time.is_last]}
        is_last, work = self.get_virtual_time(owner)
        self._times[owner] = VirtualTime(is_last, max(work, self._current[is_last]))

    def charge(self, owner: str, amount: float) -> None:
        """Charge an owner for work that starts now, for example its number of tokens."""
        is_last, start = self.get_virtual_time(owner)
        self._current[is_last] = max(self._current[is_last], start)
        self._times[owner] = VirtualTime(is_last, start + amount / (self.get_weight(owner) or 1))
