import json

import pytest

from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import BodyLimits
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.validation import check_json, check_protobuf, quote_value

PASS = wire_pb2.ForwardBackwardRequest
MAX_PARTS = 2**10
COUNT = 8 * MAX_PARTS


def nest_messages(*path: tuple[int, bytes]) -> bytes:
    """Return the bytes of nested messages, given by field number.

    The innermost message is repeated.
    """
    number, data = path[-1]
    data = (bytes([number << 3 | 2, len(data)]) + data) * COUNT
    for number, before in reversed(path[:-1]):
        inner = before + data
        data = bytes([number << 3 | 2]) + varint(len(inner)) + inner
    return data


def varint(value: int) -> bytes:
    pieces: list[int] = []
    while value > 127:
        pieces.append(value & 127 | 128)
        value >>= 7
    return bytes([*pieces, value])


KEY = b"\x0a\x01k"
SHAPE = b"\x22" + varint(COUNT) + b"\1" * COUNT
AMPLIFIERS = {
    "empty datums": nest_messages((3, b"")),
    "empty chunks": nest_messages((3, b""), (1, b"")),
    "two kinds of chunks in turn": nest_messages((3, b""), (1, b""), (1, b"\x12\0")),
    "empty loss inputs": nest_messages((3, b""), (2, b"")),
    "empty spans": nest_messages((3, b""), (3, b"")),
    "two kinds of spans in turn": nest_messages((3, b""), (4, b""), (1, b"\x12\0")),
    "two layouts of a tensor in turn": nest_messages((3, b""), (2, KEY), (2, b""), (1, b"\x12\0")),
    "a packed shape": nest_messages((3, b""), (2, KEY), (2, SHAPE), (4, b"")),
    "a shape": nest_messages((3, b""), (2, KEY), (2, b""), (4, b"\1")),
    "empty loss_fn_config": nest_messages((7, b"")),
    "long forms of numbers": b"\x9a\x80\x00\x80\x80\x00" * COUNT,
    "groups": b"\x1b\x1c" * COUNT,
}


@pytest.mark.parametrize("name", AMPLIFIERS)
def test_protobuf_of_many_parts_is_refused_before_it_is_parsed(name: str) -> None:
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS} protobuf fields") as error:
        check_protobuf(AMPLIFIERS[name], PASS, MAX_PARTS)
    assert error.value.status == 413


def make_pass(num_datums: int, length: int, num_spans: int = 0) -> wire_pb2.ForwardBackwardRequest:
    message = PASS(model_id="m", seq_id=1, loss_fn="ppo")
    for _ in range(num_datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * length
        for name in ("target_tokens", "weights", "logprobs", "advantages"):
            datum.loss_fn_inputs[name].dense = b"\1\0\0\0" * length
            datum.loss_fn_inputs[name].dtype = wire_pb2.DTYPE_INT32
            datum.loss_fn_inputs[name].shape.append(length)
        for _ in range(num_spans):
            span = datum.loss_fn_input_spans.add().sampled_tokens
            span.sequence_id, span.offset, span.length = "seq-0123456789abcdef0123456789abcdef-0", 7, 9
    return message


@pytest.mark.parametrize(
    ("num_datums", "length", "num_spans"), [(1024, 3, 0), (1024, 300, 0), (256, 40, 60), (1, 10**6, 0)]
)
def test_the_largest_passes_of_the_sdk_have_few_parts(num_datums: int, length: int, num_spans: int) -> None:
    data = make_pass(num_datums, length, num_spans).SerializeToString()
    check_protobuf(data, PASS, 2**16)
    check_protobuf(data, PASS, BodyLimits(len(data)).max_parts)


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_broken_protobuf_is_left_to_the_parser(cut: int) -> None:
    check_protobuf(make_pass(300, 40).SerializeToString()[:-cut], PASS, 2**13)


@pytest.mark.parametrize("part", [b"[]", b"{}", b'""', b'{"a":0}', b"[[[]]]", b'["\\""]'])
def test_json_of_many_parts_is_refused_before_it_is_parsed(part: bytes) -> None:
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS} JSON arrays, objects and strings"):
        check_json(b"[" + part + (b"," + part) * COUNT + b"]", MAX_PARTS)


def test_json_numbers_are_not_parts() -> None:
    check_json(json.dumps({"data": [0.5] * 100_000}).encode(), MAX_PARTS)


@pytest.mark.parametrize(
    "value",
    [
        *([], {}, "", [1, "a", {"b": [None, 2.5]}], {"b": 1, "a": 2}, [[[[["deep"]]]]]),
        *("x" * 98, "x" * 200, list(range(1000)), {"k": {"a": "b" * 300}}),
    ],
)
def test_values_are_quoted_as_repr_does(value: object) -> None:
    text = repr(value)
    assert quote_value(value) == (text if len(text) <= 100 else f"{text[:100]}…")


def test_long_values_are_not_formatted_beyond_what_is_quoted() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("not asked for")

    assert quote_value([[0] * 50, *[Loud()] * 1000]).endswith("…")
    assert quote_value({"a": [0] * 50, "b": Loud()}).endswith("…")
