"""Endpoints to upload external weights: a PEFT adapter becomes a checkpoint of a new run.

The client starts an upload, sends each file to a signed URL without an API key, and finishes the
upload.
"""

import shutil
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from sqlmodel import Session

from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, model_id
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.server import uploads
from skyrl_tx.server.context import ApiCall, ApiContext, IncomingImport, get_base_url, get_context
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity import access
from skyrl_tx.server.routes.weights import UPLOADED
from skyrl_tx.server.schemas import weights as schemas
from skyrl_tx.server.schemas.base import describe_body, to_utc_time
from skyrl_tx.server.submission.validation import require
from skyrl_tx.server.uploads import Upload
from skyrl_tx.store import audit, checkpoints, engine_state, manifests, models
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()
_PURPOSE = "upload"
_FILE_BODY = {"required": True, "content": {"application/octet-stream": {"schema": {"format": "binary"}}}}
_MAX_RANK = 1024
"""The largest rank before an engine has published its own limit."""


@router.post(
    "/external_weights_upload_start",
    response_model=schemas.ExternalWeightsUploadStartResponse,
    openapi_extra=describe_body(schemas.ExternalWeightsUploadStartRequest),
)
def start_upload(call: IncomingImport, request: Request) -> schemas.ExternalWeightsUploadStartResponse:
    """Start an upload of external weights, and return a signed URL for each file."""
    body = call.body.parse_model(schemas.ExternalWeightsUploadStartRequest)
    call.check_unknown(body.lora_config)
    base_model, lora = call.settings.resolve_model_name(body.base_model), body.lora_config

    def check(tx: Session) -> int:
        access.check_can_use_project(tx, call.caller, body.destination_project_id)
        state = engine_state.get(tx)
        return _MAX_RANK if state is None else int(state.capabilities.get("max_lora_rank", _MAX_RANK))  # type: ignore[call-overload]

    max_rank = call.store.read(check)
    require(1 <= lora.rank <= max_rank, f"lora_config.rank {lora.rank}: must be between 1 and {max_rank}")

    # Start the upload.
    upload_id, upload = call.context.uploads.start(
        owner=call.caller.owner,
        key_id=call.caller.key_id,
        base_model=base_model,
        # The adapter
        lora=LoraSpec(
            rank=lora.rank,
            seed=lora.seed or 0,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        ),
        project_id=body.destination_project_id,
        ttl_s=call.settings.download_url_ttl_s,
    )

    # Sign the URLs.
    base = f"{get_base_url(call.settings, request)}/api/v1/uploads/{upload_id}"
    urls = {
        file: f"{base}/{file}?signature={call.context.signing_key.sign(_PURPOSE, upload_id, file)}"
        for file in upload.max_bytes
    }
    return schemas.ExternalWeightsUploadStartResponse.create(
        upload_id, urls, to_utc_time(upload.expires), call.sdk_version
    )


@router.put("/uploads/{upload_id}/{file}", openapi_extra={"requestBody": _FILE_BODY})
async def receive_file(
    upload_id: str, file: str, signature: str, request: Request, context: Annotated[ApiContext, Depends(get_context)]
) -> Response:
    """Receive a file of an upload at its signed URL. No API key is needed.

    The URL stays valid until the upload expires, or until the API key that started it has ended.
    """
    if not context.signing_key.verify(signature, _PURPOSE, upload_id, file):
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL was not signed by this server")
    upload = await context.run_call(upload_id, _find_admitted, context, upload_id)

    # A file counts for the owner before it is received.
    max_bytes, length = upload.max_bytes[file], request.headers.get("content-length")
    announced = None if length is None else int(length)
    context.stored_bytes.add(upload.owner, min(max_bytes, max_bytes if announced is None else announced))
    async with context.shares.received_bodies.reserve(upload.owner, 2 * uploads.PIECE_BYTES):
        await context.uploads.receive(upload_id, file, request.stream(), max_bytes, announced)
    return Response()


def _find_admitted(context: ApiContext, upload_id: str) -> Upload:
    """Return an upload whose API key is still valid. Raises ApiError 403 or 404."""
    upload = context.uploads.find(upload_id)
    if context.store.read(lambda tx: context.authenticator.find_key_principal(tx, upload.key_id)) is None:
        raise ApiError(HTTPStatus.FORBIDDEN, "the API key that this URL was made with was revoked or has expired")
    return upload


@router.post("/external_weights_upload_finish", openapi_extra=describe_body(schemas.ExternalWeightsUploadFinishRequest))
def finish_upload(call: IncomingImport) -> schemas.ExternalWeightsUploadFinishResponse:
    """Check the files of an upload and make a checkpoint of them. A retry returns the same path."""
    upload_id = call.body.parse_model(schemas.ExternalWeightsUploadFinishRequest).upload_id
    session_id = SessionId(f"session-{call.context.signing_key.sign('uploaded', upload_id)[:32]}")
    path = CheckpointPath(model_id(session_id, 0), CheckpointKind.EXTERNAL, UPLOADED)
    if call.store.read(lambda tx: _find_finished(tx, call, path)) is None:
        upload = call.context.uploads.find(upload_id)
        if not call.caller.can_act_for(upload.owner):
            raise uploads.make_missing_error(upload_id)
        with call.context.uploads.convert(upload_id, upload) as folder:
            _store(call, upload, session_id, folder)
    return schemas.ExternalWeightsUploadFinishResponse(tinker_path=str(path))


def _find_finished(tx: Session, call: ApiCall, path: CheckpointPath) -> CheckpointRow | None:
    is_own = call.caller.can_act_for(models.get_owner(tx, path.model_id))
    return checkpoints.get(tx, path, time.time()) if is_own else None


def _store(call: ApiCall, upload: Upload, session_id: SessionId, folder: Path) -> None:
    """Store the files in `folder`, and then the rows that refer to them."""
    now, spec = time.time(), ModelSpec(lora=upload.lora)
    run = manifests.make_run_metadata(
        model_id=model_id(session_id, 0), owner=upload.owner, base_model=upload.base_model, spec=spec, now=now
    )
    saved = manifests.make_checkpoint_metadata(
        kind=CheckpointKind.EXTERNAL, name=UPLOADED, expires_at=None, user_metadata=None
    )

    def write(target: Path) -> None:
        for path in folder.iterdir():
            shutil.move(path, target)

    def add_rows(tx: Session) -> None:
        access.check_can_use_project(tx, call.caller, upload.project_id)
        (path,) = manifests.import_run(
            tx,
            artifact,
            # The run
            session_id=session_id,
            owner=upload.owner,
            base_model=upload.base_model,
            spec=spec,
            project_id=upload.project_id,
            key_id=call.caller.quota_key_id,
            # The checkpoint
            kinds=[CheckpointKind.EXTERNAL],
            name=UPLOADED,
            created_by="external_weights_upload",
            now=now,
        )
        call.admit_checkpoint(tx, session_id, now)
        audit.record(tx, "checkpoint_create", call.caller.actor, now, path=path, purpose="upload")

    artifact = call.context.artifacts.create(write, {**run, **saved})
    call.store.write(add_rows)
