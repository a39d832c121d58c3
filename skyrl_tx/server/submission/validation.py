"""Checks of wire messages that need no backend. Every error names the field and its value.

The engine checks what depends on the backend (`engine/prepare.py`).

The parts of a body are counted before it is parsed: a part takes as little as two bytes on the
wire, but 50 to 500 bytes as a Python object. So a limit on the size of a body alone would not limit
the memory that parsing takes.
"""

import logging
import math
import re
import secrets
from collections.abc import Iterator
from functools import cache
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from pydantic import ValidationError

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.numbers import check_number
from skyrl_tx.process.text import make_line
from skyrl_tx.server.errors import too_large
from skyrl_tx.server.schemas.base import WireModel

_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 1000
_PIECE = 2**20
_MAX_NAME_CHARS = 100
_NUMBERS = frozenset({int, float})
_REFUSED_TEXT = re.compile("[\x00\ud800-\udfff]")
_JSON_PARTS = {ord("["): 2, ord("{"): 2, ord('"'): 1}
"""How many half parts each byte counts as.

A bracket begins one part. A quote counts as half a part, because a string has two quotes.
"""
_Nested = dict[int, "_Nested | None"]
"""The fields of a message whose content is counted, by field number.

The value of a nested message is its own such fields. The value of packed numbers is None.
"""
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_OPAQUE: _Nested = {}
"""For a message without such fields."""
_SMALL = 16
"""If a message has at most this many bytes left, they are not read.

Instead, every two bytes count as one part, which is faster and rarely wrong.
"""
_SLOW = 8
"""Number of parts that a varint with unnecessary bytes counts as.

Usual encoders do not write such varints, and reading them is slow.
"""


def check_json(data: bytes, max_parts: int) -> None:
    """Raise ApiError 413 if JSON may have more than `max_parts` arrays, objects and strings.

    Brackets within strings count, too. Numbers do not count: an array of numbers takes at most ten
    times the memory of its text.
    """
    if len(data) <= 2 * max_parts:
        return
    codes = np.frombuffer(data, np.uint8)
    halves = 0
    for start in range(0, len(codes), _PIECE):  # NumPy releases the interpreter lock for each piece
        piece = codes[start : start + _PIECE]
        halves += sum(weight * int(np.count_nonzero(piece == code)) for code, weight in _JSON_PARTS.items())
        if halves > 2 * max_parts:
            raise too_large(f"body holds more than {max_parts} JSON arrays, objects and strings; send less at once")


def check_protobuf(data: bytes, kind: type[Message], max_parts: int) -> None:
    """Raise ApiError 413 if a message has more than `max_parts` fields, including nested messages.

    Ignores malformed bytes: the parser does not read beyond them and reports the error.
    """
    nested = _find_nested_fields(cast(Descriptor, kind.DESCRIPTOR)) or _OPAQUE
    if len(data) > 2 * max_parts and _count_parts(data, 0, len(data), nested, max_parts) < 0:
        raise too_large(f"body holds more than {max_parts} protobuf fields; send less at once")


@cache
def _find_nested_fields(kind: Descriptor) -> _Nested | None:
    """Return the fields of a message whose content must be counted.

    None for a message that has neither nested messages nor packed numbers.
    """
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    numbers: _Nested = {field.number: None for field in kind.fields if field.is_repeated and field.is_packed}
    if not messages and not numbers:
        return None
    return numbers | {
        number: fields for number, message in messages.items() if (fields := _find_nested_fields(message)) is not None
    }


