"""Quotas of owners, API keys and projects, and the weights of owners.

A quota limits what its subject may use, for example 10M training tokens per day. A weight is the
owner's share of the device. Each change is recorded in the audit log. The engine reads all quotas
and weights as `Rules` about once per second.

How much of a quota is used is counted in the database: tokens in `usage`, and models and
checkpoints in their tables.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, cast, get_args

from sqlalchemy import literal_column, select, true
from sqlmodel import Session, col
from sqlmodel import select as select_rows

from skyrl_tx.apps.teams import usage
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import audit, checkpoints
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.checkpoints import is_unexpired, sum_bytes
from skyrl_tx.store.database import execute
from skyrl_tx.store.engine_state import belongs_to_subject
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow, OverQuota, QuotaRow, SessionRow, SubjectKind

Limit = Literal[
    "training_tokens_per_day",
    "sample_tokens_per_day",
    "models_in_training",
    "checkpoint_bytes",
]
LIMITS: tuple[Limit, ...] = get_args(Limit)
DROPPED_LIMITS = (
    "sample_tokens_per_minute",
    "sample_requests_per_second",
    "samples_at_once",
    "training_steps_at_once",
)
"""Limits of earlier releases. Their rows stay in the database, but have no effect."""
DAY_LIMITS: tuple[Limit, ...] = ("training_tokens_per_day", "sample_tokens_per_day")
WEIGHT = "weight"
ANY = "*"
"""As a subject's name: the quota applies to each owner, key or project that has no quota itself."""
MAX_WEIGHT = 1000
MAX_VALUE = 10**18
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
_MAX_NAME = 200
_MAY_BE_ZERO: frozenset[str] = frozenset({"models_in_training", "checkpoint_bytes"})

