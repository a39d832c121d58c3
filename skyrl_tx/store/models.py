"""Models and their recovery snapshots. Clients see a model as a training run."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import bindparam, case, func, true, update
from sqlalchemy import delete as delete_from
from sqlalchemy import select as select_columns
from sqlalchemy.sql.elements import ColumnElement
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import ArtifactId, ModelId, SessionId
from skyrl_tx.store import checkpoints, pruning, sampling_sessions, sessions
from skyrl_tx.store.database import execute, execute_in_batches, get_existing, is_in_batch
from skyrl_tx.store.pruning import RemoveRows
from skyrl_tx.store.tables import (
    CheckpointRow,
    ModelRow,
    ModelStatus,
    RequestRow,
    SamplingSessionRow,
    SessionRow,
    SnapshotRow,
)


def create(tx: Session, row: ModelRow) -> bool:
    """Insert a model. Return False and change nothing if its id exists."""
    if get(tx, row.model_id) is not None:
        return False
    tx.add(row)
    return True


def get(tx: Session, model_id: ModelId) -> ModelRow | None:
    """Return a model, even if it is deleted, or None if it does not exist."""
    return tx.get(ModelRow, model_id)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The columns of a model that every request for it needs."""

    session_id: SessionId
    owner: str
    last_request_at: float
    engine: int


_FIND = (
    select(ModelRow.session_id, SessionRow.owner, ModelRow.last_request_at, ModelRow.engine)
    .join(SessionRow)
    .where(ModelRow.model_id == bindparam("model_id"), col(ModelRow.deleted_at).is_(None))
)
_IS_DELETED = select(ModelRow.model_id).where(
    ModelRow.model_id == bindparam("model_id"), col(ModelRow.deleted_at).is_not(None)
)

# Statements are built once. If every request runs one of them, it loads no ORM objects.
_TOUCH = (
    update(ModelRow)
    .where(col(ModelRow.model_id) == bindparam("name"), col(ModelRow.last_request_at) < bindparam("now"))
    .values(last_request_at=bindparam("now"))
)
_NEXT_EFFECT = (
    update(ModelRow)
    .where(col(ModelRow.model_id) == bindparam("name"))
    .values(effect_order=col(ModelRow.effect_order) + 1, num_steps=col(ModelRow.num_steps) + bindparam("steps"))
    .returning(col(ModelRow.effect_order))
)
_SILENT = (
    select(ModelRow)
    .join(SessionRow)
    .where(
        col(ModelRow.status).in_(("creating", "ready", "left")),
        col(ModelRow.last_request_at) < bindparam("before"),
        col(SessionRow.last_heartbeat_at) < bindparam("before"),
    )
)
_DELETED = select(ModelRow).where(col(ModelRow.deleted_at) <= bindparam("before"))


def find(tx: Session, model_id: ModelId) -> ModelRef | None:
    """Return the columns of a model that a request needs, which is cheaper than `get`.

    Returns None if the model does not exist or is deleted.
    """
    row = execute(tx, _FIND, {"model_id": model_id}).one_or_none()
    return None if row is None else ModelRef(*row)


def is_deleted(tx: Session, model_id: ModelId) -> bool:
    """Return whether a model is deleted but not purged yet."""
    return execute(tx, _IS_DELETED, {"model_id": model_id}).one_or_none() is not None


def get_owner(tx: Session, model_id: ModelId) -> str | None:
    """Return the owner of a model, or None if the model does not exist or is deleted."""
    row = find(tx, model_id)
    return None if row is None else row.owner


_OWNERS = (
    select(col(ModelRow.model_id), col(SessionRow.owner), col(SessionRow.project_id))
    .join(SessionRow)
    .where(is_in_batch(col(ModelRow.model_id)), col(ModelRow.deleted_at).is_(None))
)


def find_owners(tx: Session, model_ids: Iterable[ModelId]) -> dict[ModelId, tuple[str, str | None]]:
    """Return the owner and the project of each of these models, except deleted ones."""
    return {model_id: (owner, project) for model_id, owner, project in execute_in_batches(tx, _OWNERS, model_ids)}


_ENGINE = select(ModelRow.engine).where(ModelRow.model_id == bindparam("model_id"))


def get_engine_number(tx: Session, model_id: ModelId) -> int | None:
    """Return the number of a model's engine, or None if the model does not exist."""
    return execute(tx, _ENGINE, {"model_id": model_id}).scalar_one_or_none()


def set_status(tx: Session, model_id: ModelId, status: ModelStatus) -> None:
    """Set a model's status. Raises LookupError if the model does not exist."""
    get_existing(tx, ModelRow, model_id).status = status


def set_ready(tx: Session, model_id: ModelId, base_model_hash: str) -> None:
    """Set a model's status to `ready` and record the hash of its base weights.

    Raises LookupError if the model does not exist.
    """
    row = get_existing(tx, ModelRow, model_id)
    row.status, row.base_model_hash = "ready", base_model_hash


def set_loaded_from(tx: Session, model_id: ModelId, path: str) -> None:
    """Record the checkpoint that a model has loaded.

    Raises LookupError if the model does not exist.
    """
    get_existing(tx, ModelRow, model_id).loaded_from = path


