"""The audit log of actions on checkpoints, runs, keys, projects and limits.

An entry is written in the same transaction as the action, so that neither exists without the other.
Entries are never changed. `expire` removes them after their retention.
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
    """The owner who acts, with the number of the API key if one was used."""

    owner: str
    key_id: int | None = None


OPERATOR = Actor("operator")
"""Actor of commands that run on the server's machine."""
SERVER = Actor("server")
"""The server itself, for example when a checkpoint expires."""


def record(
    tx: Session, event: Event, actor: Actor, now: float, *, path: CheckpointPath | str | None = None, **details: Detail
) -> None:
    """Add an entry.

    `path` is the checkpoint that it concerns. Details with the value None are left out.
    """
    row = AuditRow(
        at=now,
        event=event,
        actor=actor.owner,
        key_id=actor.key_id,
        path=None if path is None else str(path),
        details={name: value for name, value in details.items() if value is not None},
    )
    tx.add(row)


def get_actor(tx: Session, session_id: SessionId, owner: str) -> Actor:
    """Return the actor of a request in a session: the owner and the session's API key."""
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
    """Return the entries that match all filters, oldest first unless `newest_first`.

    Args:
        tx: The transaction.
        since: Earliest time, in seconds since the epoch.
        until: The first time that is too late; None means no limit.
        resources: First words of events, for example `checkpoint`; None means all.
        actor: Return only entries of this actor.
        event: Return only entries of this event.
        before: Return only entries with a lower position.
        limit: Largest number of entries.
        newest_first: Whether the order is reversed. With `limit`, the newest entries are returned.
    """
    # Build the filters.
    statement = select(AuditRow).where(col(AuditRow.at) >= since)
    if until is not None:
        statement = statement.where(col(AuditRow.at) < until)
    if actor is not None:
        statement = statement.where(col(AuditRow.actor) == actor)
    if event is not None:
        statement = statement.where(col(AuditRow.event) == event)
    if before is not None:
        statement = statement.where(col(AuditRow.position) < before)
    if resources is not None:
        names = [col(AuditRow.event).startswith(f"{name}_", autoescape=True) for name in sorted(resources)]
        statement = statement.where(or_(*names))

    order = col(AuditRow.position).desc() if newest_first else col(AuditRow.position)
    return tx.exec(statement.order_by(order).limit(limit)).all()


def expire(tx: Session, before: float, limit: int = MAX_ROWS) -> int:
    """Delete up to `limit` entries before a time, oldest first, and return their number."""
    old = select(col(AuditRow.position)).where(col(AuditRow.at) < before).order_by(col(AuditRow.position)).limit(limit)
    return execute(tx, delete(AuditRow).where(col(AuditRow.position).in_(old))).rowcount
