"""Endpoints to upload external weights: a PEFT adapter becomes a checkpoint of a new run.

The client starts an upload, sends each file to a signed URL without an API key, and finishes the
upload.

An unfinished upload is a directory in `uploads` of the data directory. It holds a description,
`upload.json`, and the files that the client has sent. All API processes of a server share it.
Finishing the upload turns it into a checkpoint, and it is removed when the upload expires.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.artifacts.local import lock_folder, remove_interrupted
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, model_id
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.contract.state_files import CONFIG_FILE, WEIGHTS_FILE
from skyrl_tx.server.context import ApiCall, ApiContext, IncomingImport, get_base_url, get_context
from skyrl_tx.server.errors import ApiError, bad_request, not_found, too_large
from skyrl_tx.server.identity import access
from skyrl_tx.server.routes.weights import UPLOADED
from skyrl_tx.server.schemas import weights as schemas
from skyrl_tx.server.schemas.base import describe_body, to_utc_time
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import quote_value, require
from skyrl_tx.store import audit, checkpoints, engine_state, manifests, models
from skyrl_tx.store.tables import CheckpointRow

_log = logging.getLogger(__name__)
router = APIRouter()
_PURPOSE = "upload"
_FILE_BODY = {"required": True, "content": {"application/octet-stream": {"schema": {"format": "binary"}}}}
_MAX_RANK = 1024
"""The largest rank before an engine has published its own limit."""
_DIRECTORY, _DESCRIPTION, _CONVERTED = "uploads", "upload.json", "converted"
_ID = re.compile(r"upload-[0-9a-f]{32}")
_MAX_UNFINISHED = 8
"""Uploads of one owner that may be unfinished at the same time."""
_MARGIN_BYTES = 2**20
"""How much larger a file may be than the base model and the rank imply."""
_MIN_FREE_BYTES = 2**30
_PIECE_BYTES = 2**20
_MAX_DISCARDED_BYTES = 2**30
"""The server discards the rest of a file that is too large, and closes the connection after this."""
_STALE_S = 3600.0
_TIMEOUT_S = 900.0
"""Maximum time to convert an adapter, in seconds."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An upload that was started, as in `upload.json`."""

    owner: str
    key_id: int | None
    base_model: str
    """The public name of the base model."""
    lora: LoraSpec
    project_id: str | None
    expires: int
    max_bytes: dict[str, int]
    """The maximum size of each file."""


_DECODER = msgspec.json.Decoder(Upload)
"""Created once, because two threads cannot safely create decoders, see `contract.codec`."""


