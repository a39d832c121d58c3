"""Enforces quotas in the engine, and reports how much of them is used.

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
from skyrl_tx.contract.results import Failure, Result
from skyrl_tx.engine.admission import START, Admission, Decision, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sample_output import SampledTokenCounts
from skyrl_tx.store import checkpoints
from skyrl_tx.store.checkpoints import is_unexpired, sum_bytes
from skyrl_tx.store.database import Store, execute
from skyrl_tx.store.engine_state import Pause, belongs_to_subject
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow, SessionRow, SubjectKind

_log = logging.getLogger(__name__)
_RELOAD_S = 60.0
_SHARED_RELOAD_S = 5.0
_MAX_PAUSES = 256
_NAMES: dict[Limit, str] = {"training_tokens_per_day": "training", "sample_tokens_per_day": "sample"}
DAY_S = 86_400
_DAY_LIMIT_BY_KIND: dict[usage.UsageKind, Limit] = {
    "training": "training_tokens_per_day",
    "forward": "training_tokens_per_day",
    "prefill": "sample_tokens_per_day",
    "sampled": "sample_tokens_per_day",
}
"""The daily limit that each kind of usage counts for.

Prompt tokens from the prefix cache do not count.
"""
_MAX_TOTALS = 1_000_000
_MAX_SUBJECTS = 1000
_MAX_LISTED = 5
_MAX_USES = 2000


_QuotaKey = tuple[Subject, Limit]
"""Identifies the quota of one subject for one limit."""


@dataclass(frozen=True, slots=True)
class _Charge:
    """The tokens that a running request may use, and the quotas that they count for."""

    keys: Sequence[_QuotaKey]
    tokens: int


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
            self._charges[queued.request_id] = charge = _Charge(self._list_quota_keys(queued, limit), num_tokens)
            self._charged.update(dict.fromkeys(charge.keys, num_tokens))

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
        charge = self._charges.pop(queued.request_id, None)
        if charge is not None:
            self._charged -= Counter(dict.fromkeys(charge.keys, charge.tokens))

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


def get_day_start(now: float) -> int:
    """Return the start of the day in UTC, in seconds since the epoch."""
    return int(now) // DAY_S * DAY_S


def count_tokens_today(tx: Session, now: float) -> Counter[tuple[Subject, Limit]]:
    """Return the tokens of each subject since the start of the day, by daily limit."""
    tokens: Counter[tuple[Subject, Limit]] = Counter()
    groups = ("owner", "key_id", "project_id")
    for total in usage.read_totals(tx, None, get_day_start(now), groups, limit=_MAX_TOTALS):
        limit = _DAY_LIMIT_BY_KIND.get(total.kind)
        for subject in Account(*total.group).list_subjects() if limit else ():
            tokens[subject, limit] += total.tokens  # pyright: ignore[reportArgumentType]
    return tokens


def find_account(tx: Session, session_id: SessionId) -> Account | None:
    """Return the account of a session, or None if the session does not exist."""
    columns = col(SessionRow.owner), col(SessionRow.key_id), col(SessionRow.project_id)
    row = execute(tx, select(*columns).where(col(SessionRow.session_id) == session_id)).first()
    return None if row is None else Account(*row)


def find_model_refusal(tx: Session, rules: Rules, session_id: SessionId) -> str | None:
    """Return why a session may not create another model, or None if it may."""
    account = find_account(tx, session_id)
    for quota in () if account is None else rules.list_account_quotas("models_in_training", account):
        models = list_models_in_training(tx, quota.subject)
        if len(models) < quota.value:
            continue
        own_ids = [model_id for model_id, owner in models if account is not None and owner == account.owner]
        advice = "ask an admin for a higher one"
        if own_ids:
            advice = f"unload one of {_join_model_ids(own_ids)}, or end its session"
        return (
            f"models_in_training: {quota.subject.label} has {len(models)} models in training, and the quota is "
            f"{quota.value}: {advice}"
        )
    return None


def make_room_for_checkpoint(
    tx: Session, rules: Rules, session_id: SessionId, now: float, *, is_stored: bool
) -> str | None:
    """Return why a session may not store another checkpoint, or None if it may.

    Deleted checkpoints count for the quota until they are removed. If the quota would be exceeded,
    the oldest of them are removed early. `is_stored` means that the new checkpoint is in the
    database already, so its size is part of the sum.
    """
    account, min_room = find_account(tx, session_id), 0 if is_stored else 1
    for quota in () if account is None else rules.list_account_quotas("checkpoint_bytes", account):
        excess = count_checkpoint_bytes(tx, quota.subject, now) + min_room - quota.value
        checkpoints.purge_oldest(tx, excess, belongs_to_subject(*quota.subject))
        used = count_checkpoint_bytes(tx, quota.subject, now)
        if used + min_room > quota.value:
            return (
                f"checkpoint_bytes: the checkpoints of {quota.subject.label} take {used:,} bytes"
                f"{' with this one' if is_stored else ''}, and the quota is {quota.value:,}: delete some, for example "
                "with `tinker checkpoint delete`, or save with a ttl_seconds"
            )
    return None


def check_checkpoint(tx: Session, session_id: SessionId, now: float) -> None:
    """Raise UserError if the checkpoint that was just added to a session exceeds a quota."""
    reason = make_room_for_checkpoint(tx, quotas.read_rules(tx), session_id, now, is_stored=True)
    if reason is not None:
        raise UserError(reason)


def _join_model_ids(model_ids: list[ModelId]) -> str:
    rest = len(model_ids) - _MAX_LISTED
    return ", ".join(model_ids[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def list_models_in_training(tx: Session, subject: Subject) -> list[tuple[ModelId, str]]:
    """Return a subject's ready models in unfinished sessions, oldest first, with their owners."""
    statement = (
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
    return [(model_id, owner) for model_id, owner in execute(tx, statement)]


def count_checkpoint_bytes(tx: Session, subject: Subject, now: float) -> int:
    """Return the total size of a subject's checkpoints, including deleted ones."""
    statement = (
        select(sum_bytes())
        .select_from(CheckpointRow)
        .join(ModelRow, col(ModelRow.model_id) == col(CheckpointRow.model_id))
        .join(SessionRow, col(SessionRow.session_id) == col(ModelRow.session_id))
        .where(is_unexpired(now), belongs_to_subject(subject.kind, subject.name))
    )
    return execute(tx, statement).scalar_one()


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """A quota and how much of it is used now."""

    quota: Quota
    used: int


def read_quota_uses(
    tx: Session, rules: Rules, owner: str | None, now: float, *, limit: int = _MAX_USES
) -> list[QuotaUse]:
    """Return how much of the quotas of an owner, its keys and its projects is used.

    `owner` None means all owners. The result is ordered by subject and then by limit, and has up to
    `limit` elements.
    """
    if not rules.values:
        return []
    tokens = count_tokens_today(tx, now) if rules.has_limit(*DAY_LIMITS) else Counter[tuple[Subject, Limit]]()
    all_quotas = (
        quota
        for subject in _list_subjects(tx, rules, owner)
        for quota in map(partial(rules.get_subject_quota, subject=subject), LIMITS)
        if quota is not None
    )
    return [QuotaUse(quota, _measure_use(tx, quota, tokens, now)) for quota in islice(all_quotas, limit)]


def _measure_use(tx: Session, quota: Quota, tokens: Counter[tuple[Subject, Limit]], now: float) -> int:
    match quota.limit:
        case "training_tokens_per_day" | "sample_tokens_per_day":
            return tokens[quota.subject, quota.limit]
        case "models_in_training":
            return len(list_models_in_training(tx, quota.subject))
        case "checkpoint_bytes":
            return count_checkpoint_bytes(tx, quota.subject, now)


def _list_subjects(tx: Session, rules: Rules, owner: str | None) -> list[Subject]:
    """Return the owners, keys and projects that a quota may apply to.

    `owner` selects the keys and projects of one owner; None means all owners.
    """
    columns = {"owner": col(SessionRow.owner), "key": col(SessionRow.key_id), "project": col(SessionRow.project_id)}
    subjects: set[Subject] = set() if owner is None else {Subject("owner", owner)}

    # Add the subjects of sessions.
    kinds: set[SubjectKind] = {kind for kind, _ in rules.values}
    for kind in kinds:
        condition = true() if owner is None else col(SessionRow.owner) == owner
        names = select(columns[kind]).distinct().where(condition, columns[kind].is_not(None)).limit(_MAX_SUBJECTS)
        subjects |= {Subject(kind, str(name)) for name in execute(tx, names).scalars()}

    # Add keys that have no session yet.
    if "key" in kinds:
        condition = col(ApiKeyRow.revoked_at).is_(None) & col(ApiKeyRow.parent_id).is_(None)
        if owner is not None:
            condition = condition & (col(ApiKeyRow.owner) == owner)
        key_ids = select(col(ApiKeyRow.key_id)).where(condition).limit(_MAX_SUBJECTS)
        subjects |= {Subject("key", str(key_id)) for key_id in execute(tx, key_ids).scalars()}

    # Add all subjects that quotas name.
    if owner is None:
        named = {Subject(kind, name) for (kind, _), by_name in rules.values.items() for name in by_name}
        subjects |= {subject for subject in named if subject.name != "*"}
    return sorted(subjects)
