"""Sampling sessions: which weights each sampling client uses.

A sampling session refers to base weights, to a checkpoint or to an ephemeral sampler. Ephemeral
samplers are weights that a client saved without a name.
"""

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import Float, bindparam, case, update
from sqlalchemy import select as select_columns
from sqlmodel import Session, col, select

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointPath, ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.store.database import execute, get_existing
from skyrl_tx.store.tables import CheckpointRow, ModelRow, RequestRow, SamplingSessionRow


def create_session(tx: Session, row: SamplingSessionRow) -> bool:
    """Insert a sampling session. Return False and change nothing if its id exists."""
    if get(tx, row.sampling_session_id) is not None:
        return False
    tx.add(row)
    return True


_OPEN_SAVES = select_columns(col(RequestRow.body)).where(
    col(RequestRow.session_id) == bindparam("session_id"),
    col(RequestRow.kind) == "save_weights",
    col(RequestRow.status) == "open",
)


def is_being_saved(tx: Session, session_id: SessionId, name: SamplingSessionId) -> bool:
    """Return whether an open ephemeral save of the session will create this sampling session."""
    saves = (codec.decode(body) for (body,) in execute(tx, _OPEN_SAVES, {"session_id": session_id}))
    return any(isinstance(save, SaveWeights) and save.sampling_session_id == name for save in saves)


def get(tx: Session, sampling_session_id: SamplingSessionId) -> SamplingSessionRow | None:
    """Return a sampling session, or None if it does not exist."""
    return tx.get(SamplingSessionRow, sampling_session_id)


def list_ids_by_session(tx: Session, session_id: SessionId) -> list[SamplingSessionId]:
    """Return the ids of all sampling sessions of a client session, oldest first."""
    oldest_first = (col(SamplingSessionRow.created_at), col(SamplingSessionRow.sampling_session_id))
    statement = select(SamplingSessionRow.sampling_session_id).where(SamplingSessionRow.session_id == session_id)
    return [SamplingSessionId(name) for name in tx.exec(statement.order_by(*oldest_first))]


def list_ids_by_model(tx: Session, model_id: ModelId) -> list[SamplingSessionId]:
    """Return the ids of all sampling sessions with an ephemeral sampler of a model."""
    statement = select(SamplingSessionRow.sampling_session_id).where(SamplingSessionRow.model_id == model_id)
    return [SamplingSessionId(name) for name in tx.exec(statement)]


def find(
    tx: Session, session_id: SessionId, model_path: str | None, sampler: SamplerId | None
) -> SamplingSessionRow | None:
    """Return the sampling session of a client session with this path and sampler, or None.

    Sessions with ephemeral samplers are ignored.
    """
    statement = select(SamplingSessionRow).where(
        SamplingSessionRow.session_id == session_id,
        col(SamplingSessionRow.model_id).is_(None),
        col(SamplingSessionRow.model_path).is_not_distinct_from(model_path),
        col(SamplingSessionRow.sampler_id).is_not_distinct_from(sampler),
    )
    return tx.exec(statement).first()


def add_clone(tx: Session, sampling_session_id: SamplingSessionId) -> int:
    """Count another copy of the sampling client and return its number, from 1.

    Raises LookupError if the sampling session does not exist.
    """
    row = get_existing(tx, SamplingSessionRow, sampling_session_id)
    row.num_clones += 1
    return row.num_clones


_NOW = bindparam("now", type_=Float())
_USE = (
    update(SamplingSessionRow)
    .where(col(SamplingSessionRow.sampling_session_id) == bindparam("name"))
    .values(
        last_used_at=case(
            (col(SamplingSessionRow.last_used_at) < _NOW, _NOW), else_=col(SamplingSessionRow.last_used_at)
        )
    )
)


def record_use(tx: Session, sampling_session_id: SamplingSessionId, now: float) -> None:
    """Record a use of a sampling session.

    Does nothing if it does not exist. Runs for every sample request.
    """
    execute(tx, _USE, {"name": sampling_session_id, "now": now})


@dataclass(frozen=True, slots=True)
class Origin:
    """The model and the training step that a sampler's weights come from."""

    model_id: str
    """Empty for base weights."""
    step: int | None
    """Number of optimizer steps when the weights were saved. None for base weights, and if it is unknown."""


BASE_WEIGHTS = Origin("", None)


def find_origin(tx: Session, sampling_session_id: SamplingSessionId, sampler: SamplerId) -> Origin:
    """Return the origin of a sampler's weights; `BASE_WEIGHTS` for an unknown sampling session.

    The sampling session of an in-flight sampler may have newer weights by now. The step is then
    unknown.
    """
    row = get(tx, sampling_session_id)
    if row is None:
        return BASE_WEIGHTS
    if row.model_id is not None:
        return Origin(row.model_id, row.step if row.sampler_id == sampler else None)
    if row.model_path is None:
        return BASE_WEIGHTS

    # Read the step of the checkpoint, unless another artifact has its name by now.
    path = CheckpointPath.parse(row.model_path)
    saved = select_columns(col(CheckpointRow.step)).where(
        col(CheckpointRow.model_id) == path.model_id,
        col(CheckpointRow.kind) == path.kind,
        col(CheckpointRow.name) == path.name,
        col(CheckpointRow.artifact_id) == sampler,
    )
    return Origin(path.model_id, execute(tx, saved).scalar_one_or_none())


