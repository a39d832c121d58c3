"""File downloads of known length, as one file or a tar, whole or one byte range (RFC 9110, section 14)."""

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
    """Bytes and open files that are sent as one body. The sender closes `files`."""

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
    """Open one file."""
    with ExitStack() as files:
        part = files.enter_context(path.open("rb")), path.stat().st_size
        return Download((part,), "application/octet-stream", path.name, etag, files.pop_all())


def tar_of(folder: Path, names: Sequence[str], empty: Sequence[str], file_name: str, etag: str) -> Download:
    """Open an uncompressed tar of some files of a directory, with additional empty files."""
    parts: list[tuple[BinaryIO, int]] = []
    num_bytes = 0
    with ExitStack() as files:
        # All files are opened before the first byte is sent, so a file that is deleted meanwhile is still complete.
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
    """Return a response with a download, or with the byte range that the request asks for."""
    headers, size = request.headers, download.size_bytes
    response_headers = {
        "accept-ranges": "bytes",
        "etag": f'"{download.etag}"',
        "content-disposition": f'attachment; filename="{download.file_name}"',
        "cache-control": "private",
    }
    wanted = (
        headers.get("range") if headers.get("if-range", response_headers["etag"]) == response_headers["etag"] else None
    )
    try:
        found = _range(wanted, size)
    except ValueError:
        download.files.close()
        response_headers["content-range"] = f"bytes */{size}"
        return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=response_headers)
    status, (start, end) = HTTPStatus.OK, (0, size)
    if found is not None:
        status, (start, end) = HTTPStatus.PARTIAL_CONTENT, found
        response_headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    response_headers["content-length"] = str(end - start)
    if request.method == "HEAD":
        download.files.close()
        return Response(None, status, response_headers, download.media_type)
    return StreamingResponse(_chunks(download, start, end), status, response_headers, download.media_type)


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header to (start, end). None without one or if a server may ignore it; ValueError if outside."""
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


def _chunks(download: Download, start: int, end: int) -> Generator[bytes]:
    """Yield the bytes [start, end) of a download."""
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
                    raise OSError("a file has become shorter during the download")
                wanted -= len(chunk)
                yield chunk
