"""Uploads of adapters that are not finished yet: a directory each, in `uploads` of the data directory.

The directory holds a description, `upload.json`, and the files that the client has sent. All API
processes of a server share it. `finish` turns it into a checkpoint, and it is removed when the
upload expires.
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
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.artifacts.local import lock_folder, remove_interrupted
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.contract.state_files import CONFIG_FILE, WEIGHTS_FILE
from skyrl_tx.server.errors import ApiError, bad_request, not_found, too_large
from skyrl_tx.server.submission.validation import quote_value

_log = logging.getLogger(__name__)
_DIRECTORY, _DESCRIPTION, _CONVERTED = "uploads", "upload.json", "converted"
_ID = re.compile(r"upload-[0-9a-f]{32}")
_MAX_UNFINISHED = 8
"""Uploads of one owner that may be unfinished at the same time."""
_MARGIN_BYTES = 2**20
"""How much larger a file may be than the base model and the rank imply."""
_MIN_FREE_BYTES = 2**30
PIECE_BYTES = 2**20
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


class Uploads:
    """All unfinished uploads of a server. Thread-safe."""

    def __init__(self, data_dir: Path, base_model: str) -> None:
        """`base_model` is the hub id or the directory of the base model."""
        self._root = data_dir / _DIRECTORY
        self._base_model = base_model
        self._weights_bytes: dict[LoraSpec, int] = {}

    def start(
        self, *, owner: str, key_id: int | None, base_model: str, lora: LoraSpec, project_id: str | None, ttl_s: float
    ) -> tuple[str, Upload]:
        """Start an upload and return its id. Raises ApiError 429 if the owner has too many."""
        if self._count_unfinished(owner) >= _MAX_UNFINISHED:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{owner} has {_MAX_UNFINISHED} unfinished uploads, the maximum: finish them or wait until they expire",
            )

        if (settings := replace(lora, seed=0)) not in self._weights_bytes:
            answer = _run_child({"source": self._base_model, "lora": asdict(settings)})
            self._weights_bytes[settings] = answer["max_bytes"]
        upload = Upload(
            owner=owner,
            key_id=key_id,
            base_model=base_model,
            lora=lora,
            project_id=project_id,
            expires=int(time.time() + ttl_s),
            max_bytes={CONFIG_FILE: _MARGIN_BYTES, WEIGHTS_FILE: self._weights_bytes[settings] + _MARGIN_BYTES},
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
        raise make_missing_error(upload_id)

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

                    if len(buffer) >= PIECE_BYTES:
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


def make_missing_error(upload_id: str) -> ApiError:
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
        raise make_missing_error(upload_id) from error
    except BlockingIOError as error:
        raise ApiError(HTTPStatus.CONFLICT, f"upload {upload_id} is in use by another request") from error


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
