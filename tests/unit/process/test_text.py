"""Text of clients in log lines and tables: it neither adds lines nor controls the terminal."""

import logging

from skyrl_tx.launch.command_line import format_table
from skyrl_tx.process.setup import TextFormatter
from skyrl_tx.process.text import make_line, make_visible

HOSTILE = "a\x1b]0;title\x07\n2026-01-31T12:00:00.000Z INFO api forged\r\x9b2J\u202e\x00\ud800"


def is_harmless(line: str) -> bool:
    return line.isprintable() and line.isascii()


def test_hidden_characters_are_replaced_and_long_text_is_truncated() -> None:
    assert make_line("a\tb\n\x1b") == "a\\x09b\\x0a\\x1b" and make_visible("a\tb\n\x1b") == "a\tb\n\\x1b"
    assert make_line("été 漢字") == "été 漢字" and make_line("x" * 30, 20) == "x" * 20 + "… (30 characters)"


def test_log_line_stays_one_line() -> None:
    line = TextFormatter("api").format(logging.makeLogRecord({"msg": "refused GET %s", "args": (HOSTILE,)}))
    assert is_harmless(line) and "refused GET a\\x1b]0;title\\x07\\x0a2026" in line


def test_traceback_cannot_contain_a_forged_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    first, *rest = TextFormatter("api").format(record).splitlines()
    assert first.endswith("failed") and rest[0].startswith("Traceback")
    assert all(is_harmless(line) and line.startswith("  ") for line in rest[1:])


def test_table_has_one_line_per_record() -> None:
    header, line = format_table([{"project": HOSTILE, "members": [HOSTILE, "ann"]}])
    assert is_harmless(line) and "ann" in line and header.startswith("PROJECT")
