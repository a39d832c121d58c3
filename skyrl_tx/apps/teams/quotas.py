"""Quotas: the most that an owner, an API key or a project may use; and the weights of owners.

A change is one row and an entry of the audit log. The engine reads all rows as `Rules` about once a second.
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
from skyrl_tx.store.tables import OverQuota, QuotaRow, SubjectKind

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
"""Limits of earlier versions. Their rows stay in the database and have no effect."""
DAY_LIMITS: tuple[Limit, ...] = ("training_tokens_per_day", "sample_tokens_per_day")
WEIGHT = "weight"
ANY = "*"
"""The subject of a quota for each owner, key or project without one of its own."""
MAX_WEIGHT = 1000
MAX_VALUE = 10**18
_MAX_NAME = 200
_MAY_BE_ZERO: frozenset[str] = frozenset({"models_in_training", "checkpoint_bytes"})


class Subject(NamedTuple):
    """The one that a quota concerns: an owner, the key of a number, or a project."""

    kind: SubjectKind
    name: str

    @classmethod
    def parse(cls, text: str) -> "Subject":
        """Read `ann`, `owner:ann`, `key:3` or `project:math`; `*` is any name. Raises UserError for others."""
        kind, colon, name = text.partition(":")
        if not colon:
            kind, name = "owner", text
        if kind not in get_args(SubjectKind):
            raise UserError(f"subject {text[:80]!r}: must be an owner, or begin with owner:, key: or project:")
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise UserError(f"subject {text[:80]!r}: the name must have 1 to {_MAX_NAME} printable characters")
        if kind == "key" and name != ANY and not (name.isascii() and name.isdigit() and len(name) < 10):
            raise UserError(f"subject {text[:80]!r}: a key is named by its number, as `skyrl-tx keys list` shows it")
        return cls(cast(SubjectKind, kind), name)

    def __str__(self) -> str:
        return self.name if self.kind == "owner" else f"{self.kind}:{self.name}"

    @property
    def label(self) -> str:
        """The subject in a sentence: `ann`, `key 3`, `project math`."""
        return self.name if self.kind == "owner" else f"{self.kind} {self.name}"


class Account(NamedTuple):
    """The owner, the key and the project for which the work of a session counts."""

    owner: str
    key_id: int | None = None
    project_id: str | None = None

    def list_subjects(self) -> Iterator[Subject]:
        """Yield the subjects whose quotas apply."""
        yield Subject("owner", self.owner)
        if self.key_id is not None:
            yield Subject("key", str(self.key_id))
        if self.project_id is not None:
            yield Subject("project", self.project_id)


class Quota(NamedTuple):
    """The most that one subject may use. Beyond a quota of a day work waits, or fails."""

    subject: Subject
    limit: Limit
    value: int
    over: OverQuota = "wait"


@dataclass(frozen=True, slots=True)
class Rules:
    """All quotas and weights at one time."""

    values: Mapping[tuple[SubjectKind, str], Mapping[str, Quota]] = field(default_factory=lambda: {})
    """The quota of each subject with a row, by kind and limit."""
    weights: Mapping[str, int] = field(default_factory=lambda: {})
    """The weights of owners; others have 1."""

    def get_subject_quota(self, limit: Limit, subject: Subject) -> Quota | None:
        """Return the quota of a subject, its own or else that of `*`; None if it has none."""
        of_kind = self.values.get((subject.kind, limit))
        if of_kind is None:
            return None
        found = of_kind.get(subject.name, of_kind.get(ANY))
        return None if found is None else found._replace(subject=subject)

    def list_account_quotas(self, limit: Limit, account: Account) -> list[Quota]:
        """Return the quotas that apply to work for an account, all of which must hold."""
        found = (self.get_subject_quota(limit, subject) for subject in account.list_subjects())
        return [quota for quota in found if quota is not None]

    def has_limit(self, *limits: Limit) -> bool:
        """Whether any subject has one of the limits."""
        return any((kind, limit) in self.values for kind in get_args(SubjectKind) for limit in limits)


def read_rules(tx: Session) -> Rules:
    """Read all quotas and weights, without those of dropped limits."""
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
    """Return all rows, by subject and name."""
    return sorted(tx.exec(select(QuotaRow)), key=lambda row: (row.subject_kind, row.subject, row.name))


def list_without_effect(tx: Session) -> Sequence[str]:
    """Return the stored quotas of dropped limits as text: `samples_at_once of ann`."""
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
    """Set a quota or a weight, or remove it if `value` is None; return False if there was none to remove.

    `details` are added to the entry of the audit log. Raises UserError for a name or a value that is not possible.
    """
    check_quota(subject, name, value, over)
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
    event: audit.Event = "organization_weight_set" if name == WEIGHT else "organization_quota_set"
    what = {} if name == WEIGHT else {"limit": name}
    changed: dict[str, audit.Detail] = {"value": value, "before": before, "removed": True if value is None else None}
    if over != "wait":
        changed["over"] = over
    audit.record(tx, event, actor, now, path=None, subject=str(subject), **what, **changed, **details)
    return True


def check_quota(subject: Subject, name: str, value: int | None, over: OverQuota = "wait") -> None:
    """Raise UserError for a limit that does not exist, and for a value that it cannot have."""
    if name in DROPPED_LIMITS:
        if value is None:
            return
        raise UserError(
            f"limit {name!r}: this limit no longer exists. Owners share the device by their weights; to limit what an "
            f"owner uses, set {' or '.join(DAY_LIMITS)}"
        )
    if over != "wait" and name not in DAY_LIMITS:
        raise UserError(f"over {over!r}: only beyond {' and '.join(DAY_LIMITS)} work fails, not beyond {name[:80]}")
    if name == WEIGHT:
        if subject.kind != "owner" or subject.name == ANY:
            raise UserError(f"weight of {subject}: only an owner has a weight; others share by its owner")
        least, most = 0, MAX_WEIGHT
    elif name in LIMITS:
        least, most = 0 if name in _MAY_BE_ZERO else 1, MAX_VALUE
    else:
        raise UserError(f"limit {name[:80]!r}: there is none of this name; there are {', '.join((*LIMITS, WEIGHT))}")
    if value is not None and not least <= value <= most:
        raise UserError(f"{name} {value}: must be from {least} to {most}")


_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([kKMGT]?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MAX = 10**18


def parse_amount(text: str) -> int:
    """Return the number that a text such as 200M means. Raises UserError for others."""
    found = _AMOUNT.fullmatch(text)
    value = None if found is None else Decimal(found[1]) * _UNITS[found[2]]
    if value is None or value != int(value) or value > _MAX:
        raise UserError(f"value {text[:40]!r}: must be a whole number of at most 10^18, or one with a unit: 200M, 5G")
    return int(value)


def format_amount(value: int) -> str:
    """Return a number as people write it, without loss: 200M for 200000000, 200_001 for 200001."""
    for unit in ("T", "G", "M", "k"):
        size = _UNITS[unit]
        if value >= size and value * 1000 % size == 0:
            return f"{Decimal(value) / size:f}{unit}"
    return f"{value:_}"
