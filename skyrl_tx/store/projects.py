"""Projects and their members.

A session may belong to one project. A viewer sees the project's sessions, runs and checkpoints, and
may use the checkpoints. An editor may also change the checkpoints and assign sessions to the
project. Any owner may assign sessions to a project without members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import func, select
from sqlmodel import Session, col
from sqlmodel import select as select_rows

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import audit, sessions
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ModelRow, ProjectMemberRow, ProjectRole, SessionRow

MAX_NAME = 200
MAX_MEMBERS = 1000


def get_role(tx: Session, project_id: str | None, owner: str) -> ProjectRole | None:
    """Return the role of an owner in a project, or None if the owner is not a member."""
    row = None if project_id is None else tx.get(ProjectMemberRow, (project_id, owner))
    return None if row is None else row.role


def get_role_in_run(tx: Session, model_id: ModelId, owner: str) -> ProjectRole | None:
    """Return the role of an owner in the project of a run.

    Returns None if the owner is not a member, or if the run is deleted.
    """
    statement = (
        select(col(ProjectMemberRow.role))
        .join(SessionRow, col(SessionRow.project_id) == col(ProjectMemberRow.project_id))
        .join(ModelRow, col(ModelRow.session_id) == col(SessionRow.session_id))
        .where(
            col(ModelRow.model_id) == model_id,
            col(ModelRow.deleted_at).is_(None),
            col(ProjectMemberRow.owner) == owner,
        )
    )
    return cast(ProjectRole | None, execute(tx, statement).scalar_one_or_none())


def list_by_member(tx: Session, owner: str) -> set[str]:
    """Return the ids of the projects that an owner is a member of."""
    statement = select(col(ProjectMemberRow.project_id)).where(col(ProjectMemberRow.owner) == owner)
    return {*execute(tx, statement).scalars()}


def has_members(tx: Session, project_id: str) -> bool:
    """Return whether a project has members.

    If a project has members, only editors of the project may assign sessions to it.
    """
    statement = select(col(ProjectMemberRow.owner)).where(col(ProjectMemberRow.project_id) == project_id).limit(1)
    return execute(tx, statement).one_or_none() is not None


def put_member(
    tx: Session, project_id: str, owner: str, new: ProjectRole | None, actor: Actor, now: float, **details: audit.Detail
) -> bool:
    """Give an owner a role in a project, or remove the member if `new` is None.

    Returns False if there was no member to remove. `details` are added to the entry of the audit
    log. Raises UserError for an invalid name, and if the project already has `MAX_MEMBERS` members.
    """
    for name, value in (("project", project_id), ("owner", owner)):
        if not value or len(value) > MAX_NAME or not value.isprintable():
            raise UserError(f"{name} {value[:80]!r}: must have 1 to {MAX_NAME} printable characters")

    # Change the row.
    row = tx.get(ProjectMemberRow, (project_id, owner))
    before = None if row is None else row.role
    if new is None:
        if row is None:
            return False
        tx.delete(row)
    elif row is not None:
        row.role = new
    elif _count_members(tx, project_id) >= MAX_MEMBERS:
        raise UserError(f"project {project_id[:80]!r}: has {MAX_MEMBERS} members, the maximum; remove a member first")
    else:
        tx.add(ProjectMemberRow(project_id=project_id, owner=owner, role=new))

    event: audit.Event = "project_member_removed" if new is None else "project_member_set"
    changed = {"project_id": project_id, "member": owner, "role": new, "before": before}
    audit.record(tx, event, actor, now, path=None, **changed, **details)
    return True


def _count_members(tx: Session, project_id: str) -> int:
    statement = select(func.count()).where(col(ProjectMemberRow.project_id) == project_id)
    return execute(tx, statement).scalar_one()


def list_members(tx: Session) -> list[ProjectMemberRow]:
    """Return the members of all projects, ordered by project and owner."""
    statement = select_rows(ProjectMemberRow).order_by(col(ProjectMemberRow.project_id), col(ProjectMemberRow.owner))
    return list(tx.exec(statement))


@dataclass(frozen=True, slots=True)
class Project:
    """A project with its members and counts."""

    project_id: str
    num_sessions: int
    num_runs: int
    """Number of runs that are not deleted."""
    last_used_at: float | None
    """Time of the last training request or of the last session without runs, or None."""
    members: Sequence[ProjectMemberRow]


def list_visible(tx: Session, owner: str | None, limit: int) -> list[Project]:
    """Return the projects that an owner has sessions in or is a member of.

    The last used project comes first. `owner` None means all projects. Only sessions and runs that
    the owner may see are counted.
    """
    # Count sessions and runs by project.
    last = func.max(func.coalesce(col(ModelRow.last_request_at), col(SessionRow.created_at)))
    is_run = (col(ModelRow.session_id) == col(SessionRow.session_id)) & col(ModelRow.deleted_at).is_(None)

    counted = (
        select(
            col(SessionRow.project_id),
            func.count(col(SessionRow.session_id).distinct()),
            func.count(col(ModelRow.model_id)),
            last,
        )
        .outerjoin(ModelRow, is_run)
        .where(sessions.is_visible_to(owner), col(SessionRow.project_id).is_not(None))
        .group_by(col(SessionRow.project_id))
        .order_by(last.desc(), col(SessionRow.project_id))
        .limit(limit)
    )
    counts = {str(row[0]): row for row in execute(tx, counted)}

    # Add the members, and projects without sessions.
    members: dict[str, list[ProjectMemberRow]] = {}
    for row in list_members(tx):
        members.setdefault(row.project_id, []).append(row)
    unused = [
        name
        for name, rows in members.items()
        if name not in counts and (owner is None or any(row.owner == owner for row in rows))
    ]
    used = [
        Project(name, int(num_sessions), int(num_runs), at, members.get(name, ()))
        for name, (_, num_sessions, num_runs, at) in counts.items()
    ]
    return (used + [Project(name, 0, 0, None, members[name]) for name in unused])[:limit]
