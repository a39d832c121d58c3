"""Pauses requests whose account has used its tokens of the day: passes and samples wait until midnight UTC, or fail.

What is used is read from `usage` when the engine starts, when quotas change and now and then. Between two readings the
engine counts by itself what it adds. A pass counts when it is handed over and a sample request when it ends, so an
owner exceeds its quota by one pass at most, and by the samples that run. With several engines the readings follow each
other faster, because an engine learns by them only what the others have added.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from skyrl_tx.apps.teams.amounts import amount_text
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import ModelPass, Rejected, Sample
from skyrl_tx.contract.results import Failure, Result, SampleOutput
from skyrl_tx.engine.accounts import Accounts
from skyrl_tx.engine.request_log import QueuedRequest, RequestLog
from skyrl_tx.store import allowances
from skyrl_tx.store.database import Store
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import DAY_LIMITS, Limit, Quota, Subject

_RELOAD_S = 60.0
_SHARED_RELOAD_S = 5.0
_NAMES: dict[Limit, str] = {"training_tokens_per_day": "training", "sample_tokens_per_day": "sample"}


@dataclass(frozen=True, slots=True)
class _Handed:
    """A pass that was handed over."""

    session_id: SessionId
    owner: str
    tokens: int


class Pauses:
    """The tokens of the day by subject, and whose requests wait."""

    def __init__(
        self,
        store: Store,
        view: QuotaView,
        accounts: Accounts,
        request_log: RequestLog,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._view = view
        self._accounts = accounts
        self._request_log = request_log
        self._clock = clock
        self.is_active = False
        """Whether anyone has a quota of a day; without one nothing is counted."""
        self._day = 0
        self._reload_at = 0.0
        self._handed: dict[RequestId, _Handed] = {}
        self._used: Counter[tuple[Subject, Limit]] = Counter()
        self._refused: dict[RequestId, str] = {}  # passes that were handed over to fail
        self._used_up: dict[tuple[SessionId, Limit], list[Quota]] = {}

    def refresh(self) -> None:
        """Look for changed quotas, and for a new day. Before the first call no request is paused."""
        has_changed, now = self._view.refresh(), self._clock()
        if not self._view.rules.values:
            self.is_active, self._request_log.on_result, self._reload_at = False, None, 0.0
            self._handed.clear()
            self._refused.clear()
        elif has_changed or now >= self._reload_at or allowances.day_start(now) != self._day:
            self._reload(now)

    def is_paused(self, queued: QueuedRequest) -> bool:
        """Whether a request waits. Requests without tokens never do, so that work can be saved."""
        used_up = self._used_up_for(queued)
        return bool(used_up) and all(quota.over == "wait" for quota in used_up)

    def check_start(self, queued: QueuedRequest) -> None:
        """Raise UserError if a request fails because of a quota: a sample now, a pass when it was handed over."""
        reason = self._refused.get(queued.request_id) if queued.model_pass is not None else self._refusal_of(queued)
        if reason is not None:
            raise UserError(reason)

    def hand_over(self, queued: QueuedRequest) -> None:
        """Count a pass that starts now, unless it fails because of a quota."""
        if queued.model_pass is None:
            return
        reason = self._refusal_of(queued)
        if reason is not None:
            self._refused[queued.request_id] = reason
            return
        handed = self._handed[queued.request_id] = _Handed(queued.session_id, queued.owner, queued.num_tokens)
        self._add(handed.session_id, handed.owner, "training_tokens_per_day", handed.tokens)

    def exhausted(self) -> list[tuple[Quota, str]]:
        """Return the quotas that are used up, with the reason that clients read."""
        if not self.is_active:
            return []
        found: list[tuple[Quota, str]] = []
        for (subject, limit), used in sorted(self._used.items()):
            quota = self._view.rules.of_subject(limit, subject)
            if quota is not None and used >= quota.value:
                found.append((quota, f"{self._text_of(quota)}, and goes on at 00:00 UTC"))
        return found

    def _text_of(self, quota: Quota) -> str:
        used = self._used[quota.subject, quota.limit]
        of = f"{amount_text(used)} of {amount_text(quota.value)} {_NAMES[quota.limit]} tokens"
        return f"{quota.subject.label} has used {of} of today"

    def _used_up_for(self, queued: QueuedRequest) -> list[Quota]:
        """Return the quotas of a request's account that are used up, of those that it counts for."""
        if not self.is_active or isinstance(queued.request, Rejected):
            return []
        limit = _limit_of(queued)
        if limit is None:
            return []
        key = (queued.session_id, limit)
        found = self._used_up.get(key)
        if found is None:
            quotas = self._view.rules.of_account(limit, self._accounts.of(queued))
            found = self._used_up[key] = [quota for quota in quotas if self._is_used(quota)]
        return found

    def _refusal_of(self, queued: QueuedRequest) -> str | None:
        """Return why a request fails, as a sentence; None if it runs or waits."""
        failing = next((quota for quota in self._used_up_for(queued) if quota.over == "fail"), None)
        if failing is None:
            return None
        way_out = "send it after 00:00 UTC, or ask an admin for more"
        return f"{failing.limit}: {self._text_of(failing)}: {way_out}"

    def _is_used(self, quota: Quota) -> bool:
        return self._used[quota.subject, quota.limit] >= quota.value

    def _count(self, queued: QueuedRequest, result: Result) -> None:
        """Count the tokens of a sample request that has ended, and no longer those of a pass that failed."""
        handed = self._handed.pop(queued.request_id, None)
        self._refused.pop(queued.request_id, None)
        if handed is not None:
            if isinstance(result, Failure):
                self._add(handed.session_id, handed.owner, "training_tokens_per_day", -handed.tokens)
        elif isinstance(queued.request, ModelPass) and not isinstance(
            result, Failure
        ):  # it ran when the first quota was set
            self._add(queued.session_id, queued.owner, "training_tokens_per_day", queued.num_tokens)
        elif isinstance(queued.request, Sample) and isinstance(result, SampleOutput):
            tokens = queued.request.prompt.size - result.prompt.cache_hit_tokens
            tokens += sum(sequence.tokens.size for sequence in result.sequences)
            self._add(queued.session_id, queued.owner, "sample_tokens_per_day", tokens)

    def _add(self, session_id: SessionId, owner: str, limit: Limit, tokens: int) -> None:
        if not self.is_active:
            return
        for subject in self._accounts.of_session(session_id, owner).subjects():
            self._used[subject, limit] += tokens
        self._used_up.clear()

    def _reload(self, now: float) -> None:
        self._accounts.forget()
        self.is_active = self._view.rules.has(*DAY_LIMITS)
        period_s = _SHARED_RELOAD_S if self._store.is_shared else _RELOAD_S
        self._day, self._reload_at = allowances.day_start(now), now + period_s
        self._used_up.clear()
        self._request_log.on_result = self._count if self.is_active else None
        if not self.is_active:
            self._handed.clear()
            self._refused.clear()
            return
        self._request_log.wait_for_commits()
        self._used = self._store.read(lambda tx: allowances.tokens_today(tx, now))
        for handed in self._handed.values():
            self._add(handed.session_id, handed.owner, "training_tokens_per_day", handed.tokens)


def _limit_of(queued: QueuedRequest) -> Limit | None:
    if queued.model_id is None:
        return "sample_tokens_per_day" if isinstance(queued.request, Sample) else None
    return "training_tokens_per_day" if queued.kind == "model_pass" else None
