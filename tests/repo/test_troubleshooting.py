"""The messages on the troubleshooting page are the messages that the code prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
_VALUE = "\x00"
"""Stands for a value that is formatted into a message."""
NOT_OURS = ("unrecognized arguments: ",)
"""Messages of argparse."""
_SHORTEST = 8
"""Pieces between two values that are shorter than this are not searched, for example ` has `."""


def read_messages() -> Iterator[str]:
    """Yield the messages of the page: inline code in the first column of tables with a `Message` or `Reason` header."""
    is_listed = False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            is_listed = False
        elif line.startswith(("| Message |", "| Message,", "| Reason |")):
            is_listed = True
        elif is_listed and (found := re.match(r"\| `([^`]+)` \|", line)):
            yield found[1]


@cache
def read_texts() -> str:
    """Return all strings of the product. `_VALUE` replaces each formatted value."""
    found: list[str] = []
    for path in (ROOT / "skyrl_tx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[sdfgr]", _VALUE, node.value))
    return "\n".join(found)


def find_missing_pieces(message: str) -> list[str]:
    """Return the pieces of a message, between its values, that no string of the product contains."""
    pieces = (piece.strip() for piece in message.split("…"))
    return [piece for piece in pieces if len(piece) >= _SHORTEST and piece not in read_texts()]


def test_the_page_lists_messages() -> None:
    assert len(list(read_messages())) > 80


@pytest.mark.parametrize("message", list(read_messages()))
def test_the_code_prints_the_message(message: str) -> None:
    if not message.startswith(NOT_OURS):
        assert find_missing_pieces(message) == [], (
            "no string in skyrl_tx/ has this text: change the page with the message"
        )


def test_a_message_that_does_not_exist_is_found() -> None:
    assert find_missing_pieces("--host … is reachable by the neighbours") == ["is reachable by the neighbours"]
