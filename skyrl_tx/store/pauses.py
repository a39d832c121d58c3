"""Pauses: owners, keys and projects whose requests wait because of a quota.

Engines publish the pauses with their status.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, false, or_, select
from sqlmodel import Session, col

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import EngineStateRow, RequestRow, SessionRow, SubjectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The reason why requests of an owner, a key or a project wait."""

    subject_kind: SubjectKind
    subject: str
    """The owner, the number of the key, or the project."""
    limit: str
    """The name of the limit that was reached, for example `training_tokens_per_day`.

    If the name starts with `training_`, training requests wait, otherwise sample requests.
    """
    reason: str
    """Message for clients."""

    @property
    def concerns_training(self) -> bool:
        """Whether training requests wait. Otherwise sample requests wait."""
        return self.limit.startswith("training_")


def collect_pauses(*rows: EngineStateRow | None) -> tuple[Pause, ...]:
    """Return the pauses that engines have published, without duplicates."""
    pauses = [Pause(**pause) for row in rows if row is not None for pause in row.pauses or ()]  # pyright: ignore
    return tuple(dict.fromkeys(pauses))


def belongs_to_subject(kind: SubjectKind, name: str) -> ColumnElement[bool]:
    """Return the condition that a session belongs to an owner, a key or a project."""
    match kind:
        case "owner":
            return col(SessionRow.owner) == name
        case "key":
            return col(SessionRow.key_id) == int(name)
        case "project":
            return col(SessionRow.project_id) == name


def is_paused(pauses: Collection[Pause]) -> ColumnElement[bool]:
    """Return the condition that a request is paused. The query must join the request's session."""
    is_sample: ColumnElement[bool] = col(RequestRow.kind) == "sample"
    conditions = (
        and_(
            ~is_sample if pause.concerns_training else is_sample, belongs_to_subject(pause.subject_kind, pause.subject)
        )
        for pause in pauses
    )
    return or_(false(), *conditions)


def find_wait_reason(tx: Session, request_id: RequestId, pauses: Collection[Pause]) -> str | None:
    """Return the reason of the pause that a request waits for.

    Returns None if the request has started or has a result, or if no pause concerns it.
    """
    statement = (
        select(col(RequestRow.kind), col(SessionRow.owner), col(SessionRow.key_id), col(SessionRow.project_id))
        .join(SessionRow, col(SessionRow.session_id) == col(RequestRow.session_id))
        .where(
            col(RequestRow.request_id) == request_id, col(RequestRow.status) == "open", col(RequestRow.attempts) == 0
        )
    )
    row: Any = execute(tx, statement).first()
    if row is None:
        return None

    kind, owner, key_id, project_id = row
    subjects = {("owner", owner), ("key", str(key_id)), ("project", project_id)}
    return next(
        (
            pause.reason
            for pause in pauses
            if pause.concerns_training is (kind != "sample") and (pause.subject_kind, pause.subject) in subjects
        ),
        None,
    )
