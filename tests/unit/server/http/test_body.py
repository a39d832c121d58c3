import asyncio
from collections.abc import Iterable

import pytest
import zstandard
from starlette.requests import Request

from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import Body, BodyLimits, read_body
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.schemas.service import FinishRequest
from skyrl_tx.server.submission import wire_pb2

LIMIT = 100_000
LIMITS = BodyLimits(LIMIT)


def body(raw: bytes, encoding: str = "", content_type: str = "application/json") -> Body:
    return Body(raw=raw, content_type=content_type, encoding=encoding, limits=LIMITS)


def compress(data: bytes, *, stated: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=stated).compress(data)


def assert_refused(status: int, text: str, broken: Body) -> None:
    with pytest.raises(ApiError) as error:
        broken.decompress()
    assert error.value.status == status and text in error.value.detail


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300, b"\0" * LIMIT])
def test_zstd_is_decompressed(data: bytes, stated: bool) -> None:
    assert body(compress(data, stated=stated), "zstd").decompress() == data


@pytest.mark.parametrize("stated", [True, False])
def test_zstd_bomb_is_refused(stated: bool) -> None:
    assert_refused(413, "this server takes", body(compress(b"\0" * (LIMIT + 1), stated=stated), "zstd"))
    assert_refused(413, "this server takes", body(compress(b"\0" * 200 * 2**20, stated=stated), "zstd"))


@pytest.mark.parametrize("stated", [True, False])
def test_broken_zstd_is_refused(stated: bool) -> None:
    whole = compress(bytes(range(256)) * 100, stated=stated)
    for broken in (whole[:-3], whole[: len(whole) // 2], b"not zstd", b""):
        assert_refused(400, "not zstd", body(broken, "zstd"))
    assert_refused(400, "not supported", body(b"", "gzip"))


def test_frame_with_a_wrong_stated_size_is_refused() -> None:
    honest = compress(b"\0" * 70_000)
    stated = (70_000).to_bytes(4, "little")
    assert stated in honest
    assert_refused(400, "not zstd", body(honest.replace(stated, (10).to_bytes(4, "little")), "zstd"))


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"null", b'"a"', b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}', b'{"a": "\\u0000"}']
)
def test_other_json_than_objects_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        body(data).parse_model(WireModel)
    assert error.value.status == 400


def test_empty_body_is_an_empty_object() -> None:
    assert body(b"").parse_request().value == {}


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"tags": ["b", "a\\u0000"]}', r"tags[1] 'a\x00'"),
        (b'{"points": [{"values": {"\\u0000": 1}}]}', r"points[0].values key '\x00'"),
        (b'{"a": {"\\udead": 1}}', r"a key '\udead'"),
        (b'{"\\u0000": 1, "n": NaN}', r"key '\x00'"),
    ],
)
def test_text_that_no_database_stores_is_named(data: bytes, place: str) -> None:
    with pytest.raises(ApiError, match="U\\+0000") as error:
        body(data).parse_model(WireModel)
    assert error.value.detail.startswith(f"{place}: ")


def test_pairs_of_surrogates_and_escaped_backslashes_are_text() -> None:
    request = body(b'{"a": "\\ud83d\\ude00", "b": "\\\\u0000"}').parse_request()
    assert request.value == {"a": "\U0001f600", "b": "\\u0000"} and request.problem is None


def test_first_wrong_field_is_named() -> None:
    with pytest.raises(ApiError, match=r"reason.type: .* not 'bored'"):
        body(b'{"reason": {"type": "bored"}}').parse_model(FinishRequest)
    with pytest.raises(ApiError, match="reason: missing"):
        body(b"{}").parse_model(FinishRequest)


def test_truncated_protobuf_is_refused() -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id="model", loss_fn="cross_entropy")
    with pytest.raises(ApiError, match="not a protobuf ForwardBackwardRequest"):
        body(message.SerializeToString()[:-3]).parse_message(wire_pb2.ForwardBackwardRequest)


def receive(pieces: Iterable[bytes]) -> Body:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    left = iter(messages)

    async def next_message() -> dict[str, object]:
        return next(left)

    scope = {"type": "http", "path": "/p", "headers": [(b"content-type", b"Application/X-Protobuf; a=b")]}
    received = asyncio.run(read_body(Request(scope, next_message), LIMITS))
    assert next(left, None) is None, "a body is received to its end, also when it is refused"
    return received


def test_body_parts_are_joined() -> None:
    received = receive([b"a", b"", b"bc"])
    assert received.raw == b"abc" and received.is_protobuf
    assert receive([b"x" * LIMIT]).raw == b"x" * LIMIT


def test_body_over_the_limit_is_refused() -> None:
    with pytest.raises(ApiError) as error:
        receive([b"x" * 1000] * 101)
    assert error.value.status == 413
