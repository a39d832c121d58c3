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
from functools import partial
from itertools import islice

from sqlalchemy import literal_column, select, true
from sqlmodel import Session, col

from skyrl_tx.apps.teams import quotas, usage
from skyrl_tx.apps.teams.quotas import DAY_LIMITS, LIMITS, Account, Limit, Quota, Rules, Subject, format_amount
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SessionId
from skyrl_tx.contract.requests import CreateModel, LoadWeights, ModelPass, Rejected, Sample, SaveWeights
from skyrl_tx.contract.results import Failure, Result, SampleOutput
from skyrl_tx.engine.admission import START, Admission, Decision, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import Store, execute
from skyrl_tx.store.pauses import Pause, belongs_to_subject
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow, SessionRow, SubjectKind

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
        elif has_changed or now >= self._reload_at or get_day_start(now) != self._day:
            self._reload(now)

    def may_start(self, queued: QueuedRequest) -> Decision:
        """Let passes and samples wait or fail beyond tokens of a day; let new models and checkpoints fail."""
        if not self._rules.values or isinstance(queued.request, Rejected):
            return START
        match queued.request:
            case CreateModel() | LoadWeights(create=True) if self._rules.has_limit("models_in_training"):
                self._wait_for_commits()  # models that were created or unloaded just now
                return self._decide(lambda tx: find_model_refusal(tx, self._rules, queued.session_id))
            case SaveWeights(name=str()) if self._rules.has_limit("checkpoint_bytes"):
                now = self._clock()
                return self._decide(
                    lambda tx: find_checkpoint_refusal(tx, self._rules, queued.session_id, now, is_stored=False)
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
            known = self._store.read(lambda tx: find_account(tx, session_id))
            found = self._accounts[session_id] = known or Account(owner)
        return found

    def _add(self, session_id: SessionId, owner: str, limit: Limit, tokens: int) -> None:
        for subject in self._find_account(session_id, owner).list_subjects():
            self._used[subject, limit] += tokens

    def _reload(self, now: float) -> None:
        """Read the tokens of the day from the database, and add those of passes that run."""
        self._accounts.clear()  # sessions may have moved to other projects
        period_s = _SHARED_RELOAD_S if self._store.is_shared else _RELOAD_S
        self._day, self._reload_at = get_day_start(now), now + period_s
        self._wait_for_commits()
        self._used = self._store.read(lambda tx: count_tokens_today(tx, now))
        for started in self._started.values():
            self._add(started.session_id, started.owner, "training_tokens_per_day", started.tokens)


def _get_day_limit(queued: QueuedRequest) -> Limit | None:
    """Return the limit of a day that a request counts for. The body of a pass may not have been read."""
    if queued.model_id is None:
        return "sample_tokens_per_day" if isinstance(queued.request, Sample) else None
    return "training_tokens_per_day" if queued.kind == "model_pass" else None


DAY_S = 86_400
_DAY_LIMIT_OF_KIND: dict[usage.UsageKind, Limit] = {
    "training": "training_tokens_per_day",
    "forward": "training_tokens_per_day",
    "prefill": "sample_tokens_per_day",
    "sampled": "sample_tokens_per_day",
}
"""The limit for which each kind of usage counts. Prompt tokens that the prefix cache held count for nothing."""
_MAX_TOTALS = 1_000_000
_MAX_SUBJECTS = 1000
_MAX_LISTED = 5
_MAX_USES = 2000


def get_day_start(now: float) -> int:
    """Return the begin of the day in UTC, in seconds since the epoch."""
    return int(now) // DAY_S * DAY_S


def count_tokens_today(tx: Session, now: float) -> Counter[tuple[Subject, Limit]]:
    """Return the tokens of each subject since the day began, by the limit that they count for."""
    found: Counter[tuple[Subject, Limit]] = Counter()
    groups = ("owner", "key_id", "project_id")
    for total in usage.read_totals(tx, None, get_day_start(now), groups, limit=_MAX_TOTALS):
        limit = _DAY_LIMIT_OF_KIND.get(total.kind)
        for subject in Account(*total.group).list_subjects() if limit else ():
            found[subject, limit] += total.tokens  # pyright: ignore[reportArgumentType]
    return found


def find_account(tx: Session, session_id: SessionId) -> Account | None:
    """Return whom the work of a session counts for; None if there is no such session."""
    columns = col(SessionRow.owner), col(SessionRow.key_id), col(SessionRow.project_id)
    found = execute(tx, select(*columns).where(col(SessionRow.session_id) == session_id)).first()
    return None if found is None else Account(*found)


def find_model_refusal(tx: Session, rules: Rules, session_id: SessionId) -> str | None:
    """Return why a session may not have one more model; None if it may."""
    account = find_account(tx, session_id)
    for quota in () if account is None else rules.list_account_quotas("models_in_training", account):
        models = list_models_in_training(tx, quota.subject)
        if len(models) < quota.value:
            continue
        own = [model_id for model_id, owner in models if account is not None and owner == account.owner]
        way_out = f"unload one of {_join_model_ids(own)}, or end its session" if own else "ask an admin for more"
        return (
            f"models_in_training: {quota.subject.label} has {len(models)} models in training and may have "
            f"{quota.value}: {way_out}"
        )
    return None


def find_checkpoint_refusal(
    tx: Session, rules: Rules, session_id: SessionId, now: float, *, is_stored: bool
) -> str | None:
    """Return why a session may not have one more checkpoint; None if it may. `is_stored`: it is already among them."""
    account = find_account(tx, session_id)
    for quota in () if account is None else rules.list_account_quotas("checkpoint_bytes", account):
        used = count_checkpoint_bytes(tx, quota.subject, now)
        if used > quota.value or (used == quota.value and not is_stored):
            return (
                f"checkpoint_bytes: the checkpoints of {quota.subject.label} take {used:,} bytes"
                f"{' with this one' if is_stored else ''} and may take {quota.value:,}: delete some, for example with "
                "`tinker checkpoint delete`, or save with a ttl_seconds"
            )
    return None


def check_checkpoint(tx: Session, session_id: SessionId, now: float) -> None:
    """Raise UserError if the checkpoints of a session's account, with one that is just stored, exceed a quota."""
    reason = find_checkpoint_refusal(tx, quotas.read_rules(tx), session_id, now, is_stored=True)
    if reason is not None:
        raise UserError(reason)


def _join_model_ids(model_ids: list[ModelId]) -> str:
    rest = len(model_ids) - _MAX_LISTED
    return ", ".join(model_ids[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def list_models_in_training(tx: Session, subject: Subject) -> list[tuple[ModelId, str]]:
    """Return the models of a subject that exist and have not ended, oldest first, with their owners."""
    wanted = (
        select(col(ModelRow.model_id), col(SessionRow.owner))
        .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
        .where(
            col(ModelRow.status) == literal_column("'ready'"),
            col(ModelRow.deleted_at).is_(None),
            col(SessionRow.finished_at).is_(None),
            belongs_to_subject(subject.kind, subject.name),
        )
        .order_by(col(ModelRow.created_at), col(ModelRow.model_id))
    )
    return [(model_id, owner) for model_id, owner in execute(tx, wanted)]


def count_checkpoint_bytes(tx: Session, subject: Subject, now: float) -> int:
    """Return the size of a subject's checkpoints, as the storage report counts them."""
    wanted = (
        select(sum_bytes())
        .select_from(CheckpointRow)
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id))
        .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
        .where(is_visible(now), belongs_to_subject(subject.kind, subject.name))
    )
    return execute(tx, wanted).scalar_one()


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """A quota and what is used of it now."""

    quota: Quota
    used: int


def read_quota_uses(
    tx: Session, rules: Rules, owner: str | None, now: float, *, limit: int = _MAX_USES
) -> list[QuotaUse]:
    """Return what is used of the quotas of an owner, of its keys and of its projects; None means all owners.

    They are in the order of subjects, then of limits. At most `limit` are returned.
    """
    if not rules.values:
        return []
    tokens = count_tokens_today(tx, now) if rules.has_limit(*DAY_LIMITS) else Counter[tuple[Subject, Limit]]()
    found = (
        quota
        for subject in _list_subjects(tx, rules, owner)
        for quota in map(partial(rules.get_subject_quota, subject=subject), LIMITS)
        if quota is not None
    )
    return [QuotaUse(quota, _measure_use(tx, quota, tokens, now)) for quota in islice(found, limit)]


def _measure_use(tx: Session, quota: Quota, tokens: Counter[tuple[Subject, Limit]], now: float) -> int:
    match quota.limit:
        case "training_tokens_per_day" | "sample_tokens_per_day":
            return tokens[quota.subject, quota.limit]
        case "models_in_training":
            return len(list_models_in_training(tx, quota.subject))
        case "checkpoint_bytes":
            return count_checkpoint_bytes(tx, quota.subject, now)


def _list_subjects(tx: Session, rules: Rules, owner: str | None) -> list[Subject]:
    """Return the owners, keys and projects that a quota concerns, of one owner or of all."""
    columns = {"owner": col(SessionRow.owner), "key": col(SessionRow.key_id), "project": col(SessionRow.project_id)}
    found: set[Subject] = set() if owner is None else {Subject("owner", owner)}
    kinds: set[SubjectKind] = {kind for kind, _ in rules.values}
    for kind in kinds:
        is_wanted = true() if owner is None else col(SessionRow.owner) == owner
        names = select(columns[kind]).distinct().where(is_wanted, columns[kind].is_not(None)).limit(_MAX_SUBJECTS)
        found |= {Subject(kind, str(name)) for name in execute(tx, names).scalars()}
    if "key" in kinds:
        is_wanted = col(ApiKeyRow.revoked_at).is_(None)
        if owner is not None:
            is_wanted = is_wanted & (col(ApiKeyRow.owner) == owner)
        wanted = select(col(ApiKeyRow.key_id)).where(is_wanted).limit(_MAX_SUBJECTS)
        found |= {Subject("key", str(key_id)) for key_id in execute(tx, wanted).scalars()}
    if owner is None:
        named = {Subject(kind, name) for (kind, _), of_kind in rules.values.items() for name in of_kind}
        found |= {subject for subject in named if subject.name != "*"}
    return sorted(found)