def _count_parts(data: bytes, start: int, end: int, nested: _Nested, left: int) -> int:
    """Subtract the number of parts in `data[start:end]` from `left`, and stop if it gets negative.

    Called for each nested message of a body, so it reads tags and lengths of one byte without a
    function call.
    """
    try:
        while end - start > _SMALL and left >= 0:
            # Read the tag.
            left -= 1
            tag = data[start]
            start += 1
            if tag > 127:
                tag, start = _read_varint(data, start - 1)
                left -= _SLOW

            # Read or skip the value.
            wire_type = tag & 7
            if wire_type == _LENGTH:
                size = data[start]
                start += 1
                if size > 127:
                    size, start = _read_varint(data, start - 1)
                    if size <= 127:
                        left -= _SLOW
                # Count the content of a message or of packed numbers.
                if (number := tag >> 3) in nested:
                    inner = nested[number]
                    if inner is None or size <= _SMALL:
                        left -= size if inner is None else size >> 1
                    else:
                        left = _count_parts(data, start, min(start + size, end), inner, left)
                start += size

            elif wire_type == _VARINT:
                while data[start] > 127:
                    start += 1
                start += 1
            elif wire_type in (_FIXED64, _FIXED32):
                start += 8 if wire_type == _FIXED64 else 4
            elif wire_type not in (_START_GROUP, _END_GROUP):
                break
    except IndexError:  # the message is truncated
        return left
    return left - (max(end - start, 0) >> 1)


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the value of a varint, and the position after the varint."""
    byte = data[start]
    value, shift = byte & 127, 7
    while byte > 127:
        start += 1
        byte = data[start]
        value |= (byte & 127) << shift
        shift += 7
    return value, start + 1


def quote_value(value: object) -> str:
    """Quote a value for an error message, with at most 100 characters."""
    if isinstance(value, str):  # names of tensors are quoted many times per request
        text = repr(value[:101])
    else:
        text = ""
        for piece in _iterate_repr(value):
            text += piece
            if len(text) > 100:
                break
    return text if len(text) <= 100 else f"{text[:100]}…"


def _iterate_repr(value: object) -> Iterator[str]:
    """Yield the text of `repr` in pieces.

    A caller who only needs the beginning of a large value does not have to wait for the rest.
    """
    match value:
        case str():
            yield repr(value[:101])

        case list():
            yield "["
            for index, part in enumerate(cast(list[object], value)):
                yield ", " if index else ""
                yield from _iterate_repr(part)
            yield "]"

        case dict():
            yield "{"
            for index, (name, part) in enumerate(cast(dict[object, object], value).items()):
                yield ", " if index else ""
                yield from _iterate_repr(name)
                yield ": "
                yield from _iterate_repr(part)
            yield "}"

        case _:
            yield repr(value)


def is_storable(text: str) -> bool:
    """Return whether every database can store a text."""
    return _REFUSED_TEXT.search(text) is None


def check_text(text: str, where: str) -> str:
    """Return text of a client. Raises UserError if a database cannot store it."""
    if not is_storable(text):
        raise UserError(_describe_refusal(where, text))
    return text


def describe_refused_text(value: object) -> str | None:
    """Describe the first string or key of a JSON value that a database cannot store, or return None."""
    found = _find_refused_text(value)
    if found is None:
        return None
    place, text = found
    return _describe_refusal(place.lstrip(" ."), text)


def _describe_refusal(where: str, text: str) -> str:
    return (
        f"{where} {quote_value(text)}: text must not contain U+0000 or half of a surrogate pair, which cannot be stored"
    )


def _find_refused_text(value: object) -> tuple[str, str] | None:
    """Return the place of the first refused string, for example `.tags[0]`, and the string."""
    if isinstance(value, str):
        return None if is_storable(value) else ("", value)

    if isinstance(value, dict):
        for name, part in cast(dict[str, object], value).items():
            if not is_storable(name):
                return " key", name
            if (found := _find_refused_text(part)) is not None:
                return f".{make_line(name, _MAX_NAME_CHARS)}{found[0]}", found[1]

    elif isinstance(value, list):
        for index, part in enumerate(cast(list[object], value)):
            if type(part) not in _NUMBERS and (found := _find_refused_text(part)) is not None:
                return f"[{index}]{found[0]}", found[1]
    return None


def require(condition: bool, message: str, *, field: str | None = None) -> None:
    """Raise UserError if the condition is false. `field` is the path of the field that is wrong."""
    if not condition:
        raise UserError(message) if field is None else FieldError(message, field)


def check_finite(value: float, where: str) -> float:
    """Return a number. Raises UserError if it is NaN or infinite."""
    require(math.isfinite(value), f"{where} {value}: must be a finite number")
    return value


def check_finite_array(array: NumberArray, where: str) -> NumberArray:
    """Return an array. Raises UserError if it contains NaN or infinity."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        flat = array.reshape(-1)
        index = int(np.flatnonzero(~np.isfinite(flat))[0])
        raise UserError(f"{where}[{index}] {cast(float, flat[index])}: must be a finite number")
    return array


def check_ttl(seconds: int | None, where: str) -> int | None:
    """Return a lifetime in seconds. None means unlimited.

    Raises UserError unless it is between an hour and ten years.
    """
    if seconds is not None:
        check_number(where, seconds)
    return seconds


def choose_seed(value: int | None, where: str) -> int:
    """Return the client's seed, or draw one.

    The stored request contains the seed, so that replaying it gives the same result.
    """
    if value is None:
        return secrets.randbits(63)
    check_number(where, value)
    return value


def describe_first_error(error: ValidationError) -> str:
    """Describe the first field that does not match the schema, with its value."""
    first = error.errors(include_url=False)[0]
    where = name_first_field(error) or "body"
    if first["type"] == "missing":
        return f"{where}: missing"
    if first["type"] == "finite_number":
        return f"{where} {quote_value(first['input'])}: must be a finite number"
    if first["type"] == "too_long" and isinstance(first["input"], dict):
        return f"{where}: must have at most {first.get('ctx', {})['max_length']} names"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}, not {quote_value(first['input'])}"


def name_first_field(error: ValidationError) -> str:
    """Return the path of the first field that does not match the schema, empty for the whole body."""
    parts = error.errors(include_url=False)[0]["loc"]
    return ".".join(make_line(str(part), _MAX_NAME_CHARS) for part in parts)


def is_off(value: object) -> bool:
    """Return whether a value of an unknown field means "not used".

    SDK releases send such defaults.
    """
    return value is None or value in (False, 0, "") or value == [] or value == {}


def refuse_extra(model: WireModel, prefix: str) -> None:
    """Raise UserError for an unknown field of an object that is set."""
    for name, value in (model.model_extra or {}).items():
        field = f"{prefix}{make_line(name, _MAX_NAME_CHARS)}"
        require(is_off(value), f"{field} {quote_value(value)}: this server does not know the field")


class UnknownFields:
    """Refuses unknown fields that may change results, and logs all other unknown fields once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, model: WireModel, sdk_version: str, prefix: str = "") -> None:
        """Raise UserError for an unknown field that is set, if `changes_maths` is true.

        Checks nested objects as well, but not the objects in lists. The translation checks chunks
        and tensors, which are in lists.
        """
        if model.changes_maths:
            refuse_extra(model, prefix)
        for name in model.model_extra or ():
            self.log(f"{prefix}{name}", sdk_version)
        for name in model.model_fields_set:
            value: object = getattr(model, name, None)
            if isinstance(value, WireModel):
                self.check(value, sdk_version, f"{prefix}{name}.")

    def log(self, name: str, sdk_version: str) -> None:
        """Log an ignored field once. Remembers at most 1,000 names, because clients choose them."""
        if name not in self._logged and len(self._logged) < _MAX_REMEMBERED:
            self._logged.add(name)
            _log.info("unknown field %s of SDK %s is ignored", quote_value(name), quote_value(sdk_version))