@router.post("/external_weights_upload_start", **describe_body(schemas.ExternalWeightsUploadStartRequest))
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
    upload_id, upload = Uploads(call.settings).start(
        owner=call.caller.owner,
        key_id=call.caller.key_id,
        base_model=base_model,
        lora=lora.make_spec(lora.seed or 0),
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
    async with context.shares.received_bodies.reserve(upload.owner, 2 * _PIECE_BYTES):
        await Uploads(context.settings).receive(upload_id, file, request.stream(), max_bytes, announced)
    return Response()


def _find_admitted(context: ApiContext, upload_id: str) -> Upload:
    """Return an upload whose API key is still valid. Raises ApiError 403 or 404."""
    upload = Uploads(context.settings).find(upload_id)
    if context.store.read(lambda tx: context.authenticator.find_key_principal(tx, upload.key_id)) is None:
        raise ApiError(HTTPStatus.FORBIDDEN, "the API key that this URL was made with was revoked or has expired")
    return upload


@router.post("/external_weights_upload_finish", **describe_body(schemas.ExternalWeightsUploadFinishRequest))
def finish_upload(call: IncomingImport) -> schemas.ExternalWeightsUploadFinishResponse:
    """Check the files of an upload and make a checkpoint of them. A retry returns the same path."""
    upload_id = call.body.parse_model(schemas.ExternalWeightsUploadFinishRequest).upload_id
    session_id = SessionId(f"session-{call.context.signing_key.sign('uploaded', upload_id)[:32]}")
    path = CheckpointPath(model_id(session_id, 0), CheckpointKind.EXTERNAL, UPLOADED)
    if call.store.read(lambda tx: _find_finished(tx, call, path)) is None:
        upload = Uploads(call.settings).find(upload_id)
        if not call.caller.can_act_for(upload.owner):
            raise _make_missing_error(upload_id)
        with Uploads(call.settings).convert(upload_id, upload) as folder:
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


class Uploads:
    """All unfinished uploads of a server. Thread-safe."""

    def __init__(self, settings: ApiSettings) -> None:
        self._root = settings.data_dir / _DIRECTORY
        self._base_model = settings.base_model

    def start(
        self, *, owner: str, key_id: int | None, base_model: str, lora: LoraSpec, project_id: str | None, ttl_s: float
    ) -> tuple[str, Upload]:
        """Start an upload and return its id. Raises ApiError 429 if the owner has too many."""
        if self._count_unfinished(owner) >= _MAX_UNFINISHED:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{owner} has {_MAX_UNFINISHED} unfinished uploads, the maximum: finish them or wait until they expire",
            )

        weights_bytes = _compute_max_bytes(self._base_model, replace(lora, seed=0))
        upload = Upload(
            owner=owner,
            key_id=key_id,
            base_model=base_model,
            lora=lora,
            project_id=project_id,
            expires=int(time.time() + ttl_s),
            max_bytes={CONFIG_FILE: _MARGIN_BYTES, WEIGHTS_FILE: weights_bytes + _MARGIN_BYTES},
        )

        # Rename the complete directory, so that no process finds it without its description.
        upload_id = f"upload-{secrets.token_hex(16)}"
        temporary = self._root / f".{upload_id}"
        temporary.mkdir(mode=0o700, parents=True)
        (temporary / _DESCRIPTION).write_bytes(msgspec.json.encode(upload))
        temporary.rename(self._root / upload_id)
        return upload_id, upload

    def find(self, upload_id: str) -> Upload:
        """Return an unfinished upload. Raises ApiError 404 if there is none with this id."""
        try:
            if _ID.fullmatch(upload_id):
                upload = _DECODER.decode((self._root / upload_id / _DESCRIPTION).read_bytes())
                if upload.expires >= time.time():
                    return upload
        except FileNotFoundError:
            pass
        raise _make_missing_error(upload_id)

    async def receive(
        self, upload_id: str, file: str, pieces: AsyncIterator[bytes], max_bytes: int, announced: int | None
    ) -> None:
        """Write a file of an upload. A file that was sent before is replaced when this one is complete.

        Raises ApiError 413 if the file is too large, 409 while the upload is being finished, 507 if
        the disk is full.
        """
        expected = max_bytes if announced is None else announced
        folder = self._root / upload_id
        if expected <= max_bytes and shutil.disk_usage(self._root).free < expected + _MIN_FREE_BYTES:
            raise ApiError(HTTPStatus.INSUFFICIENT_STORAGE, f"{file}: the server's disk has too little free space")

        num_bytes, buffer = 0, bytearray()
        temporary = folder / f".{file}.{secrets.token_hex(8)}"
        with _lock(folder, upload_id, is_shared=True), ExitStack() as cleanup:
            cleanup.callback(temporary.unlink, missing_ok=True)
            with temporary.open("xb") as target:
                async for piece in pieces:
                    num_bytes += len(piece)
                    if num_bytes <= max_bytes:
                        buffer += piece
                    if num_bytes > max_bytes + _MAX_DISCARDED_BYTES:
                        break

                    if len(buffer) >= _PIECE_BYTES:
                        await run_in_threadpool(target.write, buffer)
                        buffer = bytearray()
                target.write(buffer)
            if num_bytes > max_bytes:
                raise too_large(
                    f"{file}: has {num_bytes} bytes or more; the base model and lora_config allow {max_bytes}",
                    {"Connection": "close"},
                )
            temporary.rename(folder / file)

    @contextmanager
    def convert(self, upload_id: str, upload: Upload) -> Generator[Path]:
        """Yield a directory with the files of an upload in the form that the server reads.

        The upload is removed at the end of the context, unless there was an error. Raises ApiError
        400 with the name of a file that is missing or wrong, 409 while a file is being received.
        """
        folder = self._root / upload_id
        with _lock(folder, upload_id, is_shared=False):
            for file in upload.max_bytes:
                if not (folder / file).is_file():
                    raise bad_request(f"{file}: was not uploaded; send it with PUT to its URL")

            # Start again if an earlier attempt was interrupted.
            converted = folder / _CONVERTED
            shutil.rmtree(converted, ignore_errors=True)
            converted.mkdir(mode=0o700)
            _run_child(
                {
                    "source": self._base_model,
                    "lora": asdict(upload.lora),
                    "base_model": upload.base_model,
                    "directory": str(folder),
                    "out": str(converted),
                }
            )
            yield converted
            shutil.rmtree(folder)

    def count_bytes(self, _: Session) -> Counter[str]:
        """Return the bytes of the files of each owner. They count as stored bytes of the owner."""
        total: Counter[str] = Counter()
        for folder, upload in self._iterate():
            if upload is not None:
                total[upload.owner] += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return total

    def remove_expired(self, now: float) -> None:
        """Remove expired uploads, except while a file is being received or converted."""
        for folder, upload in self._iterate():
            # A directory without a description is left from a process that was killed.
            expires = folder.stat().st_mtime + _STALE_S if upload is None else upload.expires
            if expires < now:
                remove_interrupted(folder)

    def _count_unfinished(self, owner: str) -> int:
        return sum(upload is not None and upload.owner == owner for _, upload in self._iterate())

    def _iterate(self) -> Iterator[tuple[Path, Upload | None]]:
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            try:
                yield folder, _DECODER.decode((folder / _DESCRIPTION).read_bytes())
            except (FileNotFoundError, msgspec.DecodeError):
                yield folder, None


