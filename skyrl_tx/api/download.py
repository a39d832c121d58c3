"""Files as answers: of known length, whole or in one range (RFC 9110, section 14), one after another or as a tar."""

import re
import tarfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

_CHUNK_BYTES = 2**20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes in memory and open files, to be sent as one body. Whoever sends it, closes `files`."""

    parts: Sequence[tuple[BinaryIO, int]]
    media_type: str
    file_name: str
    etag: str
    files: ExitStack

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        return sum(size for _, size in self.parts)


def whole_file(path: Path, etag: str) -> Download:
    """One file as it is."""
    with ExitStack() as files:
        part = files.enter_context(path.open("rb")), path.stat().st_size
        return Download((part,), "application/octet-stream", path.name, etag, files.pop_all())


def tar_of(folder: Path, names: Sequence[str], empty: Sequence[str], file_name: str, etag: str) -> Download:
    """An uncompressed tar of some of a folder's files, and of empty ones beside them."""
    parts: list[tuple[BinaryIO, int]] = []
    num_bytes = 0
    with ExitStack() as files:
        # Opened all before the first byte leaves, so that what is deleted meanwhile is still sent.
        for name in (*names, *empty):
            file = files.enter_context((folder / name).open("rb")) if name in names else BytesIO()
            size = file.seek(0, 2)
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, 0o644
            header = info.tobuf(tarfile.PAX_FORMAT)
            padding = -size % tarfile.BLOCKSIZE
            parts += [(BytesIO(header), len(header)), (file, size), (BytesIO(bytes(padding)), padding)]
            num_bytes += len(header) + size + padding
        end = 2 * tarfile.BLOCKSIZE + -(num_bytes + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE
        parts.append((BytesIO(bytes(end)), end))
        return Download(parts, "application/x-tar", file_name, etag, files.pop_all())


def respond(download: Download, request: Request) -> Response:
    """Answer with a download, or with the part of it that the request asks for."""
    headers, size = request.headers, download.size_bytes
    answer = {
        "accept-ranges": "bytes",
        "etag": f'"{download.etag}"',
        "content-disposition": f'attachment; filename="{download.file_name}"',
        "cache-control": "private",
    }
    wanted = headers.get("range") if headers.get("if-range", answer["etag"]) == answer["etag"] else None
    try:
        found = _range(wanted, size)
    except ValueError:
        download.files.close()
        answer["content-range"] = f"bytes */{size}"
        return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=answer)
    status, (start, end) = HTTPStatus.OK, (0, size)
    if found is not None:
        status, (start, end) = HTTPStatus.PARTIAL_CONTENT, found
        answer["content-range"] = f"bytes {start}-{end - 1}/{size}"
    answer["content-length"] = str(end - start)
    if request.method == "HEAD":
        download.files.close()
        return Response(None, status, answer, download.media_type)
    return StreamingResponse(_chunks(download, start, end), status, answer, download.media_type)


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """Read a header; None for none, and for those that a server may ignore. ValueError: outside the body."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    start, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    if end <= start and last and first:
        return None  # a last place before the first: no range at all
    if start >= size:
        raise ValueError(header)
    return start, min(end, size)


def _chunks(download: Download, start: int, end: int) -> Generator[bytes]:
    """Give the bytes from `start` up to `end`."""
    with download.files:
        position = 0
        for file, size in download.parts:
            skipped = min(max(0, start - position), size)
            wanted = min(size, end - position) - skipped
            position += size
            if wanted <= 0:
                continue
            file.seek(skipped)
            while wanted:
                chunk = file.read(min(wanted, _CHUNK_BYTES))
                if not chunk:
                    raise OSError("a file is shorter than it was")
                wanted -= len(chunk)
                yield chunk
