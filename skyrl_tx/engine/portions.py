"""Takes this engine's portions of quotas of what runs at once, while several engines share the database."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.room import Room
from skyrl_tx.store import portions
from skyrl_tx.store.database import Store
from skyrl_tx.store.quotas import Limit, Subject

PERIOD_S = 0.25
"""Interval of taking again, while anything has such a quota."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a room bounds in this engine: requests, each with the number of its samples, or 1 for a pass."""

    running: Iterable[tuple[QueuedRequest, int]]
    waiting: Iterable[tuple[QueuedRequest, int]]
    most: int
    """The most that the engine could run at once without quotas."""


@dataclass(slots=True)
class Portions:
    """The part of the engine's loop that takes its portions."""

    store: Store
    clock: Callable[[], float] = time.monotonic
    _taken_at: float = float("-inf")
    _short: set[tuple[Limit, Subject]] = field(default_factory=set[tuple[Limit, Subject]])
    """The subjects that wanted more than they got."""
    _holds: bool = True

    def refresh(self, rooms: Mapping[Room, Work]) -> None:
        """Take again if it is time to, or if a subject has become short."""
        now, short = self.clock(), {(room.limit, subject) for room in rooms for subject in room.full_subjects()}
        if now - self._taken_at < PERIOD_S and short <= self._short:
            return
        self._taken_at = now
        demands = [
            demand for room, work in rooms.items() for demand in room.demands(work.running, work.waiting, work.most)
        ]
        may_run = self.store.write(lambda tx: portions.take(tx, self.store.engine, demands)) if demands else {}
        if not demands and self._holds:
            self.store.write(lambda tx: portions.forget(tx, self.store.engine))
        self._holds = bool(demands)
        for room in rooms:
            room.portions = {quota.subject: count for quota, count in may_run.items() if quota.limit == room.limit}
        self._short = {
            (each.quota.limit, each.quota.subject) for each in demands if each.num_wanted > may_run[each.quota]
        }