def list_on_other_base(tx: Session, base_model_hash: str) -> list[ModelRow]:
    """Return the ready models with different base weights.

    A model without a hash matches any base weights.
    """
    known = col(ModelRow.base_model_hash).not_in(("", base_model_hash))
    return list(tx.exec(select(ModelRow).where(col(ModelRow.status) == "ready", known)))


def abandon_all(tx: Session) -> list[ModelRow]:
    """Set the status of all live models to `left`, so that they are not restored.

    Return them, oldest first.
    """
    rows = list_live(tx)
    for row in rows:
        row.status = "left"
    return rows


def expire(tx: Session, before: float) -> list[ModelId]:
    """Expire the models whose last request, and last heartbeat of the session, are before a time.

    Their snapshots are deleted. Returns the ids of the models.
    """
    return [_expire(tx, row) for row in tx.exec(_SILENT, params={"before": before}).all()]


def _expire(tx: Session, row: ModelRow) -> ModelId:
    row.status = "expired"
    delete_snapshot(tx, row.model_id)
    return row.model_id


def set_incomplete_gradient(tx: Session, model_id: ModelId, message: str | None) -> None:
    """Record why the accumulated gradient of a model is incomplete; None clears the reason.

    Raises LookupError if the model does not exist.
    """
    get_existing(tx, ModelRow, model_id).poisoned_by = message


def touch(tx: Session, model_id: ModelId, now: float) -> None:
    """Record the time of a request for a model. Raises LookupError if the model does not exist."""
    if execute(tx, _TOUCH, {"name": model_id, "now": now}).rowcount == 0:
        get_existing(tx, ModelRow, model_id)  # if the model exists, a later time is stored


def assign_effect_order(tx: Session, model_id: ModelId, *, is_step: bool = False) -> int:
    """Assign and return the next log sequence number of a model.

    `is_step` means that the request is an optimizer step, which is counted. Raises LookupError if
    the model does not exist.
    """
    number = execute(tx, _NEXT_EFFECT, {"name": model_id, "steps": int(is_step)}).scalar_one_or_none()
    if number is None:
        raise LookupError(f"no ModelRow has the key {model_id!r}")
    return number


_OLDEST_FIRST = (col(ModelRow.created_at), col(ModelRow.model_id))


def list_live(tx: Session) -> list[ModelRow]:
    """Return the models with status `creating` or `ready`, oldest first."""
    statement = select(ModelRow).where(col(ModelRow.status).in_(("creating", "ready"))).order_by(*_OLDEST_FIRST)
    return list(tx.exec(statement))


def list_active(tx: Session, owner: str, since: float) -> list[ModelRow]:
    """Return an owner's live models with a request since a time, oldest first.

    Deleted models and models of finished sessions are left out.
    """
    statement = (
        select(ModelRow)
        .join(SessionRow)
        .where(
            col(SessionRow.owner) == owner,
            col(SessionRow.finished_at).is_(None),
            col(ModelRow.status).in_(("creating", "ready")),
            col(ModelRow.deleted_at).is_(None),
            col(ModelRow.last_request_at) >= since,
        )
        .order_by(*_OLDEST_FIRST)
    )
    return list(tx.exec(statement))


def count(tx: Session) -> int:
    """Return the number of models that are not deleted, of all owners."""
    return tx.exec(select(func.count()).select_from(ModelRow).where(col(ModelRow.deleted_at).is_(None))).one()


_FAILED_BY_SESSION = (
    select_columns(col(ModelRow.session_id), func.max(col(ModelRow.model_id)))
    .where(is_in_batch(col(ModelRow.session_id)), col(ModelRow.deleted_at).is_(None))
    .group_by(col(ModelRow.session_id))
    .having(func.count() == func.sum(case((col(ModelRow.status) == "failed", 1), else_=0)))
)


def find_failed_by_session(tx: Session, session_ids: Iterable[SessionId]) -> dict[SessionId, ModelId]:
    """Return one of the models of each session in which the creation of every model failed."""
    return {SessionId(name): ModelId(run) for name, run in execute_in_batches(tx, _FAILED_BY_SESSION, session_ids)}


def list_by_session(tx: Session, session_id: SessionId) -> list[ModelRow]:
    """Return a session's models that are not deleted, oldest first."""
    condition = (col(ModelRow.session_id) == session_id) & col(ModelRow.deleted_at).is_(None)
    statement = select(ModelRow).where(condition).order_by(*_OLDEST_FIRST)
    return list(tx.exec(statement))


