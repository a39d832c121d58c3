"""Request bodies: bounded bytes, optionally zstd, that hold JSON or protobuf."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import zstandard
from fastapi import Request
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from skyrl_tx.api.errors import bad_request, too_large
from skyrl_tx.api.schemas.base import WireModel, first_error

PROTOBUF = "application/x-protobuf"

ModelT = TypeVar("ModelT", bound=WireModel)
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body as received: at most `max_bytes` long, and no longer once decompressed."""

    raw: bytes
    content_type: str
    encoding: str
    max_bytes: int

    @property
    def is_protobuf(self) -> bool:
        """Whether the caller says that this is protobuf; anything else is read as JSON, as curl sends it."""
        return self.content_type.partition(";")[0].strip().lower() == PROTOBUF

    def data(self) -> bytes:
        """Undo the content encoding; 400 if it cannot be undone, 413 if that would exceed the limit."""
        if self.encoding in ("", "identity"):
            return self.raw
        if self.encoding != "zstd":
            raise bad_request(f"Content-Encoding {self.encoding!r} is not understood; send zstd or none")
        return _decompress(self.raw, self.max_bytes)

    def mapping(self) -> dict[str, object]:
        """Read a JSON object; an absent body is an empty one."""
        data = self.data()
        try:
            value: object = json.loads(data) if data else {}
            if b"\\u" in data:  # an escape may spell half a character, which no database stores
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise bad_request(f"body is a JSON {type(value).__name__}, not an object")
        return cast(dict[str, object], value)

    def model(self, kind: type[ModelT]) -> ModelT:
        """Read JSON of a known shape; 400 naming the first field that does not fit."""
        return parse(kind, self.mapping())

    def message(self, kind: type[MessageT]) -> MessageT:
        """Read protobuf."""
        message = kind()
        try:
            message.ParseFromString(self.data())
        except DecodeError as error:
            raise bad_request(f"body is not a protobuf {message.DESCRIPTOR.name}: {error}") from error
        return message


def parse(kind: type[ModelT], value: Mapping[str, object]) -> ModelT:
    """Check a JSON object against its schema; 400 naming the first field that does not fit."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(first_error(error)) from error


async def read_body(request: Request, max_bytes: int) -> Body:
    """Receive a body. One over the limit is received to its end without being kept, so that the 413 arrives."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            pieces.append(piece)
        else:
            pieces.clear()
    if size > max_bytes:
        raise too_large(f"body of {size} bytes; this server takes at most {max_bytes}")
    headers = request.headers
    return Body(
        raw=b"".join(pieces),
        content_type=headers.get("content-type", ""),
        encoding=headers.get("content-encoding", "").strip().lower(),
        max_bytes=max_bytes,
    )


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """Undo one zstd frame. Its header is not believed: the output buffer has the size that it states, or the limit."""
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        is_stated = stated not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)
        if is_stated and stated > max_bytes:
            raise too_large(f"body decompresses to {stated} bytes; this server takes at most {max_bytes}")
        if is_stated:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        return _decompress_unstated(data, max_bytes)
    except zstandard.ZstdError as error:
        raise bad_request(f"body is not zstd: {error}") from error


def _decompress_unstated(data: bytes, max_bytes: int) -> bytes:
    """Undo a frame that does not state its size, in pieces so small that one cannot exceed the limit by much.

    A zstd block is at least 4 bytes and gives at most 128 KiB: 512 bytes of input give at most 16 MiB.
    """
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    pieces: list[bytes] = []
    size = 0
    for start in range(0, len(data), 512):
        piece = decompressor.decompress(data[start : start + 512])
        size += len(piece)
        if size > max_bytes:
            raise too_large(f"body decompresses to more than the {max_bytes} bytes that this server takes")
        pieces.append(piece)
    if not decompressor.eof:
        raise bad_request("body is not zstd: the frame is cut short")
    return b"".join(pieces)
