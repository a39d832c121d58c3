"""Request bodies: bounded in size, optionally zstd-compressed, JSON or protobuf."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import zstandard
from fastapi import Request
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from skyrl_tx.api.errors import bad_request, too_large
from skyrl_tx.api.schemas.base import WireModel
from skyrl_tx.api.validation import first_error

PROTOBUF = "application/x-protobuf"
_MAX_DISCARDED_BYTES = 2**30
_CLOSE = {"Connection": "close"}

ModelT = TypeVar("ModelT", bound=WireModel)
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body as received. `max_bytes` bounds it before and after decompression."""

    raw: bytes
    content_type: str
    encoding: str
    max_bytes: int

    @property
    def is_protobuf(self) -> bool:
        """Whether the content type is protobuf. Everything else is parsed as JSON, because curl sends other types."""
        return self.content_type.partition(";")[0].strip().lower() == PROTOBUF

    def data(self) -> bytes:
        """Decompress the body. Raises ApiError 400 if it is malformed, 413 if it exceeds the limit."""
        if self.encoding in ("", "identity"):
            return self.raw
        if self.encoding != "zstd":
            raise bad_request(f"Content-Encoding {self.encoding!r} is not understood; send zstd or none")
        return _decompress(self.raw, self.max_bytes)

    def mapping(self) -> dict[str, object]:
        """Parse a JSON object; an empty body is an empty object. Raises ApiError 400."""
        data = self.data()
        try:
            value: object = json.loads(data) if data else {}
            if b"\\u" in data:  # an escape may be half of a surrogate pair, which no database stores
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise bad_request(f"body is a JSON {type(value).__name__}, not an object")
        return cast(dict[str, object], value)

    def model(self, kind: type[ModelT]) -> ModelT:
        """Parse JSON by a schema. Raises ApiError 400 naming the first wrong field."""
        return parse(kind, self.mapping())

    def message(self, kind: type[MessageT]) -> MessageT:
        """Parse protobuf. Raises ApiError 400."""
        message = kind()
        try:
            message.ParseFromString(self.data())
        except DecodeError as error:
            raise bad_request(f"body is not a protobuf {message.DESCRIPTOR.name}: {error}") from error
        return message


def parse(kind: type[ModelT], value: Mapping[str, object]) -> ModelT:
    """Check a JSON object against a schema. Raises ApiError 400 naming the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(first_error(error)) from error


async def read_body(request: Request, max_bytes: int) -> Body:
    """Receive a body. A body over the limit is received but not kept, so that the client reads the 413.

    Clients that do not stop lose their connection after `_MAX_DISCARDED_BYTES`.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            pieces.append(piece)
        else:
            pieces.clear()
        if size > max_bytes + _MAX_DISCARDED_BYTES:
            raise too_large(f"body of more than {size} bytes; this server takes at most {max_bytes}", _CLOSE)
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
    """Decompress one zstd frame into a buffer of the stated size, which is checked against the limit first."""
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        is_stated = stated not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)
        if is_stated and stated > max_bytes:
            raise too_large(f"body decompresses to {stated} bytes; this server takes at most {max_bytes}")
        if is_stated:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        return _decompress_unsized(data, max_bytes)
    except zstandard.ZstdError as error:
        raise bad_request(f"body is not zstd: {error}") from error


def _decompress_unsized(data: bytes, max_bytes: int) -> bytes:
    """Decompress a frame that does not state its size, in pieces that bound the memory above the limit.

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
