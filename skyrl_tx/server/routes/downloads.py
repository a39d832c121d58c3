"""Endpoints to download weights.

Clients ask for signed URLs, and then download the files behind them without an API key.
"""

import logging
import re
import tarfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import format_datetime
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Annotated, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, ArtifactsUnreachable
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath
from skyrl_tx.server.context import ApiCall, ApiContext, Incoming, IncomingFiles, get_base_url, get_context
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.schemas.base import to_utc_time
from skyrl_tx.server.schemas.weights import ExternalWeightsUrlsResponse
from skyrl_tx.store import audit, checkpoints
from skyrl_tx.store.tables import CheckpointRow

router = APIRouter()
_log = logging.getLogger(__name__)

Form = Literal["file", "archive"]
_FILE_PATH = "/downloads/{run_id}/{kind}/{name}/{form}/{file:path}"
_PURPOSE = "download"
_CHUNK_BYTES = 2**20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_REDIRECT_TTL_S = 300.0
"""Seconds within which a client must follow a redirect to the object store."""
_ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
_COMPLETE = "checkpoint_complete"
"""An empty file that SDK releases up to 0.35 expect in an archive."""


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
def get_external_weights_urls(
    run_id: str, kind: str, name: str, call: IncomingFiles, request: Request
) -> ExternalWeightsUrlsResponse:
    """Return a signed URL for each file of external weights."""
    row = _find_readable(call, run_id, kind, name)
    if row.kind != CheckpointKind.EXTERNAL:
        raise bad_request(
            f"checkpoint {row.path} has no external weights; make some with save_weights_external, "
            "after create_training_client_from_state for a training checkpoint"
        )
    expires = int(time.time() + call.settings.download_url_ttl_s)

    with _translate_errors(row):
        artifacts = call.context.artifacts
        is_local = not artifacts.is_remote
        files = (artifacts.open_verified(row.artifact_id) if is_local else artifacts.describe(row.artifact_id)).files

    urls = {file: _make_url(call.context, call.caller, request, row, "file", file, expires) for file in files}
    return ExternalWeightsUrlsResponse(urls=urls, expires=to_utc_time(expires))


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
def redirect_to_archive(run_id: str, kind: str, name: str, call: Incoming, request: Request) -> Response:
    """Redirect to a tar archive of a checkpoint's weights (SDK up to 0.35)."""
    row = _find_readable(call, run_id, kind, name)
    expires = int(time.time() + call.settings.download_url_ttl_s)
    url = make_archive_url(call.context, call.caller, request, row, expires)
    headers = {"location": url, "expires": format_datetime(to_utc_time(expires), usegmt=True)}
    return Response(status_code=HTTPStatus.FOUND, headers=headers)


async def _admit_download(
    context: Annotated[ApiContext, Depends(get_context)], key: Annotated[int | None, Query(ge=0, lt=2**31)] = None
) -> AsyncGenerator[None]:
    """Wait until the owner of the signed URL has a free thread.

    The owner is not known yet, because the signature is checked in the thread. So the threads are
    counted by the number of the API key in the URL. A request with an invalid URL holds its thread
    only during this check.
    """
    async with context.shares.weight_files.reserve(f"key {key}"):
        yield