@dataclass(frozen=True, slots=True)
class EphemeralSampler:
    """An ephemeral sampler that a sampling session uses.

    An in-flight session uses the latest one of its model.
    """

    model_id: ModelId
    sampler_id: SamplerId
    request_id: RequestId
    """The request that saved it."""


_SAMPLER_COLUMNS = (
    col(SamplingSessionRow.model_id),
    col(SamplingSessionRow.sampler_id),
    col(SamplingSessionRow.request_id),
)
_KEPT = select(*_SAMPLER_COLUMNS).where(*(column.is_not(None) for column in _SAMPLER_COLUMNS))


def list_ephemeral(tx: Session, engine: int | None = None) -> list[EphemeralSampler]:
    """Return the ephemeral samplers that are not released.

    `engine` selects the samplers of the models of one engine; None means all models.
    """
    model_ids = select_columns(col(ModelRow.model_id)).where(col(ModelRow.engine) == engine)
    kept = _KEPT if engine is None else _KEPT.where(col(SamplingSessionRow.model_id).in_(model_ids))
    return [EphemeralSampler(*row) for row in execute(tx, kept)]


def find_model(tx: Session, sampler: SamplerId) -> ModelId | None:
    """Return the model of an ephemeral sampler, or None for other and for released samplers."""
    statement = select(SamplingSessionRow.model_id).where(col(SamplingSessionRow.sampler_id) == sampler)
    model_id = tx.exec(statement.where(col(SamplingSessionRow.model_id).is_not(None)).limit(1)).first()
    return None if model_id is None else ModelId(model_id)


def set_size(tx: Session, model_id: ModelId, sampler: SamplerId, size_bytes: int) -> None:
    """Record the size of an ephemeral sampler's files."""
    is_sampler = col(SamplingSessionRow.model_id) == model_id, col(SamplingSessionRow.sampler_id) == sampler
    execute(tx, update(SamplingSessionRow).where(*is_sampler).values(size_bytes=size_bytes))


def update_inflight(tx: Session, model_id: ModelId, sampler: SamplerId, step: int | None = None) -> None:
    """Let all in-flight sampling sessions of a model use a new sampler.

    It was saved after `step` optimizer steps.
    """
    is_inflight = col(SamplingSessionRow.model_id) == model_id, col(SamplingSessionRow.is_inflight)
    execute(tx, update(SamplingSessionRow).where(*is_inflight).values(sampler_id=sampler, size_bytes=None, step=step))


_EPHEMERAL = (
    select(SamplingSessionRow)
    .where(col(SamplingSessionRow.model_id).is_not(None), col(SamplingSessionRow.sampler_id).is_not(None))
    .order_by(col(SamplingSessionRow.created_at).desc(), col(SamplingSessionRow.sampling_session_id))
)
"""Sampling sessions with an ephemeral sampler. The in-flight sessions of a model share a sampler."""


def release_unused(
    tx: Session, before: float, *, keep_newest: int = 4, max_bytes: int | None = None
) -> list[SamplerId]:
    """Release ephemeral samplers that were last used before a time, and return their ids.

    Each model keeps its `keep_newest` newest samplers. If the kept samplers take more than
    `max_bytes`, the least recently used ones are released too, except for the newest sampler of
    each model. The sampling sessions remain without a sampler. Sampling from such a session fails
    with an error that suggests to save with a name.
    """
    sessions: dict[SamplerId, list[SamplingSessionRow]] = {}
    for row in tx.exec(_EPHEMERAL):  # the newest first
        sessions.setdefault(SamplerId(str(row.sampler_id)), []).append(row)
    last_used = {sampler: max(row.last_used_at for row in rows) for sampler, rows in sessions.items()}
    num_bytes = {sampler: rows[0].size_bytes or 0 for sampler, rows in sessions.items()}
    rank: dict[SamplerId, int] = {}  # the newest sampler of each model has rank 0
    num_newer: Counter[ModelId | None] = Counter()
    for sampler, (row, *_) in sessions.items():
        rank[sampler] = num_newer[row.model_id]
        num_newer[row.model_id] += 1

    # Release old samplers, and more samplers while the rest takes too much space.
    released = [name for name in sessions if rank[name] >= keep_newest and last_used[name] < before]
    if max_bytes is not None:
        kept = [name for name in sessions if name not in released]
        excess = sum(num_bytes[name] for name in kept) - max_bytes
        for name in sorted((name for name in kept if rank[name] > 0), key=last_used.__getitem__):
            if excess <= 0:
                break
            excess -= num_bytes[name]
            released.append(name)

    for row in (row for name in released for row in sessions[name]):
        row.sampler_id = None
    return released
