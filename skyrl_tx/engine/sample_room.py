"""Room for samples of an account: `samples_at_once` bounds those that are in the backend."""

from collections import Counter
from collections.abc import Iterable

from skyrl_tx.amounts import amount_text
from skyrl_tx.engine.accounts import Accounts
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Quota, Subject

_LIMIT = "samples_at_once"
UNBOUNDED = 2**62


class SampleRoom:
    """The open samples of each subject, counted again in each round of admission."""

    def __init__(self, view: QuotaView, accounts: Accounts) -> None:
        self._view = view
        self._accounts = accounts
        self._num_open: Counter[Subject] = Counter()
        self._is_bounded = False
        self._full: dict[Subject, Quota] = {}

    def start_round(self, running: Iterable[tuple[QueuedRequest, int]]) -> None:
        """Count the open samples of the running requests."""
        self._is_bounded = self._view.rules.has(_LIMIT)
        self._num_open.clear()
        self._full.clear()
        if self._is_bounded:
            for queued, num_open in running:
                self.take(queued, num_open)

    def of(self, queued: QueuedRequest) -> int:
        """Return how many more samples of a request may start."""
        if not self._is_bounded:
            return UNBOUNDED
        room = UNBOUNDED
        for quota in self._view.rules.of_account(_LIMIT, self._accounts.of(queued)):
            left = quota.value - self._num_open[quota.subject]
            if left <= 0:
                self._full[quota.subject] = quota
            room = min(room, max(left, 0))
        return room

    def take(self, queued: QueuedRequest, count: int) -> None:
        """Count samples that start."""
        if self._is_bounded:
            for subject in self._accounts.of(queued).subjects():
                self._num_open[subject] += count

    def full(self) -> list[tuple[Quota, str]]:
        """Return the quotas that made a sample wait in the last round, with the reason that clients read."""
        return [
            (quota, f"{quota.subject.label} has {amount_text(quota.value)} samples at once, as many as it may have")
            for _, quota in sorted(self._full.items())
        ]
