"""Quotas of owners, API keys and projects, and the weights of owners.

A quota limits what its subject may use, for example 10M training tokens per day. A weight is the
owner's share of the device. Each change is recorded in the audit log. The engine reads all quotas
and weights as `Rules` about once per second.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, NamedTuple, cast, get_args

from sqlmodel import Session, select

from skyrl_tx.contract.errors import UserError
from skyrl_tx.store import audit
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.tables import ApiKeyRow, OverQuota, QuotaRow, SubjectKind

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
    return sorted(tx.exec(select(QuotaRow)), key=lambda row: (row.subject_kind, row.subject, row.name))


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