_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([kKMGT]?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Subject(NamedTuple):
    """The subject of a quota: an owner, an API key (named by its number), or a project."""

    kind: SubjectKind
    name: str

    @classmethod
    def parse(cls, text: str) -> "Subject":
        """Parse a subject, for example `ann`, `owner:ann`, `key:3`, `project:math` or `project:*`.

        Raises UserError if the text is invalid.
        """
        kind, colon, name = text.partition(":")
        if not colon:
            kind, name = "owner", text
        if kind not in get_args(SubjectKind):
            raise UserError(f"subject {text[:80]!r}: must be an owner, or start with owner:, key: or project:")
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise UserError(f"subject {text[:80]!r}: the name must have 1 to {_MAX_NAME} printable characters")
        if kind == "key" and name != ANY and not (name.isascii() and name.isdigit() and len(name) < 10):
            raise UserError(f"subject {text[:80]!r}: must be key: and the number that `skyrl-tx keys list` shows")
        return cls(cast(SubjectKind, kind), name)

    def __str__(self) -> str:
        return self.name if self.kind == "owner" else f"{self.kind}:{self.name}"

    @property
    def label(self) -> str:
        """The subject in a sentence, for example `ann`, `key 3` or `project math`."""
        return self.name if self.kind == "owner" else f"{self.kind} {self.name}"


class Account(NamedTuple):
    """The owner, the key and the project of a session.

    The work of the session counts for the quotas of all three.
    """

    owner: str
    key_id: int | None = None
    project_id: str | None = None

    def list_subjects(self) -> Iterator[Subject]:
        """Yield the subjects whose quotas apply to the work of the session."""
        yield Subject("owner", self.owner)
        if self.key_id is not None:
            yield Subject("key", str(self.key_id))
        if self.project_id is not None:
            yield Subject("project", self.project_id)


class Quota(NamedTuple):
    """The quota of one subject."""

    subject: Subject
    limit: Limit
    value: int
    over: OverQuota = "wait"
    """Whether requests beyond a daily quota wait or fail. Requests beyond other quotas fail."""


@dataclass(frozen=True, slots=True)
class Rules:
    """All quotas and weights at one time."""

    values: Mapping[tuple[SubjectKind, str], Mapping[str, Quota]] = field(default_factory=lambda: {})
    """Quotas by kind of subject and limit, and then by the name of the subject."""
    weights: Mapping[str, int] = field(default_factory=lambda: {})
    """Weights by owner. Owners that are not in the mapping have weight 1."""

    def get_subject_quota(self, limit: Limit, subject: Subject) -> Quota | None:
        """Return the quota of a subject, or else the quota of `*`, or else None."""
        by_name = self.values.get((subject.kind, limit))
        if by_name is None:
            return None
        quota = by_name.get(subject.name, by_name.get(ANY))
        return None if quota is None else quota._replace(subject=subject)

    def list_account_quotas(self, limit: Limit, account: Account) -> list[Quota]:
        """Return the quotas that apply to the work of an account. All of them must be met."""
        quotas = (self.get_subject_quota(limit, subject) for subject in account.list_subjects())
        return [quota for quota in quotas if quota is not None]

    def has_limit(self, *limits: Limit) -> bool:
        """Return whether any subject has a quota for one of these limits."""
        return any((kind, limit) in self.values for kind in get_args(SubjectKind) for limit in limits)


def read_rules(tx: Session) -> Rules:
    """Read all quotas and weights. Quotas of dropped limits are ignored."""
    values: dict[tuple[SubjectKind, str], dict[str, Quota]] = {}
    weights: dict[str, int] = {}
    for row in list_rows(tx):
        if row.name == WEIGHT:
            weights[row.subject] = row.value
        elif row.name in LIMITS:
            quota = Quota(Subject(row.subject_kind, row.subject), row.name, row.value, row.over)
            values.setdefault((row.subject_kind, row.name), {})[row.subject] = quota
    return Rules(values, weights)


def list_rows(tx: Session) -> list[QuotaRow]:
    """Return all rows, ordered by subject and name."""
    return sorted(tx.exec(select_rows(QuotaRow)), key=lambda row: (row.subject_kind, row.subject, row.name))


def list_without_effect(tx: Session) -> Sequence[str]:
    """Return the stored quotas of dropped limits as texts, for example `samples_at_once of ann`."""
    return [
        f"{row.name} of {Subject(row.subject_kind, row.subject)}" for row in list_rows(tx) if row.name in DROPPED_LIMITS
    ]


def put(
    tx: Session,
    subject: Subject,
    name: str,
    value: int | None,
    actor: Actor,
    now: float,
    *,
    over: OverQuota = "wait",
    **details: audit.Detail,
) -> bool:
    """Set a quota or a weight, or remove it if `value` is None.

    Returns False if there was nothing to remove. `details` are added to the entry of the audit log.
    Raises UserError for an invalid name or value.
    """
    check_quota(subject, name, value, over)
    if subject.kind == "key" and subject.name != ANY and value is not None:
        key = tx.get(ApiKeyRow, int(subject.name))
        if key is not None and key.parent_id is not None:
            raise UserError(
                f"{subject}: was created with key {key.parent_id} and its work counts for that key: set the quota of "
                f"key:{key.parent_id}"
            )

    # Change the row.
    row = tx.get(QuotaRow, (subject.kind, subject.name, name))
    before = None if row is None else row.value
    if value is None:
        if row is None:
            return False
        tx.delete(row)
    elif row is None:
        tx.add(QuotaRow(subject_kind=subject.kind, subject=subject.name, name=name, value=value, over=over))
    else:
        row.value, row.over = value, over

    # Record the change in the audit log.
    event: audit.Event = "organization_weight_set" if name == WEIGHT else "organization_quota_set"
    limit = {} if name == WEIGHT else {"limit": name}
    changed: dict[str, audit.Detail] = {"value": value, "before": before, "removed": True if value is None else None}
    if over != "wait":
        changed["over"] = over
    audit.record(tx, event, actor, now, path=None, subject=str(subject), **limit, **changed, **details)
    return True


def check_quota(subject: Subject, name: str, value: int | None, over: OverQuota = "wait") -> None:
    """Raise UserError if a quota or a weight is invalid."""
    if name in DROPPED_LIMITS:
        if value is None:
            return
        raise UserError(
            f"limit {name!r}: this limit no longer exists. Owners share the device by their weights; to limit the "
            f"usage of an owner, set {' or '.join(DAY_LIMITS)}"
        )

    if over != "wait" and name not in DAY_LIMITS:
        raise UserError(
            f"over {over!r}: not possible for {name[:80]}, only for the daily limits {' and '.join(DAY_LIMITS)}"
        )

    # Check the range of the value.
    if name == WEIGHT:
        if subject.kind != "owner" or subject.name == ANY:
            raise UserError(f"weight of {subject}: only a single owner can have a weight; name an owner")
        min_value, max_value = 0, MAX_WEIGHT
    elif name in LIMITS:
        min_value, max_value = 0 if name in _MAY_BE_ZERO else 1, MAX_VALUE
    else:
        raise UserError(f"limit {name[:80]!r}: unknown; choose one of {', '.join((*LIMITS, WEIGHT))}")
    if value is not None and not min_value <= value <= max_value:
        raise UserError(f"{name} {value}: must be from {min_value} to {max_value}")


def parse_amount(text: str) -> int:
    """Parse a number with an optional decimal unit: 200M is 200,000,000.

    Raises UserError for invalid text.
    """
    match = _AMOUNT.fullmatch(text)
    value = None if match is None else Decimal(match[1]) * _UNITS[match[2]]
    if value is None or value != int(value) or value > MAX_VALUE:
        raise UserError(
            f"value {text[:40]!r}: must be a whole number up to 10^18, or a number with a unit, for example 200M or 5G"
        )
    return int(value)


def format_amount(value: int) -> str:
    """Format a number with the largest exact unit: 200M for 200000000, but 200_001 for 200001."""
    for unit in ("T", "G", "M", "k"):
        size = _UNITS[unit]
        if value >= size and value * 1000 % size == 0:
            return f"{Decimal(value) / size:f}{unit}"
    return f"{value:_}"


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
    reason = make_room_for_checkpoint(tx, read_rules(tx), session_id, now, is_stored=True)
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
