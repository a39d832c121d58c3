"""Request bodies: JSON or protobuf, optionally compressed with zstd.

Limits the size of a body and the number of objects in it. `shares` limits the memory of all bodies.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
import zstandard
from fastapi import Request
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from skyrl_tx.server.errors import bad_request, too_large
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.submission.validation import (
    check_json,
    check_protobuf,
    describe_first_error,
    describe_refused_text,
    name_first_field,
)

PROTOBUF = "application/x-protobuf"
_MAX_DISCARDED_BYTES = 2**30
_CLOSE = {"Connection": "close"}
_REFUSED_ESCAPES = (b"\\u0000", b"\\ud", b"\\uD")
"""JSON without these escapes has neither zero characters nor halves of surrogate pairs."""

ModelT = TypeVar("ModelT", bound=WireModel)
MessageT = TypeVar("MessageT", bound=Message)

_MAX_WINDOW_BYTES = 2**23
"""Maximum zstd window. RFC 8878 (section 3.1.1.1.2) recommends that decoders support this size."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Maximum size of a body, before and after decompression, and maximum number of its parts."""

    max_bytes: int
    max_parts: int = 2**18
    """Maximum number of JSON objects, arrays and strings, or protobuf fields.

    The SDK sends at most 1,024 datums per request, with about 24 parts each and 2 more for each
    provenance span.
    """
    reason: str = ""
    """Text after the maximum size in the error of a larger body, for example the setting."""

    @classmethod
    def from_content_type(cls, max_bytes: int, content_type: str) -> "BodyLimits":
        """Return the limits of a training pass or sample request.

        The limits for JSON are lower, because every number in it becomes a Python object.
        """
        if _is_protobuf(content_type):
            return cls(max_bytes, reason=" (--max-request-bytes)")
        reason = " (a quarter of --max-request-bytes, because it is JSON)"
        return cls(min(max_bytes, max(max_bytes // 4, 2**20)), max_parts=2**17, reason=reason)


CONTROL_LIMITS = BodyLimits(max_bytes=2**20, max_parts=2**14)
"""Limits for all requests except training passes, sample requests, polls and logged metrics."""
POLL_LIMITS = BodyLimits(max_bytes=2**13, max_parts=2**10)
"""Limits for a long poll of one result. The server may hold thousands of them at the same time."""
COMPLETIONS_POLL_LIMITS = BodyLimits(max_bytes=2**20, max_parts=2**14)
"""Limits for a long poll of many results, which names each result that the client has fetched."""
LOG_LIMITS = BodyLimits(max_bytes=2**24, max_parts=2**19)
"""Limits for logged metrics: a client may send all points of a server outage in one body."""


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """The JSON object of a request for the engine.

    `problem` describes text in the object that a database cannot store, or is None. The future of
    the request reports the problem.
    """

    value: Mapping[str, object]
    problem: str | None

    def parse_ids(self, kind: type[ModelT]) -> ModelT:
        """Parse the ids of the request.

        Raises ApiError 400 for invalid ids, because a request without ids gets no future that could
        report the problem.
        """
        ids = {name: self.value[name] for name in kind.model_fields if name in self.value}
        problem = describe_refused_text(ids) if self.problem is not None else None
        if problem is not None:
            raise bad_request(problem)
        return validate_object(kind, ids)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body as it was received."""

    raw: bytes
    content_type: str
    encoding: str
    limits: BodyLimits

    @property
    def is_protobuf(self) -> bool:
        """Whether the content type is protobuf. All other bodies are parsed as JSON.

        For example, `curl -d` labels JSON as form data.
        """
        return _is_protobuf(self.content_type)

    @property
    def max_size(self) -> int:
        """Maximum size after decompression in bytes.

        A compressed body may expand to 100 times its size (protobuf) or 20 times its size (JSON),
        so that a small body cannot take much memory. Every body may expand to 8 MiB (protobuf) or
        128 KiB (JSON). The 8 MiB are needed because a training pass of the SDK has up to 5 MB, and
        test data compresses to almost nothing. JSON gets less, because the SDK does not compress
        JSON, and parsing JSON takes more memory.
        """
        if self.encoding in ("", "identity"):
            return len(self.raw)
        floor, ratio = (8 * 2**20, 100) if self.is_protobuf else (2**17, 20)
        return min(max(floor, ratio * len(self.raw)), self.limits.max_bytes)

    @property
    def max_parts(self) -> int:
        """Maximum number of parts of this body.

        Every body may have 49,152 parts, twice as many as the largest pass of the SDK, and two more
        for each byte, up to `limits.max_parts`.
        """
        return min(3 * 2**14 + 2 * len(self.raw), self.limits.max_parts)

    @property
    def max_dense_bytes(self) -> int:
        """Maximum memory, in bytes, of the sparse tensors of this body in dense form."""
        return min(max(8 * 2**20, 1024 * len(self.raw)), self.limits.max_bytes)

    def estimate_decoding_bytes(self) -> int:
        """Estimate the memory needed while this body is decoded and stored, in bytes.

        Eight times the size for JSON: a float has 4 to 20 characters of text, and takes 32 bytes as
        an object. Four times the size for protobuf: the bytes, the parsed message, the arrays, and
        the encoded request to store.
        """
        size = _read_frame_size(self.raw) if self.encoding == "zstd" else len(self.raw)
        return (4 if self.is_protobuf else 8) * min(self.max_size if size is None else size, self.max_size)

    def decompress(self) -> bytes:
        """Return the decompressed body.

        Raises:
            ApiError: 400 if the body is malformed, 413 if it exceeds `max_size`.
        """
        if self.encoding in ("", "identity"):
            return self.raw
        if self.encoding != "zstd":
            raise bad_request(f"Content-Encoding {self.encoding!r} is not supported; send zstd or none")
        return _decompress(self.raw, self.max_size)

    def parse_request(self) -> JsonRequest:
        """Parse a JSON object, and find text in it that a database cannot store.

        An empty body counts as an empty object.

        Raises:
            ApiError: 400 if the body is not a JSON object, 413 if it has too many parts.
        """
        data = self.decompress()
        check_json(data, self.max_parts)
        try:
            value: object = _parse_json(data) if data else {}
            is_suspicious = any(escape in data for escape in _REFUSED_ESCAPES)
            problem = describe_refused_text(value) if is_suspicious else None
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise bad_request(f"body is a JSON {type(value).__name__}, not an object")
        return JsonRequest(cast(dict[str, object], value), problem)

    def parse_model(self, kind: type[ModelT]) -> ModelT:
        """Parse a JSON object and validate it.

        Raises ApiError 400 that names the first wrong field, or text that a database cannot store.
        """
        request = self.parse_request()
        if request.problem is not None:
            raise bad_request(request.problem)
        return validate_object(kind, request.value)

    def parse_message(self, kind: type[MessageT]) -> MessageT:
        """Parse a protobuf message. Raises ApiError 400, or 413 if it has too many parts."""
        message, data = kind(), self.decompress()
        check_protobuf(data, kind, self.max_parts)
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise bad_request(f"body is not a protobuf {message.DESCRIPTOR.name}: {error}") from error
        return message


def validate_object(kind: type[ModelT], value: Mapping[str, object]) -> ModelT:
    """Validate a JSON object. Raises ApiError 400 that names the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(describe_first_error(error), field=name_first_field(error) or None) from error


async def read_body(request: Request, limits: BodyLimits) -> Body:
    """Receive a request body. Raises ApiError 413 if it exceeds the limit.

    The server receives and discards the rest of a body that is too large, because a client reads
    the response only after it has sent everything. It closes the connection after
    `_MAX_DISCARDED_BYTES`.
    """
    pieces: list[bytes] = []
    size, max_bytes = 0, limits.max_bytes
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            pieces.append(piece)
        else:
            pieces.clear()
        if size > max_bytes + _MAX_DISCARDED_BYTES:
            raise too_large(f"body of more than {size} bytes; this server takes at most {max_bytes}", _CLOSE)
    if size > max_bytes:
        path: str = request.scope["path"]
        raise too_large(f"body of {size} bytes; this server takes at most {max_bytes} for {path}{limits.reason}")

    headers = request.headers
    return Body(
        raw=b"".join(pieces),
        content_type=headers.get("content-type", ""),
        encoding=headers.get("content-encoding", "").strip().lower(),
        limits=limits,
    )


def _is_protobuf(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == PROTOBUF


def _parse_json(data: bytes) -> object:
    """Parse JSON. Raises ValueError or RecursionError.

    msgspec is four times as fast as Python's parser and accepts a subset of its inputs. If msgspec
    fails, Python's parser decides. It accepts NaN, infinity and lone surrogates, which are refused
    later, by an error that names the field.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json.loads(data)


def _read_frame_size(data: bytes) -> int | None:
    """Return the decompressed size that the header of a zstd frame states, or None."""
    try:
        stated = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError:
        return None
    return None if stated in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) else stated


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """Decompress one zstd frame. Raises ApiError 400 or 413.

    If the frame states its size, the size is checked before memory is allocated.
    """
    stated = _read_frame_size(data)
    try:
        if stated is None:
            return _decompress_unsized(data, max_bytes)
        if stated > max_bytes:
            raise too_large(
                f"body decompresses from {len(data)} to {stated} bytes; this server takes at most {max_bytes} bytes"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise bad_request(f"body is not zstd: {error}") from error


def _decompress_unsized(data: bytes, max_bytes: int) -> bytes:
    """Decompress a zstd frame that does not state its size. Raises ApiError 413 above the limit.

    Feeds 128 bytes at a time, so that the output can exceed the limit by at most 4 MiB: a zstd
    block has at least 4 bytes and expands to at most 128 KiB.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    pieces: list[bytes] = []
    size = 0
    for start in range(0, len(data), 128):
        piece = decompressor.decompress(data[start : start + 128])
        size += len(piece)
        if size > max_bytes:
            raise too_large(f"body decompresses to more than the {max_bytes} bytes that this server takes")
        pieces.append(piece)
    if not decompressor.eof:
        raise bad_request("body is not zstd: the frame is truncated")
    return b"".join(pieces)
