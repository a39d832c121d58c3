"""Enforces quotas in the engine.

Tokens of a day are counted here. They are read from `usage` when the engine starts, when quotas change and now and
then; between two readings the engine adds what it runs. A pass counts when it starts and a sample when it ends, so an
owner exceeds its quota by one pass at most, and by the samples that run. With several engines the readings follow each
other faster, because an engine learns only by them what the others have run.

Models and checkpoints are counted in the database when one more is wanted.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.apps.teams import quota_use, quotas
from skyrl_tx.apps.teams.amounts import format_amount
from skyrl_tx.apps.teams.quotas import DAY_LIMITS, Account, Limit, Quota, Rules, Subject
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import CreateModel, LoadWeights, ModelPass, Rejected, Sample, SaveWeights
from skyrl_tx.contract.results import Failure, Result, SampleOutput
from skyrl_tx.engine.admission import START, Admission, Decision, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.database import Store
from skyrl_tx.store.pauses import Pause

_log = logging.getLogger(__name__)
_RELOAD_S = 60.0
_SHARED_RELOAD_S = 5.0
_MAX_PAUSES = 256
_NAMES: dict[Limit, str] = {"training_tokens_per_day": "training", "sample_tokens_per_day": "sample"}


@dataclass(frozen=True, slots=True)
class _StartedPass:
    """A pass that has no result yet."""

    session_id: SessionId
    owner: str
    tokens: int


class QuotaAdmission(Admission):
    """Admission by the quotas in the database. Without any it starts all requests, and counts nothing."""

    def __init__(
        self, store: Store, wait_for_commits: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._wait_for_commits = wait_for_commits
        self._clock = clock
        self._rules = Rules()
        self._accounts: dict[SessionId, Account] = {}
        self._used: Counter[tuple[Subject, Limit]] = Counter()
        self._started: dict[RequestId, _StartedPass] = {}
        self._day = 0
        self._reload_at = 0.0
        if ignored := store.read(quotas.list_without_effect):
            _log.warning(
                "quotas without effect, because these limits no longer exist: %s. Owners share the device by their "
                "weights; `skyrl-tx quotas remove` removes them",
                ", ".join(ignored),
            )

    def refresh(self) -> None:
        """Read the quotas, and what is used of them if they have changed, on a new day and now and then."""
        rules, now = self._store.read(quotas.read_rules), self._clock()
        has_changed, self._rules, self.weights = rules != self._rules, rules, rules.weights
        self.is_counting = rules.has_limit(*DAY_LIMITS)
        if not self.is_counting:
            self._started.clear()
        elif has_changed or now >= self._reload_at or quota_use.get_day_start(now) != self._day:
            self._reload(now)

    def may_start(self, queued: QueuedRequest) -> Decision:
        """Let passes and samples wait or fail beyond tokens of a day; let new models and checkpoints fail."""
        if not self._rules.values or isinstance(queued.request, Rejected):
            return START
        match queued.request:
            case CreateModel() | LoadWeights(create=True) if self._rules.has_limit("models_in_training"):
                self._wait_for_commits()  # models that were created or unloaded just now
                return self._decide(lambda tx: quota_use.find_model_refusal(tx, self._rules, queued.session_id))
            case SaveWeights(name=str()) if self._rules.has_limit("checkpoint_bytes"):
                now = self._clock()
                return self._decide(
                    lambda tx: quota_use.find_checkpoint_refusal(
                        tx, self._rules, queued.session_id, now, is_stored=False
                    )
                )
            case _:
                limit = _get_day_limit(queued)
                return self._check_tokens(queued, limit) if limit and self._rules.has_limit(limit) else START

    def record_start(self, queued: QueuedRequest) -> None:
        """Count a pass."""
        if queued.model_pass is not None:
            started = _StartedPass(queued.session_id, queued.owner, queued.num_tokens)
            self._started[queued.request_id] = started
            self._add(started.session_id, started.owner, "training_tokens_per_day", started.tokens)

    def record_end(self, queued: QueuedRequest, result: Result) -> None:
        """Count the tokens of a sample that has ended, and no longer those of a pass that failed."""
        started, request = self._started.pop(queued.request_id, None), queued.request
        if started is not None:
            if isinstance(result, Failure):
                self._add(started.session_id, started.owner, "training_tokens_per_day", -started.tokens)
        elif isinstance(request, ModelPass) and not isinstance(result, Failure):  # it ran when the first quota was set
            self._add(queued.session_id, queued.owner, "training_tokens_per_day", queued.num_tokens)
        elif isinstance(request, Sample) and isinstance(result, SampleOutput):
            tokens = request.prompt.size - result.prompt.cache_hit_tokens
            tokens += sum(sequence.tokens.size for sequence in result.sequences)
            self._add(queued.session_id, queued.owner, "sample_tokens_per_day", tokens)

    def list_pauses(self) -> Sequence[Pause]:
        """Return the owners, keys and projects that have used up their tokens of the day."""
        quotas_in_use = (self._rules.get_subject_quota(limit, subject) for subject, limit in sorted(self._used))
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

    def _decide(self, find_refusal: Callable[[Session], str | None]) -> Decision:
        reason = self._store.read(find_refusal)
        return START if reason is None else Fail(reason)

    def _check_tokens(self, queued: QueuedRequest, limit: Limit) -> Decision:
        """Decide by the tokens of the day. If several quotas are used up, one beyond which work fails decides."""
        account = self._find_account(queued.session_id, queued.owner)
        used_up = [quota for quota in self._rules.list_account_quotas(limit, account) if self._is_used_up(quota)]
        for quota in used_up:
            if quota.over == "fail":
                way_out = "send it after 00:00 UTC, or ask an admin for more"
                return Fail(f"{limit}: {self._describe_use(quota)}: {way_out}")
        return Wait(self._describe_wait(used_up[0])) if used_up else START

    def _is_used_up(self, quota: Quota) -> bool:
        return self._used[quota.subject, quota.limit] >= quota.value

    def _describe_wait(self, quota: Quota) -> str:
        return f"{self._describe_use(quota)}, and goes on at 00:00 UTC"

    def _describe_use(self, quota: Quota) -> str:
        used = format_amount(self._used[quota.subject, quota.limit])
        return f"{quota.subject.label} has used {used} of {format_amount(quota.value)} {_NAMES[quota.limit]} tokens of today"

    def _find_account(self, session_id: SessionId, owner: str) -> Account:
        """Return whom the work of a session counts for. The key and the project are read once for each session."""
        if all(kind == "owner" for kind, _ in self._rules.values):
            return Account(owner)
        found = self._accounts.get(session_id)
        if found is None:
            known = self._store.read(lambda tx: quota_use.find_account(tx, session_id))
            found = self._accounts[session_id] = known or Account(owner)
        return found

    def _add(self, session_id: SessionId, owner: str, limit: Limit, tokens: int) -> None:
        for subject in self._find_account(session_id, owner).list_subjects():
            self._used[subject, limit] += tokens

    def _reload(self, now: float) -> None:
        """Read the tokens of the day from the database, and add those of passes that run."""
        self._accounts.clear()  # sessions may have moved to other projects
        period_s = _SHARED_RELOAD_S if self._store.is_shared else _RELOAD_S
        self._day, self._reload_at = quota_use.get_day_start(now), now + period_s
        self._wait_for_commits()
        self._used = self._store.read(lambda tx: quota_use.count_tokens_today(tx, now))
        for started in self._started.values():
            self._add(started.session_id, started.owner, "training_tokens_per_day", started.tokens)


def _get_day_limit(queued: QueuedRequest) -> Limit | None:
    """Return the limit of a day that a request counts for. The body of a pass may not have been read."""
    if queued.model_id is None:
        return "sample_tokens_per_day" if isinstance(queued.request, Sample) else None
    return "training_tokens_per_day" if queued.kind == "model_pass" else None
