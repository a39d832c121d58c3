"""The audit log: who did what to checkpoints, keys, projects and limits.

An entry is written in the transaction of its act, so that there is none without the other. Entries are never changed;
`expire` removes those past their retention.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete, or_
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import CheckpointPath, SessionId
from skyrl_tx.store import sessions
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import AuditRow

Event = Literal[
    "checkpoint_create",
    "checkpoint_read",
    "checkpoint_delete",
    "checkpoint_restore",
    "checkpoint_publish",
    "checkpoint_unpublish",
    "checkpoint_ttl_set",
    "run_delete",
    "run_restore",
    "project_session_assigned",
    "project_member_set",
    "project_member_removed",
    "organization_key_created",
    "organization_key_rotated",
    "organization_key_revoked",
    "organization_login",
    "organization_login_failed",
    "organization_quota_set",
    "organization_weight_set",
]
Detail = str | int | float | bool | None
RETENTION_S = 400 * 86_400.0
MAX_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Actor:
    """An owner who acts, with the number of the API key if there was one."""

    owner: str
    key_id: int | None = None


OPERATOR = Actor("operator")
"""The actor of commands on the server's machine."""
SERVER = Actor("server")
"""The server itself, for example when a checkpoint expires."""


def record(
    tx: Session, event: Event, actor: Actor, now: float, *, path: CheckpointPath | str | None = None, **details: Detail
) -> None:
    """Add an entry. `path` is the checkpoint that it concerns; details without a value are left out."""
    kept = {name: value for name, value in details.items() if value is not None}
    row = AuditRow(
        at=now,
        event=event,
        actor=actor.owner,
        key_id=actor.key_id,
        path=None if path is None else str(path),
        details=kept,
    )
    tx.add(row)


def get_actor(tx: Session, session_id: SessionId, owner: str) -> Actor:
    """Return the actor of a request in a session: its owner, with the key that made the session."""
    row = sessions.get(tx, session_id)
    return Actor(owner, None if row is None else row.key_id)


def list_entries(
    tx: Session,
    *,
    since: float = 0.0,
    until: float | None = None,
    resources: Collection[str] | None = None,
    actor: str | None = None,
    event: str | None = None,
    before: int | None = None,
    limit: int = 10_000,
    newest_first: bool = False,
) -> Sequence[AuditRow]:
    """Return the entries of a time, in order. A resource is the first word of an event; None means all.

    `actor` and `event` are of the entries that are returned. `before` is a position: only older ones are returned.
    """
    wanted = select(AuditRow).where(col(AuditRow.at) >= since)
    if until is not None:
        wanted = wanted.where(col(AuditRow.at) < until)
    if actor is not None:
        wanted = wanted.where(col(AuditRow.actor) == actor)
    if event is not None:
        wanted = wanted.where(col(AuditRow.event) == event)
    if before is not None:
        wanted = wanted.where(col(AuditRow.position) < before)
    if resources is not None:
        names = [col(AuditRow.event).startswith(f"{name}_", autoescape=True) for name in sorted(resources)]
        wanted = wanted.where(or_(*names))
    order = col(AuditRow.position).desc() if newest_first else col(AuditRow.position)
    return tx.exec(wanted.order_by(order).limit(limit)).all()


def expire(tx: Session, before: float, limit: int = MAX_ROWS) -> int:
    """Delete the entries before a time; return how many were deleted."""
    old = select(col(AuditRow.position)).where(col(AuditRow.at) < before).order_by(col(AuditRow.position)).limit(limit)
    return execute(tx, delete(AuditRow).where(col(AuditRow.position).in_(old))).rowcount
