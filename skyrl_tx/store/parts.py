"""Lists of ids in statements, some at a time.

A statement that is built around a list refers to itself and so keeps the list until garbage is collected, and SQLite's
driver keeps the last 128 texts of each connection prepared. So statements are built once, and few lengths occur.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, bindparam
from sqlalchemy.orm import Mapped

T = TypeVar("T")

_AT_MOST = 1024


def is_some(column: Mapped[Any]) -> ColumnElement[bool]:
    """Whether a column is one of `some`, which the execution gives: a list of `in_parts`."""
    return column.in_(bindparam("some", expanding=True))


def in_parts(ids: Iterable[T]) -> Iterator[list[T]]:
    """Lists of at most 1,024 ids that together name each; 1, 2, 4 … long, for which the last may be there again."""
    left = list(ids)
    for start in range(0, len(left), _AT_MOST):
        part = left[start : start + _AT_MOST]
        padding = (1 << (len(part) - 1).bit_length()) - len(part)
        yield part + part[-1:] * padding
