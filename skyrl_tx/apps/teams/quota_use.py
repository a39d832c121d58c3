"""Counts what is used of quotas: tokens of a day, models in training, bytes of checkpoints."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice

from sqlalchemy import literal_column, select, true
from sqlmodel import Session, col

from skyrl_tx.apps.teams import quotas, usage
from skyrl_tx.apps.teams.quotas import DAY_LIMITS, LIMITS, Account, Limit, Quota, Rules, Subject
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store.checkpoints import is_visible, sum_bytes
from skyrl_tx.store.database import execute
from skyrl_tx.store.pauses import belongs_to_subject
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow, SessionRow, SubjectKind

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
