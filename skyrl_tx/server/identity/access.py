"""Access control: finds database rows by the ids that clients send.

A row that the caller may not see is reported as if it did not exist (404). The rules are:

- An owner sees and changes its own sessions, runs, checkpoints and samplers.
- Members of a project also see the project's sessions, runs and checkpoints.
- Editors of a project also change its checkpoints.
- Only the owner trains a run or uses a sampler.
- An admin may do everything.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.identity.authentication import USER_URN, Principal
from skyrl_tx.server.schemas.service import SearchOwner
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import checkpoints, models, projects, sampling_sessions, sessions
from skyrl_tx.store.sessions import SessionRef
from skyrl_tx.store.tables import CheckpointRow, ModelRow, ProjectRole, SamplingSessionRow

MEMBERS: frozenset[ProjectRole] = frozenset({"viewer", "editor"})
EDITORS: frozenset[ProjectRole] = frozenset({"editor"})
_SHARED_METADATA = frozenset({"renderer_name"})
"""Metadata of a published checkpoint that other owners see.

Their clients need the renderer to build prompts for the weights.
"""


def find_session(
    tx: Session, caller: Principal, session_id: SessionId, roles: Collection[ProjectRole] = ()
) -> SessionRef:
    """Find a session of the caller, or of a project in which the caller has one of the roles.

    With `MEMBERS`, these are the sessions that the caller may see. With `EDITORS`, they are the
    sessions that the caller may move to another project.
    """
    row = sessions.find(tx, session_id)
    may = row is not None and (
        caller.can_act_for(row.owner) or (roles and projects.get_role(tx, row.project_id, caller.owner) in roles)
    )
    if row is None or not may:
        raise not_found(f"session {quote_value(session_id)} does not exist")
    return row


def check_can_use_project(tx: Session, caller: Principal, project_id: str | None) -> None:
    """Raise ApiError 403 if a project has members and the caller is not one of its editors."""
    if project_id is None or caller.is_admin or not projects.has_members(tx, project_id):
        return
    if projects.get_role(tx, project_id, caller.owner) != "editor":
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"project_id {quote_value(project_id)}: the project has members, and {caller.owner} is none of its "
            "editors; an admin can change that",
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
        raise _make_no_model_error(tx, caller, row, model_id)
    return row


def _make_no_model_error(tx: Session, caller: Principal, row: ModelRow | None, model_id: ModelId) -> ApiError:
    """Return the error for a model that does not exist, or that the caller deleted."""
    session = None if row is None or row.deleted_at is None else sessions.find(tx, row.session_id)
    if session is not None and caller.can_act_for(session.owner):
        return not_found(f"model {quote_value(model_id)} was deleted; `skyrl-tx runs undelete` restores it for a while")
    return not_found(f"model {quote_value(model_id)} does not exist")


def can_see_run(tx: Session, caller: Principal, model_id: ModelId) -> bool:
    """Return whether the caller may see a run and all its checkpoints."""
    return _find_role(tx, caller, model_id) is not None


def can_edit_run(tx: Session, caller: Principal, model_id: ModelId) -> bool:
    """Return whether the caller may change the checkpoints of a run."""
    return _find_role(tx, caller, model_id) == "editor"


def _find_role(tx: Session, caller: Principal, model_id: ModelId) -> ProjectRole | None:
    """Return the caller's role in a run. The owner and admins have the role "editor"."""
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
    """Find a run whose checkpoints the caller may change. Raises ApiError 403 for a viewer."""
    row = find_visible_run(tx, caller, model_id)
    if not can_edit_run(tx, caller, model_id):
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"model {quote_value(model_id)}: {caller.owner} is a viewer of its project; its owner and the project's "
            "editors change its checkpoints",
        )
    return row


@dataclass(frozen=True, slots=True)
class ReadableRun:
    """A run, and those checkpoints of the run that a caller may read.

    If `is_fully_visible` is false, these are only the published checkpoints. `find_readable_runs`
    returns only the latest checkpoint of each kind.
    """

    row: ModelRow
    owner: str
    checkpoints: Sequence[CheckpointRow]
    is_fully_visible: bool


