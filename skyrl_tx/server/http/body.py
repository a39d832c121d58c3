"""Request bodies: bounded in size, structure and memory held at once; optionally zstd-compressed, JSON or protobuf."""

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar, cast

import msgspec
import zstandard
from fastapi import Request
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from skyrl_tx.server.errors import ApiError, bad_request, too_large
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.submission.validation import check_json, check_protobuf, describe_first_error

PROTOBUF = "application/x-protobuf"
_MAX_DISCARDED_BYTES = 2**30
_CLOSE = {"Connection": "close"}

ModelT = TypeVar("ModelT", bound=WireModel)
MessageT = TypeVar("MessageT", bound=Message)

_MAX_WINDOW_BYTES = 2**23
"""The window that every zstd decoder should take (RFC 8878, section 3.1.1.1.2)."""

_MAX_WAIT_S = 20.0
"""Shorter than the 60 s after which the SDK gives up an attempt."""
_UNCOUNTED_BYTES = 2**16
"""Smaller bodies are not counted: the number of connections bounds them, and heartbeats never wait."""
# The SDK sends the request again after a 429, and the sampling client pauses first (0.38, sampling_client.py).
_BACKPRESSURE = {"Retry-After": "1", "X-Tinker-Sampling-Backpressure": "1"}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The bytes of a body before and after decompression, and its parts, which become objects."""

    max_bytes: int
    max_parts: int = 2**18
    """A pass of the SDK has at most 1,024 datums, with about 24 parts each and two more for each provenance span."""

    @classmethod
    def from_content_type(cls, max_bytes: int, content_type: str) -> "BodyLimits":
        """Return the limits of passes and samples. In JSON every number becomes an object, so less JSON is taken."""
        if _is_protobuf(content_type):
            return cls(max_bytes)
        return cls(min(max_bytes, max(max_bytes // 4, 2**20)), max_parts=2**17)


CONTROL_LIMITS = BodyLimits(max_bytes=2**20, max_parts=2**14)
"""The limits of all requests but passes and samples."""
POLL_LIMITS = BodyLimits(max_bytes=2**13, max_parts=2**10)
"""The limits of a long poll for one result: thousands are held at the same time."""
LOG_LIMITS = BodyLimits(max_bytes=2**24, max_parts=2**19)
"""The limits of logged metrics: a logger sends all that it has kept while the server was away in one body."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request body as received."""

    raw: bytes
    content_type: str
    encoding: str
    limits: BodyLimits

    @property
    def is_protobuf(self) -> bool:
        """Whether the content type is protobuf. Everything else is parsed as JSON, because curl sends other types."""
        return _is_protobuf(self.content_type)

    @property
    def max_size(self) -> int:
        """The largest size after decompression in bytes: a small body must not take much memory.

        Passes of the SDK have at most 5 MB, and those of tests compress to almost nothing. JSON is not compressed by
        the SDK, and its parse takes more memory.
        """
        if self.encoding in ("", "identity"):
            return len(self.raw)
        floor, ratio = (8 * 2**20, 100) if self.is_protobuf else (2**17, 20)
        return min(max(floor, ratio * len(self.raw)), self.limits.max_bytes)

    @property
    def max_parts(self) -> int:
        """The number of parts that this body may have: twice the largest pass of the SDK, or more if it is long."""
        return min(3 * 2**14 + 2 * len(self.raw), self.limits.max_parts)

    @property
    def max_dense_bytes(self) -> int:
        """The memory in bytes that the sparse tensors of this body may take in dense form."""
        return min(max(8 * 2**20, 1024 * len(self.raw)), self.limits.max_bytes)

    def estimate_decoding_bytes(self) -> int:
        """Return roughly how many bytes are held while this body is decoded and stored.

        A float takes 4 to 20 bytes of JSON and 32 bytes as an object. Of protobuf there are the bytes, the message,
        the arrays and the stored request.
        """
        size = _read_frame_size(self.raw) if self.encoding == "zstd" else len(self.raw)
        return (4 if self.is_protobuf else 8) * min(self.max_size if size is None else size, self.max_size)

    def decompress(self) -> bytes:
        """Decompress the body. Raises ApiError 400 if it is malformed, 413 if it exceeds the limit."""
        if self.encoding in ("", "identity"):
            return self.raw
        if self.encoding != "zstd":
            raise bad_request(f"Content-Encoding {self.encoding!r} is not understood; send zstd or none")
        return _decompress(self.raw, self.max_size)

    def parse_object(self) -> dict[str, object]:
        """Parse a JSON object; an empty body is an empty one. Raises ApiError 400, or 413 if it has too many parts."""
        data = self.decompress()
        check_json(data, self.max_parts)
        try:
            value: object = _parse_json(data) if data else {}
        except (ValueError, RecursionError) as error:
            raise bad_request(f"body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise bad_request(f"body is a JSON {type(value).__name__}, not an object")
        return cast(dict[str, object], value)

    def parse_model(self, kind: type[ModelT]) -> ModelT:
        """Parse JSON by a schema. Raises ApiError 400 naming the first wrong field."""
        return validate_object(kind, self.parse_object())

    def parse_message(self, kind: type[MessageT]) -> MessageT:
        """Parse protobuf. Raises ApiError 400, or 413 if it has too many parts."""
        message, data = kind(), self.decompress()
        check_protobuf(data, kind, self.max_parts)
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise bad_request(f"body is not a protobuf {message.DESCRIPTOR.name}: {error}") from error
        return message


class BodyBudget:
    """A number of bytes that the requests of one event loop share; an owner gets at most half of them.

    A request that needs more than that waits until it is its owner's only one, or the only one of all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._reserved: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, deque[tuple[int, asyncio.Future[None]]]] = defaultdict(deque)

    @property
    def num_bytes(self) -> int:
        """The bytes that are held now."""
        return self._num_bytes

    @asynccontextmanager
    async def reserve(self, owner: str, num_bytes: int) -> AsyncGenerator[None]:
        """Hold bytes inside the context. Raises ApiError 429 if there is no place for them for 20 s."""
        if num_bytes <= _UNCOUNTED_BYTES:
            yield
            return
        if self._waiting or not self._fits(owner, num_bytes) or not self._has_capacity(num_bytes):
            await self._wait(owner, num_bytes)
        else:
            self._take(owner, num_bytes)
        try:
            yield
        finally:
            self._take(owner, -num_bytes)
            self._admit()

    async def _wait(self, owner: str, num_bytes: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = num_bytes, place
        self._waiting[owner].append(entry)
        self._admit()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # admitted while the wait ended
                self._take(owner, -num_bytes)
            else:
                self._waiting[owner].remove(entry)
            self._admit()
            if isinstance(error, TimeoutError):
                detail = f"requests of {owner!r} already hold {self._reserved.get(owner, 0)} bytes: send this one later"
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS, detail, headers=_BACKPRESSURE, reason="bodies_full"
                ) from error
            raise

    def _admit(self) -> None:
        """Let waiting requests in, those of the owner who holds least first; each owner's in their order."""
        for owner in [owner for owner, queue in self._waiting.items() if not queue]:
            del self._waiting[owner]
        while self._waiting:
            may_hold_more = [owner for owner, queue in self._waiting.items() if self._fits(owner, queue[0][0])]
            if not may_hold_more:
                return
            owner = min(may_hold_more, key=lambda each: self._reserved.get(each, 0))
            num_bytes, place = self._waiting[owner][0]
            if not self._has_capacity(num_bytes):
                return  # its turn is next: smaller ones of others must not delay it without end
            self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not place.done():
                self._take(owner, num_bytes)
                place.set_result(None)

    def _fits(self, owner: str, num_bytes: int) -> bool:
        """Whether a request fits into its owner's half."""
        held = self._reserved.get(owner, 0)
        return not held or held + num_bytes <= self._max_bytes // 2

    def _has_capacity(self, num_bytes: int) -> bool:
        """Whether a request fits into the whole."""
        return not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes

    def _take(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._reserved[owner] += num_bytes
        if not self._reserved[owner]:
            del self._reserved[owner]


def validate_object(kind: type[ModelT], value: Mapping[str, object]) -> ModelT:
    """Check a JSON object against a schema. Raises ApiError 400 naming the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(describe_first_error(error)) from error


async def read_body(request: Request, limits: BodyLimits) -> Body:
    """Receive a body. A body over the limit is received but not kept, so that the client reads the 413.

    Clients that do not stop lose their connection after `_MAX_DISCARDED_BYTES`.
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
        raise too_large(f"body of {size} bytes; this server takes at most {max_bytes} for {path}")
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

    What msgspec accepts, Python's parser reads in the same way, four times slower. The latter also reads NaN, infinity
    and halves of surrogate pairs; these are refused too, but by the name of their field or in clearer words.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value: object = json.loads(data)
    if b"\\u" in data:  # an escape may be half of a surrogate pair, which no database stores
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _read_frame_size(data: bytes) -> int | None:
    """Return the size that a zstd frame states; None if it states none."""
    try:
        stated = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError:
        return None
    return None if stated in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) else stated


def _decompress(data: bytes, max_bytes: int) -> bytes:
    """Decompress one zstd frame into a buffer of the stated size, which is checked against the limit first."""
    stated = _read_frame_size(data)
    try:
        if stated is None:
            return _decompress_unsized(data, max_bytes)
        if stated > max_bytes:
            raise too_large(
                f"body decompresses from {len(data)} to {stated} bytes; this server takes at most {max_bytes} of it"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise bad_request(f"body is not zstd: {error}") from error


def _decompress_unsized(data: bytes, max_bytes: int) -> bytes:
    """Decompress a frame that does not state its size, in pieces that bound the memory above the limit.

    A zstd block is at least 4 bytes and gives at most 128 KiB: 128 bytes of input give at most 4 MiB.
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
        raise bad_request("body is not zstd: the frame is cut short")
    return b"".join(pieces)
