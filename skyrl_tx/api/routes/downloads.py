"""Weights as files: signed URLs that need no key, and what is behind them."""

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlmodel import Session

from skyrl_tx.api import download, lookup
from skyrl_tx.api.context import ApiContext, Call, Incoming, parts_of
from skyrl_tx.api.errors import ApiError, bad_request, not_found
from skyrl_tx.api.schemas.weights import ExternalWeightsUrlsAnswer
from skyrl_tx.artifacts import Artifact, ArtifactCorrupt, ArtifactMissing
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId, checkpoint_name
from skyrl_tx.store import checkpoints
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()

Form = Literal["file", "archive"]
_PLACE = "/downloads/{run_id}/{kind}/{name}/{form}/{file:path}"
_PURPOSE = "download"
_ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
_COMPLETE = "checkpoint_complete"
"""An empty file that SDKs up to 0.35 look for in an archive."""


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
def external_weights_urls(
    run_id: str, kind: str, name: str, call: Incoming, request: Request
) -> ExternalWeightsUrlsAnswer:
    """Sign a URL for each file of external weights."""
    row = _readable(call, run_id, kind, name)
    if row.kind != CheckpointKind.EXTERNAL:
        raise bad_request(
            f"checkpoint {row.path} is not made of external weights; make some with save_weights_external, "
            "after create_training_client_from_state for a training checkpoint"
        )
    expires = int(time.time() + call.settings.download_url_ttl_s)
    urls = {file: _url(call.parts, request, row, "file", file, expires) for file in _artifact(call.parts, row).files}
    return ExternalWeightsUrlsAnswer(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
def archive(run_id: str, kind: str, name: str, call: Incoming, request: Request) -> Response:
    """Redirect to a tar of a checkpoint's weights, as SDKs up to 0.35 and recipes of their time ask for it."""
    row = _readable(call, run_id, kind, name)
    expires = int(time.time() + call.settings.download_url_ttl_s)
    url = _url(call.parts, request, row, "archive", f"{row.name}.tar", expires)
    headers = {"location": url, "expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)}
    return Response(status_code=HTTPStatus.FOUND, headers=headers)


@router.head(_PLACE, include_in_schema=False)
@router.get(_PLACE)
def fetch(
    run_id: str,
    kind: str,
    name: str,
    form: Form,
    file: str,
    request: Request,
    parts: Annotated[ApiContext, Depends(parts_of)],
    expires: Annotated[int, Query(ge=0, lt=2**40)],
    signature: str,
) -> Response:
    """Send what a signed URL names; no key is asked for, and none is needed."""
    path = _path(run_id, kind, name)
    row = parts.store.read(lambda tx: checkpoints.get(tx, path, time.time()))
    if row is None or not parts.signing_key.proves(signature, *_signed(row, form, file, expires)):
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL was not signed by this server, or its checkpoint is gone")
    if expires < time.time():
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL has expired; ask for a new one")
    artifact = _artifact(parts, row)
    names = [name for name in artifact.files if row.kind == CheckpointKind.EXTERNAL or name in _ADAPTER_FILES]
    try:
        if form == "file":
            found = download.whole_file(artifact.path / file, artifact.artifact_id)
        else:
            found = download.tar_of(artifact.path, names, [_COMPLETE], file, artifact.artifact_id)
    except FileNotFoundError as error:  # removed since
        raise _gone(row) from error
    return download.respond(found, request)


def _readable(call: Call, run_id: str, kind: str, name: str) -> CheckpointRow:
    """Find a checkpoint that the caller may read, by the parts of its URL."""
    path = _path(run_id, kind, name)

    def work(tx: Session) -> CheckpointRow:
        return lookup.saved_weights(tx, call.caller, path, time.time()).checkpoint

    try:
        return call.store.read(work)
    except UserError as error:
        raise not_found(error.message) from error


def _path(run_id: str, kind: str, name: str) -> CheckpointPath:
    if kind not in list(CheckpointKind):
        raise bad_request(f"checkpoint kind {kind[:80]!r} is not one of {', '.join(CheckpointKind)}")
    try:
        return CheckpointPath(ModelId(run_id), CheckpointKind(kind), checkpoint_name(name))
    except UserError as error:
        raise bad_request(error.message) from error


def _artifact(parts: ApiContext, row: CheckpointRow) -> Artifact:
    """Find the files of a checkpoint, and have them as they were written."""
    try:
        return parts.artifacts.verified(row.artifact_id)
    except ArtifactMissing as error:
        raise _gone(row) from error
    except ArtifactCorrupt as error:
        raise ApiError(HTTPStatus.GONE, f"checkpoint {row.path} is damaged: {error}; save it anew") from error


def _gone(row: CheckpointRow) -> ApiError:
    return not_found(f"checkpoint {row.path}: its files are gone")


def _url(parts: ApiContext, request: Request, row: CheckpointRow, form: Form, file: str, expires: int) -> str:
    """Write a URL on the address by which the client reached this server."""
    base = parts.settings.public_url or f"{request.url.scheme}://{request.url.netloc}{request.scope['root_path']}"
    place = "/".join(quote(part) for part in (row.model_id, row.kind, row.name, form, file))
    signature = parts.signing_key.sign(*_signed(row, form, file, expires))
    return f"{base.rstrip('/')}/api/v1/downloads/{place}?expires={expires}&signature={signature}"


def _signed(row: CheckpointRow, form: Form, file: str, expires: int) -> tuple[str, ...]:
    """What a URL is for: these very files, though another checkpoint may come to have their name."""
    return _PURPOSE, row.artifact_id, str(row.path), form, file, str(expires)
