"""Access control: finds rows by client-sent ids. Rows that a caller may not see are reported as if they did not exist.

An owner sees and changes its own rows. The members of a project also see its sessions, runs and checkpoints, and its
editors change the checkpoints. Training requests and samplers are for the owner alone. An admin may do everything.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import checkpoints, models, projects, sampling_sessions, sessions
from skyrl_tx.store.sessions import SessionRef
from skyrl_tx.store.tables import CheckpointRow, ModelRow, ProjectRole, SamplingSessionRow

_MEMBERS: tuple[ProjectRole, ...] = ("viewer", "editor")
_EDITORS: tuple[ProjectRole, ...] = ("editor",)
_SHARED_METADATA = frozenset({"renderer_name"})
"""Metadata that others see of a published checkpoint: clients need it to build prompts for the weights."""


def find_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session of the caller, without its metadata."""
    return _find_session(tx, caller, session_id, ())


def find_visible_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session of the caller or of one of its projects, without its metadata."""
    return _find_session(tx, caller, session_id, _MEMBERS)


def find_assignable_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session that the caller may move to another project: its own, or one of a project that it edits."""
    return _find_session(tx, caller, session_id, _EDITORS)


def _find_session(tx: Session, caller: Principal, session_id: SessionId, roles: Sequence[ProjectRole]) -> SessionRef:
    row = sessions.find(tx, session_id)
    may = row is not None and (
        caller.can_act_for(row.owner) or (roles and projects.get_role(tx, row.project_id, caller.owner) in roles)
    )
    if row is None or not may:
        raise not_found(f"session {quote_value(session_id)} does not exist")
    return row


def check_assignment(tx: Session, caller: Principal, project_id: str | None) -> None:
    """Raise ApiError 403 if a project has members, and the caller is none of its editors."""
    if project_id is None or caller.is_admin or not projects.has_members(tx, project_id):
        return
    if projects.get_role(tx, project_id, caller.owner) != "editor":
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"project_id {quote_value(project_id)}: the project has members, and {caller.owner} is none of its editors; "
            "an admin can change that",
        )


def find_open_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRef:
    """Find a session that has not finished. Raises ApiError 400 if it has."""
    row = find_session(tx, caller, session_id)
    if row.finished_at is not None:
        raise bad_request(f"session {quote_value(session_id)} has finished ({row.finish_reason})")
    return row


def find_model(tx: Session, caller: Principal, model_id: ModelId) -> ModelRow:
    """Find a model of the caller."""
    row = models.get(tx, model_id)
    if row is None or not caller.can_act_for(models.get_owner(tx, model_id)):
        raise not_found(f"model {quote_value(model_id)} does not exist")
    return row


def can_see_run(tx: Session, caller: Principal, model_id: ModelId) -> bool:
    """Return whether a run, with all its checkpoints, is one of the caller or of its projects."""
    return _find_role(tx, caller, model_id) is not None


def can_edit_run(tx: Session, caller: Principal, model_id: ModelId) -> bool:
    """Return whether the caller may change the checkpoints of a run: one of its own, or of a project that it edits."""
    return _find_role(tx, caller, model_id) == "editor"


def _find_role(tx: Session, caller: Principal, model_id: ModelId) -> ProjectRole | None:
    """Return what the caller may do with the checkpoints of a run: those of an editor if it is one of its own."""
    if caller.can_act_for(models.get_owner(tx, model_id)):
        return "editor"
    return projects.get_role_in_run(tx, model_id, caller.owner)


def find_visible_run(tx: Session, caller: Principal, model_id: ModelId) -> ModelRow:
    """Find a run of the caller or of one of its projects."""
    row = models.get(tx, model_id)
    if row is None or not can_see_run(tx, caller, model_id):
        raise not_found(f"model {quote_value(model_id)} does not exist")
    return row


def find_editable_run(tx: Session, caller: Principal, model_id: ModelId) -> ModelRow:
    """Find a run whose checkpoints the caller may change. Raises ApiError 403 for a viewer of its project."""
    row, rights = models.get(tx, model_id), _find_role(tx, caller, model_id)
    if row is None or rights is None:
        raise not_found(f"model {quote_value(model_id)} does not exist")
    if rights != "editor":
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"model {quote_value(model_id)}: {caller.owner} is a viewer of its project; its owner and the project's editors "
            "change its checkpoints",
        )
    return row


@dataclass(frozen=True, slots=True)
class ReadableRun:
    """A run as far as a caller may read it. Unless `is_visible`, only the published checkpoints."""

    row: ModelRow
    owner: str
    saved: Sequence[CheckpointRow]
    is_visible: bool


def find_readable_run(tx: Session, caller: Principal, model_id: ModelId, now: float) -> ReadableRun:
    """Find a run with its checkpoints; of one that the caller does not see only the published checkpoints."""
    row = models.get(tx, model_id)
    owner = models.get_owner(tx, model_id)
    is_visible = can_see_run(tx, caller, model_id)
    saved = checkpoints.list_by_run(tx, model_id, now, only_public=not is_visible)
    if row is None or owner is None or not (is_visible or saved):
        raise not_found(f"model {quote_value(model_id)} does not exist")
    return ReadableRun(row, owner, saved, is_visible)


def find_model_ref(tx: Session, caller: Principal, model_id: ModelId) -> models.ModelRef:
    """Find the columns of a model that queueing a request needs."""
    found = models.find(tx, model_id)
    if found is None or not caller.can_act_for(found.owner):
        raise not_found(f"model {quote_value(model_id)} does not exist")
    return found


def find_sampling_session(
    tx: Session, caller: Principal, sampling_session_id: SamplingSessionId
) -> tuple[SamplingSessionRow, str]:
    """Find a sampling session and its owner."""
    row = sampling_sessions.get(tx, sampling_session_id)
    owning = None if row is None else sessions.find(tx, row.session_id)
    is_gone = row is not None and row.model_id is not None and models.is_deleted(tx, row.model_id)
    if row is None or owning is None or is_gone or not caller.can_act_for(owning.owner):
        raise not_found(
            f"sampling session {quote_value(sampling_session_id)} does not exist, or was removed after a long time without "
            "use; save weights to sample from with a name to keep them"
        )
    return row, owning.owner


def find_saved_weights(
    tx: Session, readers: Sequence[Principal], path: CheckpointPath, now: float
) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint that one of the readers may read, and the model that made it; see `Call.readers`.

    Raises UserError, not ApiError, because the future of a load reports a wrong path.
    """
    row = checkpoints.get(tx, path, now)
    maker = models.get(tx, path.model_id)
    may_read = row is not None and (row.public or any(can_see_run(tx, reader, path.model_id) for reader in readers))
    if row is None or maker is None or not may_read:
        raise UserError(f"path {quote_value(str(path))}: there is no such checkpoint")
    return row, maker


def find_readable_checkpoint(tx: Session, caller: Principal, path: CheckpointPath) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint and the model that made it. Raises ApiError 404 if there is none that the caller may read."""
    try:
        return find_saved_weights(tx, [caller], path, time.time())
    except UserError as error:
        raise not_found(error.message) from error


def filter_metadata(row: ModelRow | CheckpointRow, is_visible: bool) -> dict[str, str] | None:
    """Return the client's metadata of a run or a checkpoint; who does not see the run gets what using it needs."""
    if row.user_metadata is None:
        return None
    return {name: value for name, value in row.user_metadata.items() if is_visible or name in _SHARED_METADATA}


def decode_spec(row: ModelRow) -> ModelSpec:
    """Decode the spec of a model."""
    spec = codec.decode(row.spec)
    assert isinstance(spec, ModelSpec)
    return spec
