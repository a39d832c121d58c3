"""Models in training."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import bindparam, func, true, update
from sqlalchemy.sql.elements import ColumnElement
from sqlmodel import Session, col, select

from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import checkpoints
from skyrl_tx.store.tables import ModelRow, ModelStatus, SessionRow, SnapshotRow


def create(
    tx: Session,
    *,
    model_id: ModelId,
    session_id: SessionId,
    base_model: str,
    spec: bytes,
    user_metadata: Mapping[str, str] | None,
    now: float,
) -> bool:
    """Note a model that is to be made; False if its id exists already, which then stays as it is."""
    if get(tx, model_id) is not None:
        return False
    tx.add(
        ModelRow(
            model_id=model_id,
            session_id=session_id,
            base_model=base_model,
            spec=spec,
            user_metadata=None if user_metadata is None else dict(user_metadata),
            created_at=now,
            last_request_at=now,
        )
    )
    tx.flush()
    return True


def get(tx: Session, model_id: ModelId) -> ModelRow | None:
    """Read a model."""
    return tx.get(ModelRow, model_id)


@dataclass(frozen=True, slots=True)
class Addressed:
    """What a request for a model needs to know of it."""

    session_id: SessionId
    owner: str
    last_request_at: float


_ADDRESSED = (
    select(ModelRow.session_id, SessionRow.owner, ModelRow.last_request_at)
    .join(SessionRow)
    .where(ModelRow.model_id == bindparam("model_id"))
)


# Every answer takes these: in one statement each, without an object.
_TOUCH = (
    update(ModelRow)
    .where(col(ModelRow.model_id) == bindparam("name"), col(ModelRow.last_request_at) < bindparam("now"))
    .values(last_request_at=bindparam("now"))
)
_NEXT_EFFECT = (
    update(ModelRow)
    .where(col(ModelRow.model_id) == bindparam("name"))
    .values(effect_order=col(ModelRow.effect_order) + 1)
    .returning(col(ModelRow.effect_order))
)


def addressed(tx: Session, model_id: ModelId) -> Addressed | None:
    """Find a model for one more request; a cheaper look than `get`, because every request takes it."""
    row = tx.connection().execute(_ADDRESSED, {"model_id": model_id}).one_or_none()
    return None if row is None else Addressed(*row)


def owner(tx: Session, model_id: ModelId) -> str | None:
    """Whose model it is; None if there is none."""
    wanted = select(SessionRow.owner).join(ModelRow).where(ModelRow.model_id == model_id)
    return tx.exec(wanted).one_or_none()


def set_status(tx: Session, model_id: ModelId, status: ModelStatus) -> None:
    """Say how a model fares. Raises LookupError if there is none."""
    _existing(tx, model_id).status = status
    tx.flush()


def made(tx: Session, model_id: ModelId, base_model_hash: str) -> None:
    """Say that a model exists, on these base weights. Raises LookupError if there is none."""
    row = _existing(tx, model_id)
    row.status, row.base_model_hash = "ready", base_model_hash
    tx.flush()


def on_other_base(tx: Session, base_model_hash: str) -> list[ModelRow]:
    """Models that are ready, on other base weights than these; "" is any."""
    known = col(ModelRow.base_model_hash).not_in(("", base_model_hash))
    return list(tx.exec(select(ModelRow).where(col(ModelRow.status) == "ready", known)))


def leave_all(tx: Session) -> list[ModelRow]:
    """Leave every model where it is: none of them is brought back. Returns them, oldest first."""
    left = live(tx)
    for row in left:
        row.status = "left"
    tx.flush()
    return left


def expire(tx: Session, before: float) -> list[ModelId]:
    """End the models whose session was last heard of, and which were last asked, before a time; returns them."""
    wanted = (
        select(ModelRow)
        .join(SessionRow)
        .where(
            col(ModelRow.status).in_(("creating", "ready", "left")),
            col(ModelRow.last_request_at) < before,
            col(SessionRow.last_heartbeat_at) < before,
        )
    )
    ended = list(tx.exec(wanted))
    for row in ended:
        row.status = "expired"
        snapshot = tx.get(SnapshotRow, row.model_id)
        if snapshot is not None:
            tx.delete(snapshot)
    tx.flush()
    return [row.model_id for row in ended]


def set_poison(tx: Session, model_id: ModelId, message: str | None) -> None:
    """Say why the gradient being summed is incomplete; None: it is whole. Raises LookupError for no model."""
    _existing(tx, model_id).poisoned_by = message
    tx.flush()


def touch(tx: Session, model_id: ModelId, now: float) -> None:
    """Note that something was asked of a model. Raises LookupError if there is none."""
    if tx.connection().execute(_TOUCH, {"name": model_id, "now": now}).rowcount == 0:
        _existing(tx, model_id)  # then it was touched later than that


def next_effect(tx: Session, model_id: ModelId) -> int:
    """Count one more effect on a model, and return its number. Raises LookupError if there is none."""
    counted = tx.connection().execute(_NEXT_EFFECT, {"name": model_id}).scalar_one_or_none()
    if counted is None:
        raise LookupError(f"no model {model_id!r}")
    return counted


def _existing(tx: Session, model_id: ModelId) -> ModelRow:
    row = get(tx, model_id)
    if row is None:
        raise LookupError(f"no model {model_id!r}")
    return row


_OLDEST_FIRST = (col(ModelRow.created_at), col(ModelRow.model_id))


def live(tx: Session) -> list[ModelRow]:
    """Models that are ready or being made, oldest first."""
    wanted = select(ModelRow).where(col(ModelRow.status).in_(("creating", "ready"))).order_by(*_OLDEST_FIRST)
    return list(tx.exec(wanted))


def of_session(tx: Session, session_id: SessionId) -> list[ModelRow]:
    """A session's models, oldest first."""
    wanted = select(ModelRow).where(ModelRow.session_id == session_id).order_by(*_OLDEST_FIRST)
    return list(tx.exec(wanted))


def list_owned(
    tx: Session,
    owner: str | None,
    limit: int,
    offset: int,
    *,
    project_id: str | None = None,
    published_at: float | None = None,
) -> tuple[list[ModelRow], int]:
    """A page of an owner's models, the last asked first, and how many there are in all; None: of every owner's.

    `published_at` adds those of others with a checkpoint that is public at that time.
    """
    is_wanted: ColumnElement[bool] = true() if owner is None else col(SessionRow.owner) == owner
    if published_at is not None:
        is_wanted = is_wanted | col(ModelRow.model_id).in_(checkpoints.published_runs(published_at))
    if project_id is not None:
        is_wanted = is_wanted & (col(SessionRow.project_id) == project_id)
    count = select(func.count()).select_from(ModelRow).join(SessionRow).where(is_wanted)
    latest_first = (col(ModelRow.last_request_at).desc(), col(ModelRow.model_id))
    page = select(ModelRow).join(SessionRow).where(is_wanted).order_by(*latest_first).limit(limit).offset(offset)
    return list(tx.exec(page)), tx.exec(count).one()
