"""Chooses the sample requests whose samples are kept: of each step, those with the smallest request ids.

Request ids are hashes, so the choice is even and independent of order, and a crash does not change it.
"""

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field

from skyrl_tx.apps.history import kept_samples
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store.database import Store
from skyrl_tx.store.samplers import Origin

_MAX_STEPS = 256
"""Steps whose choice is in memory; others are read again."""
_PERIOD_S = 3600
"""Samples whose step is unknown, such as those of base weights, are chosen among those of as much time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision about a new group. `replaced` is the group that it takes the place of."""

    is_kept: bool
    replaced: RequestId | None = None


_LEFT_OUT = Choice(is_kept=False)


@dataclass(slots=True)
class KeptGroups:
    """The chosen groups of the latest steps."""

    store: Store
    max_groups: int
    """Groups of each step and owner."""
    _chosen: OrderedDict[tuple[str, Origin, int], list[RequestId]] = field(
        default_factory=OrderedDict[tuple[str, Origin, int], list[RequestId]]
    )

    def choose(self, owner: str, origin: Origin, request_id: RequestId, now: float) -> Choice:
        """Decide about a group that is about to be written."""
        if not self.max_groups:
            return _LEFT_OUT
        chosen = self._of_step(owner, origin, now)
        if request_id in chosen:
            return Choice(is_kept=True)
        replaced = None
        if len(chosen) >= self.max_groups:
            if request_id > chosen[-1]:
                return _LEFT_OUT
            replaced = chosen.pop()
        insort(chosen, request_id)
        return Choice(is_kept=True, replaced=replaced)

    def _of_step(self, owner: str, origin: Origin, now: float) -> list[RequestId]:
        since = 0 if origin.step is not None else int(now) // _PERIOD_S * _PERIOD_S
        key = owner, origin, since
        if key not in self._chosen:
            if len(self._chosen) >= _MAX_STEPS:
                self._chosen.popitem(last=False)
            self._chosen[key] = sorted(
                self.store.read(lambda tx: kept_samples.groups_of_step(tx, origin.model_id, origin.step, owner, since))
            )
        self._chosen.move_to_end(key)
        return self._chosen[key]
