"""Small checks that name the field and the value."""

import math
import secrets
from typing import cast

import numpy as np

from skyrl_tx.api.schemas.base import shown
from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.errors import UserError

_MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600


def require(condition: bool, message: str) -> None:
    """Raise UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def finite(value: float, where: str) -> float:
    """Return a number that is neither NaN nor infinite."""
    require(math.isfinite(value), f"{where} {value}: must be a finite number")
    return value


def finite_array(array: NumberArray, where: str) -> NumberArray:
    """Return an array without NaN and infinity; integers have neither."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        flat = array.reshape(-1)
        index = int(np.flatnonzero(~np.isfinite(flat))[0])
        raise UserError(f"{where}[{index}] {cast(float, flat[index])}: must be a finite number")
    return array


def ttl(seconds: int | None, where: str) -> int | None:
    """Return a lifetime between an hour and ten years; None is for ever."""
    require(
        seconds is None or _MIN_TTL_S <= seconds <= MAX_TTL_S,
        f"{where} {seconds}: must be between {_MIN_TTL_S} (an hour) and {MAX_TTL_S} (ten years), or absent",
    )
    return seconds


def seed(value: int | None, where: str) -> int:
    """Return the client's seed, or draw one: a stored request leaves nothing to chance."""
    if value is None:
        return secrets.randbits(63)
    require(-(2**63) <= value < 2**64, f"{where} {shown(value)}: must fit into 64 bits")
    return value