@router.head(_FILE_PATH, include_in_schema=False, dependencies=[Depends(_admit_download, scope="function")])
@router.get(_FILE_PATH, dependencies=[Depends(_admit_download, scope="function")])
def fetch_download(
    run_id: str,
    kind: str,
    name: str,
    form: Form,
    file: str,
    request: Request,
    context: Annotated[ApiContext, Depends(get_context)],
    expires: Annotated[int, Query(ge=0, lt=2**40)],
    signature: str,
    key: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> Response:
    """Send the file or archive that a signed URL names. No API key is needed.

    The URL contains the number of the API key that asked for it (`key`). It stays valid until it
    expires, or until that key has ended or may no longer read the checkpoint.
    """
    path = CheckpointPath.of_parts(run_id, kind, name)

    def find(tx: Session) -> tuple[CheckpointRow | None, Principal | None, bool]:
        row, signer = checkpoints.get(tx, path, time.time()), context.authenticator.find_key_principal(tx, key)
        may_read = signer is not None and access.can_see_run(tx, signer, path.model_id)
        return row, signer, row is not None and signer is not None and (row.public or may_read)

    # Check the URL, and whether its key may still read the checkpoint.
    row, signer, may_read = context.store.read(find)
    if row is None or not context.signing_key.verify(signature, *_list_signed_parts(row, form, file, expires, key)):
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL was not signed by this server, or its checkpoint is gone")
    if expires < time.time():
        raise ApiError(HTTPStatus.FORBIDDEN, "this URL has expired; ask for a new one")
    if signer is None:
        raise ApiError(HTTPStatus.FORBIDDEN, "the API key that this URL was made with was revoked or has expired")
    if not may_read:
        raise ApiError(HTTPStatus.FORBIDDEN, "the checkpoint of this URL is no longer published")

    if form == "file" and (redirect := _redirect(context, row, file, request)) is not None:
        return redirect

    # All files are open at the end of the context, so they may be deleted then.
    with _translate_errors(row), context.artifacts.keep_local(row.artifact_id):
        artifact = context.artifacts.open_verified(row.artifact_id)
        if form == "file":
            download = open_file(artifact.path / file, artifact.artifact_id)
        else:
            names = [name for name in artifact.files if row.kind == CheckpointKind.EXTERNAL or name in _ADAPTER_FILES]
            download = open_tar(artifact.path, names, file, artifact.artifact_id)
    return send_download(download, request)


def _find_readable(call: ApiCall, run_id: str, kind: str, name: str) -> CheckpointRow:
    """Find a checkpoint that the caller may read, and record the read in the audit log.

    Raises UserError or ApiError 404 if there is none.
    """
    path = CheckpointPath.of_parts(run_id, kind, name)

    def work(tx: Session) -> CheckpointRow:
        row, _ = access.find_readable_checkpoint(tx, call.caller, path)
        audit.record(tx, "checkpoint_read", call.caller.actor, time.time(), path=path, purpose="download")
        return row

    return call.store.write(work)


def _redirect(context: ApiContext, row: CheckpointRow, file: str, request: Request) -> Response | None:
    """Redirect to the object store, if clients may download from it. Otherwise return None."""
    if not context.settings.redirect_downloads:
        return None
    method = "HEAD" if request.method == "HEAD" else "GET"
    with _translate_errors(row):
        url = context.artifacts.sign_url(row.artifact_id, file, _REDIRECT_TTL_S, method)
    if url is None:
        return None
    headers = {"location": url, "cache-control": "no-store"}
    return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers=headers)


@contextmanager
def _translate_errors(row: CheckpointRow) -> Generator[None]:
    """Convert errors of the artifact store to ApiError.

    404: the files of the checkpoint are gone. 410: they are damaged. 503: the object store does not
    respond.
    """
    try:
        yield
    except (ArtifactMissing, FileNotFoundError) as error:  # possibly deleted after the row was read
        raise not_found(f"checkpoint {row.path}: its files are gone") from error
    except ArtifactsUnreachable as error:
        _log.error("could not read checkpoint %s: %s", row.path, error)
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the object store of the weights does not respond") from error
    except ArtifactCorrupt as error:
        raise ApiError(HTTPStatus.GONE, f"checkpoint {row.path} is damaged: {error}; save it again") from error


def make_archive_url(
    context: ApiContext, caller: Principal, request: Request, row: CheckpointRow, expires: int | None = None
) -> str:
    """Return a signed URL of a tar archive of a checkpoint's weights.

    The function does not check whether `caller` may read the checkpoint.
    """
    expires = expires or int(time.time() + context.settings.download_url_ttl_s)
    return _make_url(context, caller, request, row, "archive", f"{row.name}.tar", expires)


def _make_url(
    context: ApiContext, caller: Principal, request: Request, row: CheckpointRow, form: Form, file: str, expires: int
) -> str:
    """Return a signed URL of a file or archive."""
    file_path = "/".join(quote(part) for part in (row.model_id, row.kind, row.name, form, file))
    key_id = caller.key_id
    signature = context.signing_key.sign(*_list_signed_parts(row, form, file, expires, key_id))
    key = "" if key_id is None else f"&key={key_id}"
    base = get_base_url(context.settings, request)
    return f"{base}/api/v1/downloads/{file_path}?expires={expires}{key}&signature={signature}"


