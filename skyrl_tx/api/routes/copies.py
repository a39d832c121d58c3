"""Checkpoints under a second path, in another run: the files stay where they are."""

import time

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.context import Call, Incoming
from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.principal import Principal
from skyrl_tx.api.schemas.weights import CopyWeightsAnswer, CopyWeightsRequest
from skyrl_tx.api.translate.checks import ttl
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, ModelId, SessionId, model_id
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()

_MADE_BY = "success: made by copy_weights"


@router.post("/copy_weights")
def copy_weights(call: Incoming) -> CopyWeightsAnswer:
    """Give a checkpoint that the caller may read a second path, in a run of its own that cannot be trained.

    A repetition, told by the session's model or by the idempotency key, gives the same path.
    """
    asked = call.body.model(CopyWeightsRequest)
    try:
        source = CheckpointPath.parse(asked.source_path)
        ttl(asked.ttl_seconds, "ttl_seconds")
        lender = call.lender(asked.weights_access_token or call.weights_access_token)
    except UserError as error:
        raise bad_request(error.message) from error
    session_id, model_seq_id = _destination(call, asked)

    def work(tx: Session) -> CheckpointPath:
        if asked.destination_project_id is None:
            lookup.open_session(tx, call.caller, session_id)
        elif sessions.get(tx, session_id) is None:
            _begin(tx, call, session_id, asked.destination_project_id)
        return _copy(tx, call, source, lender, model_id(session_id, model_seq_id), session_id, asked.ttl_seconds)

    return CopyWeightsAnswer(tinker_path=str(call.store.write(work)))


def _destination(call: Call, asked: CopyWeightsRequest) -> tuple[SessionId, int]:
    """Which run the copy makes; a project gets a session for it."""
    has_session = asked.session_id is not None and asked.model_seq_id is not None
    if has_session == (asked.destination_project_id is not None):
        raise bad_request("a copy goes to a destination_project_id, or to a session_id and its model_seq_id")
    if asked.session_id is not None and asked.model_seq_id is not None:
        return SessionId(asked.session_id), asked.model_seq_id
    made = call.session_id("copy")
    if made is None:
        raise bad_request("X-Idempotency-Key: missing; without it a copy that is asked for again would be a second one")
    return made, 0


def _begin(tx: Session, call: Call, session_id: SessionId, project_id: str) -> None:
    """Make a session for a copy; nothing else ever happens in it."""
    now = time.time()
    sessions.create(
        tx,
        session_id=session_id,
        owner=call.caller.owner,
        tags=[],
        user_metadata=None,
        sdk_version=call.sdk_version,
        project_id=project_id,
        display_name=None,
        now=now,
    )
    sessions.finish(tx, session_id, _MADE_BY, now)


def _copy(
    tx: Session,
    call: Call,
    source: CheckpointPath,
    lender: Principal | None,
    run_id: ModelId,
    session_id: SessionId,
    ttl_s: int | None,
) -> CheckpointPath:
    now = time.time()
    path = CheckpointPath(run_id, source.kind, source.name)
    copied = checkpoints.get(tx, path, now)
    try:
        saved = lookup.saved_weights(tx, call.caller, source, now, lender)
    except UserError as error:
        if copied is not None:  # the source went after it was copied, and the answer did not arrive
            return path
        raise not_found(error.message) from error
    if copied is not None and copied.artifact_id == saved.artifact_id:
        return path
    run = models.get(tx, source.model_id)
    is_new = run is not None and models.create(
        tx,
        model_id=run_id,
        session_id=session_id,
        base_model=saved.base_model,
        spec=run.spec,
        user_metadata=run.user_metadata,
        now=now,
    )
    if not is_new:
        raise bad_request(f"model {run_id}: exists already, and is no copy of {source}")
    models.set_status(tx, run_id, "unloaded")
    row = CheckpointRow(
        model_id=run_id,
        kind=source.kind,
        name=source.name,
        artifact_id=saved.artifact_id,
        created_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
        size_bytes=saved.checkpoint.size_bytes,
        user_metadata=saved.checkpoint.user_metadata,
    )
    checkpoints.put(tx, row, overwrite=False)
    return path
