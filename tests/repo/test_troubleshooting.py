"""The messages on the troubleshooting page are those that the code prints."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
_VALUE = "\x00"
"""Stands for a value that is formatted into a message."""
NOT_OURS = ("unrecognized arguments: ",)
"""Messages of argparse."""
_SHORTEST = 8
"""Shorter pieces between two values are not looked for, such as ` has `."""


def messages() -> Iterator[str]:
    """Yield the messages of the page: the code in the first column of its tables with a `Message` or a `Reason`."""
    is_listed = False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            is_listed = False
        elif line.startswith(("| Message |", "| Message,", "| Reason |")):
            is_listed = True
        elif is_listed and (found := re.match(r"\| `([^`]+)` \|", line)):
            yield found[1]


def texts() -> str:
    """Return all strings of the product, with `_VALUE` where a value is formatted into them."""
    found: list[str] = []
    for path in (ROOT / "skyrl_tx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[sdfgr]", _VALUE, node.value))
    return "\n".join(found)


TEXTS = texts()


def missing_pieces(message: str) -> list[str]:
    """Return the pieces of a message, between the values of its text, that no string of the product has."""
    pieces = (piece.strip() for piece in message.split("…"))
    return [piece for piece in pieces if len(piece) >= _SHORTEST and piece not in TEXTS]


def test_the_page_lists_messages() -> None:
    assert len(list(messages())) > 80


@pytest.mark.parametrize("message", list(messages()))
def test_the_code_prints_the_message(message: str) -> None:
    if not message.startswith(NOT_OURS):
        assert missing_pieces(message) == [], "no string in skyrl_tx/ has this text: change the page with the message"


def test_a_message_that_does_not_exist_is_found() -> None:
    assert missing_pieces("--host … is reachable by the neighbours") == ["is reachable by the neighbours"]