def _list_signed_parts(row: CheckpointRow, form: Form, file: str, expires: int, key_id: int | None) -> tuple[str, ...]:
    """Return the parts of a URL that are signed.

    The artifact id binds the URL to these files: if another checkpoint gets the same name later,
    the URL is invalid.
    """
    return _PURPOSE, row.artifact_id, str(row.path), form, file, str(expires), str(key_id)


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes and open files to send as one body, or as one range of it (RFC 9110, section 14).

    The sender closes `files`.
    """

    parts: Sequence[tuple[BinaryIO, int]]
    media_type: str
    file_name: str
    etag: str
    files: ExitStack

    @property
    def size_bytes(self) -> int:
        """The length of the whole body."""
        return sum(size for _, size in self.parts)


def open_file(path: Path, etag: str) -> Download:
    """Open one file for download."""
    with ExitStack() as files:
        part = files.enter_context(path.open("rb")), path.stat().st_size
        return Download((part,), "application/octet-stream", path.name, etag, files.pop_all())


def open_tar(folder: Path, names: Sequence[str], file_name: str, etag: str) -> Download:
    """Open files of a directory for download as one uncompressed tar archive.

    All files are opened before the first byte is sent, so the archive is complete even if a file is
    deleted meanwhile.
    """
    parts: list[tuple[BinaryIO, int]] = []
    num_bytes = 0
    with ExitStack() as files:
        for name in (*names, _COMPLETE):
            file = BytesIO() if name == _COMPLETE else files.enter_context((folder / name).open("rb"))
            size = file.seek(0, 2)
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, 0o644
            header = info.tobuf(tarfile.PAX_FORMAT)
            padding = -size % tarfile.BLOCKSIZE
            parts += [(BytesIO(header), len(header)), (file, size), (BytesIO(bytes(padding)), padding)]
            num_bytes += len(header) + size + padding

        # Two empty blocks, and padding to a whole record.
        end = 2 * tarfile.BLOCKSIZE + -(num_bytes + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE
        parts.append((BytesIO(bytes(end)), end))
        return Download(parts, "application/x-tar", file_name, etag, files.pop_all())


def send_download(download: Download, request: Request) -> Response:
    """Return a response with a download, or with the byte range that the client asked for."""
    headers, size = request.headers, download.size_bytes
    response_headers = {
        "accept-ranges": "bytes",
        "etag": f'"{download.etag}"',
        "content-disposition": f'attachment; filename="{download.file_name}"',
        "cache-control": "private",
    }

    # A client with another version of the file (If-Range) gets the whole file.
    is_same_file = headers.get("if-range", response_headers["etag"]) == response_headers["etag"]
    try:
        byte_range = _parse_range(headers.get("range") if is_same_file else None, size)
    except ValueError:
        download.files.close()
        response_headers["content-range"] = f"bytes */{size}"
        return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=response_headers)

    status, (start, end) = HTTPStatus.OK, (0, size)
    if byte_range is not None:
        status, (start, end) = HTTPStatus.PARTIAL_CONTENT, byte_range
        response_headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    response_headers["content-length"] = str(end - start)

    if request.method == "HEAD":
        download.files.close()
        return Response(None, status, response_headers, download.media_type)
    return StreamingResponse(_read_chunks(download, start, end), status, response_headers, download.media_type)


def _parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header to (start, end).

    Returns None if there is no header, or if the server may ignore it. Raises ValueError if the
    range is out of bounds.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    start, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    if end <= start and last and first:
        return None  # the end precedes the start: an invalid range is ignored
    if start >= size:
        raise ValueError(header)
    return start, min(end, size)


def _read_chunks(download: Download, start: int, end: int) -> Generator[bytes]:
    """Yield the bytes [start, end) of a download."""
    with download.files:
        position = 0
        for file, size in download.parts:
            skipped = min(max(0, start - position), size)
            remaining = min(size, end - position) - skipped
            position += size
            if remaining <= 0:
                continue

            file.seek(skipped)
            while remaining:
                chunk = file.read(min(remaining, _CHUNK_BYTES))
                if not chunk:
                    raise OSError("a file has become shorter during the download")
                remaining -= len(chunk)
                yield chunk
