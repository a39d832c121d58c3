"""The engine's published status, which the API serves."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest

from sqlalchemy import text, update
from sqlmodel import Session

from skyrl_tx.store.database import execute
from skyrl_tx.store.quotas import Limit, Quota, Subject
from skyrl_tx.store.tables import EngineStateRow, SubjectKind

REQUEST_BYTES = 4096
"""Upper estimate of the memory of a queued sample in addition to its prompt."""

_MAX_PUBLISHED_OWNERS = 256
MAX_PAUSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoad:
    """Memory of the queued samples that arrived up to `position`: `num_bytes` of at most `max_bytes`.

    Each request counts `REQUEST_BYTES` in addition to its prompt. `by_owner` has the bytes of the owners with the most.
    """

    position: int
    num_bytes: int
    max_bytes: int
    by_owner: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A quota because of which requests of its subject wait, with the reason that clients read."""

    subject_kind: SubjectKind
    subject: str
    limit: Limit
    reason: str

    @classmethod
    def of(cls, quota: Quota, reason: str) -> "Pause":
        """Return the pause of a quota."""
        return cls(subject_kind=quota.subject.kind, subject=quota.subject.name, limit=quota.limit, reason=reason)

    @property
    def quota_subject(self) -> Subject:
        """The owner, key or project whose requests wait."""
        return Subject(self.subject_kind, self.subject)

    @property
    def concerns_training(self) -> bool:
        """Whether passes wait, and not samples."""
        return self.limit in ("training_tokens_per_day", "training_steps_at_once")


def pauses_of(row: EngineStateRow | None) -> tuple[Pause, ...]:
    """Return the published pauses."""
    if row is None or row.pauses is None:
        return ()
    return tuple(Pause(**each) for each in row.pauses)  # pyright: ignore[reportArgumentType]


def largest_owners(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the owners with the most bytes, at most 256, so that the published status stays small."""
    if len(num_bytes) <= _MAX_PUBLISHED_OWNERS:
        return dict(num_bytes)
    return dict(nlargest(_MAX_PUBLISHED_OWNERS, num_bytes.items(), key=lambda owner: owner[1]))


_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())::float8")


def shared_time(tx: Session) -> float:
    """Return the time by the clock that API and engine share: the PostgreSQL server's, or with SQLite this machine's.

    The clocks of two machines may differ by more than the silence after which an engine counts as gone.
    """
    connection = tx.connection()
    return connection.execute(_DATABASE_TIME).scalar_one() if connection.dialect.name == "postgresql" else time.time()


def publish(tx: Session, row: EngineStateRow) -> None:
    """Replace the engine's status."""
    tx.merge(row)


def report_waiting(tx: Session, detail: str) -> None:
    """Record why the engine waits; its next published status replaces the reason."""
    execute(tx, update(EngineStateRow).values(detail=detail, updated_at=shared_time(tx)))


def get(tx: Session) -> EngineStateRow | None:
    """Return the engine's latest status, or None if no engine ever ran."""
    return tx.get(EngineStateRow, 1)


def sample_load(tx: Session) -> SampleLoad | None:
    """Return the latest memory load of queued samples, or None if it is unknown."""
    state = get(tx)
    if state is None or state.load is None:
        return None
    return SampleLoad(**state.load)  # pyright: ignore[reportArgumentType]