def find_readable_run(tx: Session, caller: Principal, model_id: ModelId, now: float) -> ReadableRun:
    """Find a run, and those checkpoints of the run that the caller may read.

    A caller who may not see the run gets only the published checkpoints of the run.
    """
    row = models.get(tx, model_id)
    owner = models.get_owner(tx, model_id)
    is_visible = can_see_run(tx, caller, model_id)
    saved = checkpoints.list_by_run(tx, model_id, now, only_public=not is_visible)
    if row is None or owner is None or not (is_visible or saved):
        raise not_found(f"model {quote_value(model_id)} does not exist")
    return ReadableRun(row, owner, saved, is_visible)


def find_readable_runs(tx: Session, caller: Principal, rows: Sequence[ModelRow], now: float) -> list[ReadableRun]:
    """Find the latest checkpoint of each kind that the caller may read, for many runs.

    Leaves out runs that the caller may not see, unless they have published checkpoints. The number
    of queries does not depend on the number of runs.
    """
    ids = [row.model_id for row in rows]
    owners = models.find_owners(tx, ids)
    joined = projects.list_by_member(tx, caller.owner)
    visible = {name for name, (owner, project) in owners.items() if caller.can_act_for(owner) or project in joined}
    saved = checkpoints.list_latest(tx, visible, now)
    saved |= checkpoints.list_latest(tx, owners.keys() - visible, now, only_public=True)
    return [
        ReadableRun(row, owners[name][0], saved.get(name, []), name in visible)
        for row, name in zip(rows, ids, strict=True)
        if name in visible or name in saved
    ]


def find_model_ref(tx: Session, caller: Principal, model_id: ModelId) -> models.ModelRef:
    """Find the columns of a model that are needed to queue a request."""
    ref = models.find(tx, model_id)
    if ref is None or not caller.can_act_for(ref.owner):
        raise _make_no_model_error(tx, caller, models.get(tx, model_id), model_id)
    return ref


def find_sampling_session(
    tx: Session, caller: Principal, sampling_session_id: SamplingSessionId
) -> tuple[SamplingSessionRow, str]:
    """Find a sampling session and its owner."""
    row = sampling_sessions.get(tx, sampling_session_id)
    session = None if row is None else sessions.find(tx, row.session_id)
    if row is None or session is None or not caller.can_act_for(session.owner):
        raise not_found(
            f"sampling session {quote_value(sampling_session_id)} does not exist, or was removed after a long time "
            "without use; save weights to sample from with a name to keep them"
        )
    if row.model_id is not None and models.is_deleted(tx, row.model_id):
        raise not_found(f"sampling session {quote_value(sampling_session_id)}: its run {row.model_id} was deleted")
    return row, session.owner


def find_saved_weights(
    tx: Session, readers: Sequence[Principal], path: CheckpointPath, now: float
) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint that at least one of the readers may read, and the model that saved it.

    `ApiCall.list_readers` returns the readers. Raises UserError instead of ApiError, because the
    future of a load request reports a wrong path.
    """
    row = checkpoints.get(tx, path, now)
    maker = models.get(tx, path.model_id)
    may_read = row is not None and (row.public or any(can_see_run(tx, reader, path.model_id) for reader in readers))
    if row is None or maker is None or not may_read:
        raise UserError(f"path {quote_value(str(path))}: there is no such checkpoint")
    return row, maker


def find_readable_checkpoint(tx: Session, caller: Principal, path: CheckpointPath) -> tuple[CheckpointRow, ModelRow]:
    """Find a checkpoint that the caller may read, and the model that saved it.

    Raises ApiError 404 if there is none.
    """
    try:
        return find_saved_weights(tx, [caller], path, time.time())
    except UserError as error:
        raise not_found(error.message) from error


def find_search_owners(caller: Principal, owner: SearchOwner) -> Collection[str] | None:
    """Return the owners to search. None means all owners whose rows the caller may see."""
    match owner.type:
        case "own":
            return [caller.owner]
        case "accessible":
            return None
        case "user":
            return [urn.removeprefix(USER_URN) for urn in owner.owner_urns]


def filter_metadata(row: ModelRow | CheckpointRow, is_visible: bool) -> dict[str, str] | None:
    """Return the metadata of a run or checkpoint that a caller may see.

    A caller who may not see the run only gets the entries that are needed to use the weights.
    """
    if row.user_metadata is None:
        return None
    return {name: value for name, value in row.user_metadata.items() if is_visible or name in _SHARED_METADATA}


def decode_spec(row: ModelRow) -> ModelSpec:
    """Decode the spec of a model."""
    spec = codec.decode(row.spec)
    assert isinstance(spec, ModelSpec)
    return spec
