"""Room for the work of an account: `samples_at_once` and `training_steps_at_once` bound what is in the backend."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from skyrl_tx.apps.teams.amounts import amount_text
from skyrl_tx.engine.accounts import Accounts
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.portions import Demand
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Limit, Quota, Subject

UNBOUNDED = 2**62
_NAMES: dict[Limit, str] = {"samples_at_once": "samples", "training_steps_at_once": "passes"}


class Room:
    """The running samples or passes of each subject, counted again in each round of admission."""

    def __init__(self, limit: Limit, view: QuotaView, accounts: Accounts) -> None:
        self.limit: Limit = limit
        self._view = view
        self._accounts = accounts
        self._num_running: Counter[Subject] = Counter()
        self._full: dict[Subject, Quota] = {}
        self.is_bounded = False
        """Whether anyone has a quota of this limit."""
        self.portions: Mapping[Subject, int] | None = None
        """The portion of each subject's quota that this one of several engines may run; None: all of it."""

    def start_round(self, running: Iterable[tuple[QueuedRequest, int]]) -> None:
        """Count what runs: requests, each with the number of its samples, or 1 for a pass."""
        self.is_bounded = self._view.rules.has(self.limit)
        self._num_running.clear()
        self._full.clear()
        if self.is_bounded:
            for queued, count in running:
                self.take(queued, count)

    def of(self, queued: QueuedRequest) -> int:
        """Return how many more samples of a request may start; 0 for a pass that waits."""
        if not self.is_bounded:
            return UNBOUNDED
        room = UNBOUNDED
        for quota in self._view.rules.of_account(self.limit, self._accounts.of(queued)):
            value = quota.value if self.portions is None else min(quota.value, self.portions.get(quota.subject, 0))
            left = value - self._num_running[quota.subject]
            if left <= 0:
                self._full[quota.subject] = quota
            room = min(room, max(left, 0))
        return room

    def take(self, queued: QueuedRequest, count: int) -> None:
        """Count what starts."""
        if self.is_bounded:
            for subject in self._accounts.of(queued).subjects():
                self._num_running[subject] += count

    def full_subjects(self) -> Collection[Subject]:
        """Return the subjects whose quotas made something wait in the last round."""
        return self._full.keys()

    def demands(
        self, running: Iterable[tuple[QueuedRequest, int]], waiting: Iterable[tuple[QueuedRequest, int]], most: int
    ) -> list[Demand]:
        """Return the work of each subject with a quota, of which this engine could run `most` at once."""
        rules = self._view.rules
        if not rules.has(self.limit):
            return []
        num_running, num_waiting = Counter[Quota](), Counter[Quota]()
        since: dict[Quota, float] = {}
        for queued, count in running:
            for quota in rules.of_account(self.limit, self._accounts.of(queued)):
                num_running[quota] += count
        for queued, count in waiting:
            for quota in rules.of_account(self.limit, self._accounts.of(queued)):
                num_waiting[quota] += count
                since[quota] = min(since.get(quota, math.inf), queued.created_at)
        return [
            Demand(
                quota=quota,
                num_running=num_running[quota],
                num_wanted=max(num_running[quota], min(num_running[quota] + num_waiting[quota], most)),
                waits_since=since.get(quota, math.inf),
            )
            for quota in num_running | num_waiting
        ]

    def full(self) -> list[tuple[Quota, str]]:
        """Return the quotas that made something wait in the last round, with the reason that clients read."""
        what = _NAMES[self.limit]
        return [
            (quota, f"{quota.subject.label} has {amount_text(quota.value)} {what} at once, as many as it may have")
            for _, quota in sorted(self._full.items())
        ]
