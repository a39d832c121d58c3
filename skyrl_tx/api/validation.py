"""Checks of the wire format: what the API alone can see. Each error names the field and its value.

What a backend can do is checked by `engine/validate.py`.
"""

import logging
import math
import secrets
from collections.abc import Iterator
from typing import cast

import numpy as np
from pydantic import ValidationError

from skyrl_tx.api.schemas.base import WireModel
from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.errors import UserError
from skyrl_tx.store.checkpoints import MAX_TTL_S

_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 1000
_MIN_TTL_S = 3600


def shown(value: object) -> str:
    """Return a value as an error message quotes it: at most 100 characters, whatever its size."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > 100:
            return f"{text[:100]}…"
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yield the text of `repr` in pieces, so that a caller who wants its beginning does not wait for all of it."""
    match value:
        case str():
            yield repr(value[:101])
        case list():
            yield "["
            for index, part in enumerate(cast(list[object], value)):
                yield ", " if index else ""
                yield from _pieces(part)
            yield "]"
        case dict():
            yield "{"
            for index, (name, part) in enumerate(cast(dict[object, object], value).items()):
                yield ", " if index else ""
                yield from _pieces(name)
                yield ": "
                yield from _pieces(part)
            yield "}"
        case _:
            yield repr(value)


def require(condition: bool, message: str) -> None:
    """Raise UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def finite(value: float, where: str) -> float:
    """Return a number that is neither NaN nor infinite; raises UserError for one that is."""
    require(math.isfinite(value), f"{where} {value}: must be a finite number")
    return value


def finite_array(array: NumberArray, where: str) -> NumberArray:
    """Return an array without NaN and infinity; raises UserError for one with either. Integers have neither."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        flat = array.reshape(-1)
        index = int(np.flatnonzero(~np.isfinite(flat))[0])
        raise UserError(f"{where}[{index}] {cast(float, flat[index])}: must be a finite number")
    return array


def check_ttl(seconds: int | None, where: str) -> int | None:
    """Return a lifetime between an hour and ten years; None is unlimited. Raises UserError for other values."""
    require(
        seconds is None or _MIN_TTL_S <= seconds <= MAX_TTL_S,
        f"{where} {seconds}: must be between {_MIN_TTL_S} (an hour) and {MAX_TTL_S} (ten years), or absent",
    )
    return seconds


def seed_or_random(value: int | None, where: str) -> int:
    """Return the client's seed, or draw one: a stored request is complete, so that replay gives the same result."""
    if value is None:
        return secrets.randbits(63)
    require(-(2**63) <= value < 2**64, f"{where} {shown(value)}: must fit into 64 bits")
    return value


def first_error(error: ValidationError) -> str:
    """Describe the first field that does not match the schema, with its value."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "missing":
        return f"{where}: missing"
    if first["type"] == "finite_number":
        return f"{where} {shown(first['input'])}: must be a finite number"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}, not {shown(first['input'])}"


def is_off(value: object) -> bool:
    """Whether an unknown field has a value that SDK releases send for "not used"."""
    return value is None or value in (False, 0, "") or value == [] or value == {}


def refuse_extra(model: WireModel, prefix: str) -> None:
    """Raise UserError for an unknown field of an object that is set."""
    for name, value in (model.model_extra or {}).items():
        require(is_off(value), f"{prefix}{name} {shown(value)}: this server does not know the field")


class UnknownFields:
    """Refuses unknown fields that may change results; logs the others, once per name and SDK version."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def check(self, model: WireModel, sdk_version: str, prefix: str = "") -> None:
        """Raise UserError for an unknown field that is set in an object whose `changes_maths` is true.

        Checks the objects in it too, but not those in lists: `translate` checks the chunks and tensors.
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
        """Log an ignored field once. Names come from clients, so at most 1,000 are remembered."""
        if (name, sdk_version) not in self._logged and len(self._logged) < _MAX_REMEMBERED:
            self._logged.add((name, sdk_version))
            _log.info("unknown field %s of SDK %s is ignored", shown(name), shown(sdk_version))
