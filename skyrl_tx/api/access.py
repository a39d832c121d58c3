"""Access control: finds rows by client-sent ids. Rows of other owners are reported as if they did not exist."""

import time
from collections.abc import Sequence

from sqlmodel import Session

from skyrl_tx.api.authentication import Principal
from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.validation import shown
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.store import checkpoints, models, samplers, sessions
from skyrl_tx.store.sessions import SessionRef
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SamplingSessionRow

_SHARED_METADATA = frozenset({"renderer_name"})
"""Metadata that others see of a published checkpoint: clients need it to build prompts for the weights."""


def session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session, without its metadata."""
    row = sessions.find(tx, session_id)
    if row is None or not caller.may_see(row.owner):
        raise not_found(f"session {shown(session_id)} does not exist")
    return row


def open_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session that has not finished. Raises ApiError 400 if it has."""
    row = session(tx, caller, session_id)
    if row.finished_at is not None:
        raise bad_request(f"session {shown(session_id)} has finished ({row.finish_reason})")
    return row


def model(tx: Session, caller: Principal, model_id: ModelId) -> ModelRow:
    """Find a model."""
    row = models.get(tx, model_id)
    if row is None or not caller.may_see(models.owner(tx, model_id)):
        raise not_found(f"model {shown(model_id)} does not exist")
    return row


def readable_run(
    tx: Session, caller: Principal, model_id: ModelId, now: float
) -> tuple[ModelRow, str, list[CheckpointRow]]:
    """Find a run, its owner and its checkpoints; of another owner's run only the published checkpoints."""
    row = models.get(tx, model_id)
    owner = models.owner(tx, model_id)
    is_visible = caller.may_see(owner)
    saved = checkpoints.list_of_run(tx, model_id, now, only_public=not is_visible)
    if row is None or owner is None or not (is_visible or saved):
        raise not_found(f"model {shown(model_id)} does not exist")
    return row, owner, saved


def addressed_model(tx: Session, caller: Principal, model_id: ModelId) -> models.ModelRef:
    """Find the columns of a model that queueing a request needs."""
    found = models.find(tx, model_id)
    if found is None or not caller.may_see(found.owner):
        raise not_found(f"model {shown(model_id)} does not exist")
    return found


def sampling_session(
    tx: Session, caller: Principal, sampling_session_id: SamplingSessionId
) -> tuple[SamplingSessionRow, str]:
    """Find a sampling session and its owner."""
    row = samplers.get(tx, sampling_session_id)
    owning = None if row is None else sessions.find(tx, row.session_id)
    is_gone = row is not None and row.model_id is not None and models.is_deleted(tx, row.model_id)
    if row is None or owning is None or is_gone or not caller.may_see(owning.owner):
        raise not_found(
            f"sampling session {shown(sampling_session_id)} does not exist, or was removed after a long time without "
            "use; save weights to sample from with a name to keep them"
        )
    return row, owning.owner


def saved_weights(
    tx: Session, readers: Sequence[Principal], path: CheckpointPath, now: float
) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint that one of the readers may read, and the model that made it; see `Call.readers`.

    Raises UserError, not ApiError, because the future of a load reports a wrong path.
    """
    row = checkpoints.get(tx, path, now)
    maker = models.get(tx, path.model_id)
    owner = models.owner(tx, path.model_id)
    may_read = row is not None and (row.public or any(reader.may_see(owner) for reader in readers))
    if row is None or maker is None or not may_read:
        raise UserError(f"path {shown(str(path))}: there is no such checkpoint")
    return row, maker


def readable_checkpoint(tx: Session, caller: Principal, path: CheckpointPath) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint and the model that made it. Raises ApiError 404 if there is none that the caller may read."""
    try:
        return saved_weights(tx, [caller], path, time.time())
    except UserError as error:
        raise not_found(error.message) from error


def metadata(row: ModelRow | CheckpointRow, is_own: bool) -> dict[str, str] | None:
    """Return the client's metadata of a run or a checkpoint; others get only what using the weights needs."""
    if row.user_metadata is None:
        return None
    return {name: value for name, value in row.user_metadata.items() if is_own or name in _SHARED_METADATA}


def spec_of(row: ModelRow) -> ModelSpec:
    """Decode the spec of a model."""
    spec = codec.decode(row.spec)
    assert isinstance(spec, ModelSpec)
    return spec
