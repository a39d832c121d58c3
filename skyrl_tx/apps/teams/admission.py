"""Enforces quotas in the engine.

Daily tokens are counted in memory. The engine reads them from `usage` when it starts, when quotas
change, when a day starts, and every minute, and in between adds the tokens of the requests that it
runs. With multiple engines it reads them every five seconds, because it learns about the work of
other engines only from the database. A request is charged when it starts: a pass with its tokens,
and a sample request with the most tokens that it can draw. The charge is settled when the request
ends or is cancelled. So an owner can exceed its quota only by its last request.

Models and checkpoints are counted in the database whenever one is created.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import (
    DAY_LIMITS,
    Account,
    Limit,
    Quota,
    Rules,
    Subject,
    count_tokens_today,
    find_account,
    find_model_refusal,
    format_amount,
    get_day_start,
    make_room_for_checkpoint,
)
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import CreateModel, LoadWeights, ModelPass, Rejected, Sample, SaveWeights
from skyrl_tx.contract.results import Failure, Result
from skyrl_tx.engine.extension import START, Admission, Decision, Fail, Wait
from skyrl_tx.engine.metrics import SampledTokenCounts
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause

_log = logging.getLogger(__name__)
_RELOAD_S = 60.0
_SHARED_RELOAD_S = 5.0
_MAX_PAUSES = 256
_NAMES: dict[Limit, str] = {"training_tokens_per_day": "training", "sample_tokens_per_day": "sample"}


_QuotaKey = tuple[Subject, Limit]
"""Identifies the quota of one subject for one limit."""
_Charge = tuple[Sequence[_QuotaKey], int]
"""The quotas that a running request counts for, and the tokens that it may use."""


class QuotaAdmission(Admission):
    """Decides by the quotas in the database whether requests may start.

    Without quotas on daily tokens, no tokens are counted.
    """

    def __init__(
        self, store: Store, wait_for_commits: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._wait_for_commits = wait_for_commits
        self._clock = clock
        self._rules = Rules()
        self._accounts: dict[SessionId, Account] = {}
        self._used: Counter[_QuotaKey] = Counter()
        self._charges: dict[RequestId, _Charge] = {}
        self._charged: Counter[_QuotaKey] = Counter()  # the sums of the charges
        self._day = 0
        self._reload_at = 0.0

        if ignored := store.read(quotas.list_without_effect):
            _log.warning(
                "quotas without effect, because these limits no longer exist: %s. Remove them with "
                "`skyrl-tx quotas remove`. Owners share the device by their weights",
                ", ".join(ignored),
            )

    def refresh(self) -> None:
        """Read the quotas.

        Also read how many tokens were used today if the quotas have changed, on a new day, and
        periodically.
        """
        rules, now = self._store.read(quotas.read_rules), self._clock()
        has_changed, self._rules, self.weights = rules != self._rules, rules, rules.weights
        self.is_counting_usage = rules.has_limit(*DAY_LIMITS)
        if not self.is_counting_usage:
            self._charges.clear()
            self._charged.clear()
        elif has_changed or now >= self._reload_at or get_day_start(now) != self._day:
            self._reload(now)

    def may_start(self, queued: QueuedRequest) -> Decision:
        """Decide whether a request may start.

        Passes and samples beyond a daily quota wait or fail. New models and checkpoints beyond a
        quota fail.
        """
        if not self._rules.values or isinstance(queued.request, Rejected):
            return START

        match queued.request:
            case CreateModel() | LoadWeights(create=True) if self._rules.has_limit("models_in_training"):
                self._wait_for_commits()  # so that models are counted which were created or unloaded just now
                reason = self._store.read(lambda tx: find_model_refusal(tx, self._rules, queued.session_id))
                return START if reason is None else Fail(reason)
            case SaveWeights(name=str()) if self._rules.has_limit("checkpoint_bytes"):
                now = self._clock()
                reason = self._store.write(
                    lambda tx: make_room_for_checkpoint(tx, self._rules, queued.session_id, now, is_stored=False)
                )
                return START if reason is None else Fail(reason)
            case _:
                limit = _get_day_limit(queued)
                return self._check_tokens(queued, limit) if limit and self._rules.has_limit(limit) else START

    def record_start(self, queued: QueuedRequest, num_tokens: int) -> None:
        """Charge a request with the most tokens that it can use."""
        if (limit := _get_day_limit(queued)) is not None:
            self._remove_charge(queued)  # a sample request that was put back starts again
            keys = self._list_quota_keys(queued, limit)
            self._charges[queued.request_id] = keys, num_tokens
            self._charged.update(dict.fromkeys(keys, num_tokens))

    def record_drawn(self, queued: QueuedRequest, drawn: SampledTokenCounts) -> None:
        """Count the tokens of a sample request that ends or is cancelled."""
        self._remove_charge(queued)
        tokens = drawn.prompt + drawn.sampled
        self._used.update(dict.fromkeys(self._list_quota_keys(queued, "sample_tokens_per_day"), tokens))

    def record_end(self, queued: QueuedRequest, result: Result) -> None:
        """Count the tokens of a completed pass."""
        self._remove_charge(queued)
        if isinstance(queued.request, ModelPass) and not isinstance(result, Failure):
            self._used.update(
                dict.fromkeys(self._list_quota_keys(queued, "training_tokens_per_day"), queued.num_tokens)
            )

    def list_pauses(self) -> Sequence[Pause]:
        """Return pauses for the owners, keys and projects that have used up their daily tokens."""
        keys = sorted(self._used.keys() | self._charged.keys())
        quotas_in_use = (self._rules.get_subject_quota(limit, subject) for subject, limit in keys)
        return [
            Pause(
                subject_kind=quota.subject.kind,
                subject=quota.subject.name,
                limit=quota.limit,
                reason=self._describe_wait(quota),
            )
            for quota in quotas_in_use
            if quota is not None and self._is_used_up(quota)
        ][:_MAX_PAUSES]

    def _check_tokens(self, queued: QueuedRequest, limit: Limit) -> Decision:
        """Decide by the daily tokens.

        If multiple quotas are used up, a quota with `over="fail"` takes precedence.
        """
        account = self._find_account(queued.session_id, queued.owner)
        account_quotas = self._rules.list_account_quotas(limit, account)
        used_up = [quota for quota in account_quotas if self._is_used_up(quota)]
        for quota in used_up:
            if quota.over == "fail":
                advice = "retry after 00:00 UTC, or ask an admin for a higher quota"
                return Fail(f"{limit}: {self._describe_use(quota)}: {advice}")
        if used_up:
            return Wait(self._describe_wait(used_up[0]))

        # The running samples may use up a quota, but they may also stop early. So the request waits.
        for quota in account_quotas:
            if self._count_used(quota, with_charges=True) >= quota.value:
                return Wait(f"the running requests of {quota.subject.label} may use up today's {_NAMES[limit]} tokens")
        return START

    def _is_used_up(self, quota: Quota) -> bool:
        return self._count_used(quota) >= quota.value

    def _count_used(self, quota: Quota, *, with_charges: bool = False) -> int:
        """Return the tokens that count for a quota.

        Running passes always count, because they use all tokens that they are charged with. Running
        samples count only `with_charges`.
        """
        key = quota.subject, quota.limit
        with_charges = with_charges or quota.limit == "training_tokens_per_day"
        return self._used[key] + (self._charged[key] if with_charges else 0)

    def _describe_wait(self, quota: Quota) -> str:
        return f"{self._describe_use(quota)}; requests resume at 00:00 UTC"

    def _describe_use(self, quota: Quota) -> str:
        used, value = format_amount(self._count_used(quota)), format_amount(quota.value)
        return f"{quota.subject.label} has used {used} of today's {value} {_NAMES[quota.limit]} tokens"

    def _find_account(self, session_id: SessionId, owner: str) -> Account:
        """Return the account of a session.

        The key and the project of the session are read once, and again after each `_reload`.
        """
        if all(kind == "owner" for kind, _ in self._rules.values):
            return Account(owner)
        account = self._accounts.get(session_id)
        if account is None:
            known = self._store.read(lambda tx: find_account(tx, session_id))
            account = self._accounts[session_id] = known or Account(owner)
        return account

    def _list_quota_keys(self, queued: QueuedRequest, limit: Limit) -> Sequence[_QuotaKey]:
        account = self._find_account(queued.session_id, queued.owner)
        return [(subject, limit) for subject in account.list_subjects()]

    def _remove_charge(self, queued: QueuedRequest) -> None:
        keys, tokens = self._charges.pop(queued.request_id, ((), 0))
        self._charged -= Counter(dict.fromkeys(keys, tokens))

    def _reload(self, now: float) -> None:
        """Read the daily tokens from the database. Running requests stay charged."""
        self._accounts.clear()  # sessions may have moved to other projects
        period_s = _SHARED_RELOAD_S if self._store.is_shared else _RELOAD_S
        self._day, self._reload_at = get_day_start(now), now + period_s
        self._wait_for_commits()
        self._used = self._store.read(lambda tx: count_tokens_today(tx, now))


def _get_day_limit(queued: QueuedRequest) -> Limit | None:
    """Return the daily limit that a request counts for, or None.

    The body of a pass need not be read for this.
    """
    if queued.model_id is None:
        return "sample_tokens_per_day" if isinstance(queued.request, Sample) else None
    return "training_tokens_per_day" if queued.kind == "model_pass" else None
