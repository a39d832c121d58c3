"""Records as a table for people, or as JSON for programs."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

Record = dict[str, object]


def show(records: Sequence[Record], *, as_json: bool, nothing: str) -> None:
    """Print records, which have the same keys; `nothing` is said where there are none."""
    if as_json:
        print(json.dumps(records, indent=2))
    elif not records:
        print(nothing)
    else:
        rows = [list(records[0]), *([_text(value) for value in record.values()] for record in records)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        rows[0] = [name.upper().replace("_", " ") for name in rows[0]]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def when(seconds: float | None) -> str | None:
    """A time as text, UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(str, value)) or "-"
        case _:
            return str(value)