def list_owned(
    tx: Session,
    owner: str | None,
    limit: int,
    offset: int,
    *,
    project_id: str | None = None,
    published_at: float | None = None,
) -> tuple[list[ModelRow], int]:
    """Return a page of an owner's models, newest first, and the total number of models.

    The order is by creation and not by last request, because training would change the second order
    while a client reads the pages.

    Args:
        tx: The transaction.
        owner: None means all owners.
        limit: Largest number of models on the page.
        offset: Number of models to skip.
        project_id: Return only models of this project; None means all.
        published_at: If set, also return the models of the owner's projects, and models of other owners
            with a checkpoint that is public at this time.
    """
    condition: ColumnElement[bool] = true() if owner is None else col(SessionRow.owner) == owner
    if published_at is not None:
        condition = sessions.is_visible_to(owner) | col(ModelRow.model_id).in_(
            checkpoints.select_published_runs(published_at)
        )
    condition = condition & col(ModelRow.deleted_at).is_(None)
    if project_id is not None:
        condition = condition & (col(SessionRow.project_id) == project_id)

    count = select(func.count()).select_from(ModelRow).join(SessionRow).where(condition)
    newest_first = (col(ModelRow.created_at).desc(), col(ModelRow.model_id))
    page = select(ModelRow).join(SessionRow).where(condition).order_by(*newest_first).limit(limit).offset(offset)
    return list(tx.exec(page)), tx.exec(count).one()


def mark_deleted(tx: Session, model_id: ModelId, now: float) -> bool:
    """Mark a run and its checkpoints as deleted. Return False if there is no such run.

    `undelete` can restore them until `purge` removes them.
    """
    row = get(tx, model_id)
    if row is None or row.deleted_at is not None:
        return False
    row.deleted_at = now
    not_deleted = col(CheckpointRow.model_id) == model_id, col(CheckpointRow.deleted_at).is_(None)
    execute(tx, update(CheckpointRow).where(*not_deleted).values(deleted_at=now))
    return True


def undelete(tx: Session, model_id: ModelId) -> bool:
    """Restore a deleted run and the checkpoints that were deleted with it.

    Return False if there is no such run.
    """
    row = get(tx, model_id)
    if row is None or row.deleted_at is None:
        return False
    together = col(CheckpointRow.model_id) == model_id, col(CheckpointRow.deleted_at) == row.deleted_at
    execute(tx, update(CheckpointRow).where(*together).values(deleted_at=None))
    row.deleted_at = None
    return True


def purge(tx: Session, before: float, remove_rows: RemoveRows) -> list[ModelId]:
    """Remove the runs that were deleted before a time.

    `remove_rows` gets the ids, and deletes rows in the tables of optional features, such as
    history. A run that can still be trained is only expired. A later call removes it when it has no
    open requests. Returns the expired runs, which the engine must unload.
    """
    expired: list[ModelId] = []
    for row in tx.exec(_DELETED, params={"before": before}).all():
        is_open = select(RequestRow.position).where(RequestRow.model_id == row.model_id, RequestRow.status == "open")
        if row.status in ("creating", "ready", "left"):
            expired.append(_expire(tx, row))
        elif tx.exec(is_open.limit(1)).first() is None:
            delete(tx, row.model_id, remove_rows)
    return expired


def delete(tx: Session, model_id: ModelId, remove_rows: RemoveRows) -> None:
    """Remove a run with its checkpoints, requests and samplers.

    `remove_rows` removes rows of optional features. Raises LookupError if the run does not exist,
    and ValueError while it is `creating` or `ready`.
    """
    row = get_existing(tx, ModelRow, model_id)
    if row.status in ("creating", "ready"):
        raise ValueError(f"run {model_id} is {row.status}: unload it before deleting it")
    pruning.delete_high_water_marks(tx, [f"model/{model_id}"])
    pruning.delete_sampling_marks(tx, sampling_sessions.list_ids_by_model(tx, model_id))
    for table in (CheckpointRow, SnapshotRow, RequestRow, SamplingSessionRow):
        execute(tx, delete_from(table).where(col(table.model_id) == model_id))
    remove_rows(tx, [model_id])
    tx.delete(row)
    tx.flush()


def put_snapshot(
    tx: Session, model_id: ModelId, artifact_id: ArtifactId, effect_order: int, now: float
) -> ArtifactId | None:
    """Store the new snapshot of a model, and return the artifact of the replaced snapshot, if any.

    Raises ValueError if the new snapshot is older, that is, if its `effect_order` is smaller.
    """
    row = get_snapshot(tx, model_id)
    if row is None:
        tx.add(SnapshotRow(model_id=model_id, artifact_id=artifact_id, effect_order=effect_order, created_at=now))
        return None
    if effect_order < row.effect_order:
        raise ValueError(
            f"the new snapshot of {model_id} (log sequence number {effect_order}) is older than the stored one "
            f"({row.effect_order})"
        )
    replaced = row.artifact_id
    row.artifact_id, row.effect_order, row.created_at = artifact_id, effect_order, now
    return replaced


def get_snapshot(tx: Session, model_id: ModelId) -> SnapshotRow | None:
    """Return the snapshot of a model, or None if it has none."""
    return tx.get(SnapshotRow, model_id)


def delete_snapshot(tx: Session, model_id: ModelId) -> ArtifactId | None:
    """Delete the snapshot of a model, and return its artifact, if any."""
    row = get_snapshot(tx, model_id)
    if row is None:
        return None
    tx.delete(row)
    tx.flush()
    return row.artifact_id
