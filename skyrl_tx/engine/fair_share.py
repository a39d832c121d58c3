"""Shares by weight: the owner with the least virtual time is next.

Virtual time grows by what an owner gets, divided by its weight. An owner that comes back starts at the virtual time of
the work that started last, so that a time without work saves up nothing (start-time fair queuing, Goyal, Vin and Cheng
1996).
"""

from collections.abc import Callable, Mapping

_MAX_OWNERS = 1024


class FairShare:
    """The virtual time of each owner, for one kind of capacity. Without weights every owner has weight 1."""

    def __init__(self, weights: Callable[[], Mapping[str, int]] = dict) -> None:
        self._weights = weights
        self._times: dict[str, float] = {}
        self._started = 0.0  # virtual time of the work that started last

    @property
    def is_weighted(self) -> bool:
        """Whether any owner has another share than the others."""
        return any(weight != 1 for weight in self._weights().values())

    def weight_of(self, owner: str) -> int:
        """Return the weight of an owner."""
        return self._weights().get(owner, 1)

    def time_of(self, owner: str) -> float:
        """Return the virtual time of an owner."""
        return self._times.get(owner, self._started)

    def reset(self) -> None:
        """Forget what owners got."""
        self._times.clear()
        self._started = 0.0

    def arrive(self, owner: str) -> None:
        """Note that an owner has work, and had none that could start."""
        if len(self._times) >= _MAX_OWNERS:
            self._times = {name: at for name, at in self._times.items() if at > self._started}
        self._times[owner] = max(self.time_of(owner), self._started)

    def charge(self, owner: str, amount: float) -> None:
        """Count work that starts now."""
        start = self.time_of(owner)
        self._started = max(self._started, start)
        self._times[owner] = start + amount / self.weight_of(owner)
