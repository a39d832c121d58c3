"""Whole numbers with a decimal unit, as people write and read quotas: 200M, 1.5M, 5G."""

import re
from decimal import Decimal

from skyrl_tx.contract.errors import UserError

_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)([kKMGT]?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MAX = 10**18


def parse_amount(text: str) -> int:
    """Return the number that a text such as 200M means. Raises UserError for others."""
    found = _AMOUNT.fullmatch(text)
    value = None if found is None else Decimal(found[1]) * _UNITS[found[2]]
    if value is None or value != int(value) or value > _MAX:
        raise UserError(f"value {text[:40]!r}: must be a whole number of at most 10^18, or one with a unit: 200M, 5G")
    return int(value)


def format_amount(value: int) -> str:
    """Return a number as people write it, without loss: 200M for 200000000, 200_001 for 200001."""
    for unit in ("T", "G", "M", "k"):
        size = _UNITS[unit]
        if value >= size and value * 1000 % size == 0:
            return f"{Decimal(value) / size:f}{unit}"
    return f"{value:_}"