def _make_missing_error(upload_id: str) -> ApiError:
    """Return the error for an upload that does not exist, or belongs to another owner."""
    return not_found(f"upload {quote_value(upload_id)} does not exist, or has expired")


@contextmanager
def _lock(folder: Path, upload_id: str, *, is_shared: bool) -> Generator[None]:
    """Lock an upload. Raises ApiError 404 if it is gone, 409 if it is in use. Clients retry a 409."""
    how = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        with lock_folder(folder, how | fcntl.LOCK_NB):
            yield
    except FileNotFoundError as error:
        raise _make_missing_error(upload_id) from error
    except BlockingIOError as error:
        raise ApiError(HTTPStatus.CONFLICT, f"upload {upload_id} is in use by another request") from error


@cache
def _compute_max_bytes(base_model: str, lora: LoraSpec) -> int:
    """Return the size of the weights of an adapter. Raises the errors of `_run_child`."""
    return _run_child({"source": base_model, "lora": asdict(lora)})["max_bytes"]


def _run_child(request: dict[str, Any]) -> dict[str, Any]:
    """Run `models.adapter_import` in a child process and return its result.

    Raises ApiError 400 if the adapter is wrong, or if the base model cannot be read: it is in
    another form, or its files are not on this machine.
    """
    try:
        answer = json.loads(call_child(json.dumps(request)))
    except subprocess.SubprocessError as error:
        _log.error("an uploaded adapter could not be read: %s\n%s", error, getattr(error, "stderr", None))
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the adapter could not be read; see the server's log") from error
    if "unavailable" in answer:
        _log.warning("uploads are refused: the base model cannot be read: %s", answer["unavailable"])
        raise bad_request("base_model: the API process cannot read its files, so it accepts no uploads; see its log")
    if "refused" in answer:
        raise bad_request(answer["refused"])
    return answer


def call_child(request: str) -> str:
    """Start the child process, and return its standard output."""
    command = [sys.executable, "-m", "skyrl_tx.models.adapter_import"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, input=request, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, env=env
    ).stdout
