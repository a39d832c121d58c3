"""Counts the parts of a JSON or protobuf body, before a parser builds an object for each of them.

A part of two bytes becomes an object of 50 to 500 bytes, so the size of a body does not bound the memory of its parse.
"""

from functools import cache
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from skyrl_tx.api.errors import too_large

_PIECE = 2**20
_JSON_PARTS = {ord("["): 2, ord("{"): 2, ord('"'): 1}
"""Bytes that begin a part; a string has two quotes."""

_Nested = dict[int, "_Nested | None"]
"""The fields of a message whose content counts, by number; None for packed numbers."""

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_OPAQUE: _Nested = {}
_SMALL = 16
"""A rest of a message of at most this size counts as parts without being read: that is quicker, and rarely wrong."""

_SLOW = 8
"""Parts that a number in a needlessly long form counts for: no encoder writes it, and it is slow to read."""


def check_json(data: bytes, max_parts: int) -> None:
    """Raise ApiError 413 if JSON may hold more than `max_parts` arrays, objects and strings.

    Brackets inside strings count too. Numbers do not: an array of numbers takes at most ten times its text.
    """
    if len(data) <= 2 * max_parts:
        return
    codes = np.frombuffer(data, np.uint8)
    halves = 0
    for start in range(0, len(codes), _PIECE):  # NumPy releases the interpreter lock in each comparison
        piece = codes[start : start + _PIECE]
        halves += sum(weight * int(np.count_nonzero(piece == code)) for code, weight in _JSON_PARTS.items())
        if halves > 2 * max_parts:
            raise too_large(f"body holds more than {max_parts} JSON arrays, objects and strings; send less at once")


def check_protobuf(data: bytes, kind: type[Message], max_parts: int) -> None:
    """Raise ApiError 413 if a protobuf message has more than `max_parts` fields, those of its messages included.

    Malformed bytes are left to the parser, which does not read beyond them.
    """
    nested = _nested(cast(Descriptor, kind.DESCRIPTOR)) or _OPAQUE
    if len(data) > 2 * max_parts and _count(data, 0, len(data), nested, max_parts) < 0:
        raise too_large(f"body holds more than {max_parts} protobuf fields; send less at once")


@cache
def _nested(kind: Descriptor) -> _Nested | None:
    """Return the fields of a message whose content counts; None for a message without messages and repeated numbers."""
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    numbers: _Nested = {field.number: None for field in kind.fields if field.is_repeated and field.is_packed}
    if not messages and not numbers:
        return None
    return numbers | {number: inner for number, each in messages.items() if (inner := _nested(each)) is not None}


def _count(data: bytes, start: int, end: int, nested: _Nested, left: int) -> int:
    """Subtract the number of parts in `data[start:end]` from `left`, until it is negative.

    Runs for each field of each body: lengths of one and two bytes are read in place.
    """
    try:
        while end - start > _SMALL and left >= 0:
            left -= 1
            tag = data[start]
            start += 1
            if tag > 127:
                tag, start = _varint(data, start - 1)
                left -= _SLOW
            wire_type = tag & 7
            if wire_type == _LENGTH:
                size = data[start]
                start += 1
                if size > 127:
                    size, start = _varint(data, start - 1)
                    if size <= 127:
                        left -= _SLOW
                if (number := tag >> 3) in nested:
                    inner = nested[number]
                    if inner is None or size <= _SMALL:
                        left -= size if inner is None else size >> 1
                    else:
                        left = _count(data, start, min(start + size, end), inner, left)
                start += size
            elif wire_type == _VARINT:
                while data[start] > 127:
                    start += 1
                start += 1
            elif wire_type in (_FIXED64, _FIXED32):
                start += 8 if wire_type == _FIXED64 else 4
            elif wire_type not in (_START_GROUP, _END_GROUP):
                break
    except IndexError:  # cut short
        return left
    return left - (max(end - start, 0) >> 1)


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Read a number; return it and the position after it."""
    byte = data[start]
    value, shift = byte & 127, 7
    while byte > 127:
        start += 1
        byte = data[start]
        value |= (byte & 127) << shift
        shift += 7
    return value, start + 1
