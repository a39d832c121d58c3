"""Text of clients neither adds lines nor controls the terminal, and settings accept sizes and durations with units."""

import logging
import re

import pytest

from skyrl_tx.launch.command_line import format_table
from skyrl_tx.launch.settings import SettingsError
from skyrl_tx.process.setup import TextFormatter
from skyrl_tx.process.text import format_seconds, make_line, make_visible, parse_bytes, parse_seconds
from skyrl_tx.tools.serve import read_settings

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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("2000000", 2_000_000), ("64M", 64 * 10**6), ("64MB", 64 * 10**6), ("64MiB", 64 * 2**20)),
        *(("1.5g", 1_500_000_000), ("1 TiB", 2**40), ("1KIB", 1024)),
        *(("", None), ("-1", None), ("64Q", None), ("1iB", None), ("1e6", None), ("M", None)),
    ],
)
def test_sizes(text: str, number: int | None) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("45s", 45),
        ("90m", 5400),
        ("12h", 43_200),
        ("30d", 2_592_000),
        ("0.5h", 1800),
        ("1y", None),
        ("d", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_durations_are_shown_in_their_largest_unit() -> None:
    assert [format_seconds(seconds) for seconds in (0, 45, 90, 5400, 604_800, 0.5)] == [
        "0s",
        "45s",
        "90s",
        "90m",
        "7d",
        "0.5s",
    ]


def test_flags_variables_and_files_accept_units(tmp_path, monkeypatch) -> None:
    (tmp_path / "server.yaml").write_text("max_request_bytes: 64MiB\n")
    monkeypatch.setenv("SKYRL_TX_MAX_ARTIFACT_CACHE_BYTES", "1.5G")
    flags = ["--base-model", "fake", "--backend", "fake", "--config", str(tmp_path / "server.yaml")]
    settings = read_settings("serve", [*flags, "--trash-retention-s", "30d", "--step-timeout-s", "90"])
    assert settings.max_request_bytes == 64 * 2**20 and settings.max_artifact_cache_bytes == 1_500_000_000
    assert settings.trash_retention_s == 30 * 86_400 and settings.step_timeout_s == 90


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-request-bytes", "64Q", "--max-request-bytes '64Q': must be a size, for example 2000000, 64M or 64MiB"),
        ("--trash-retention-s", "3w", "--trash-retention-s '3w': must be seconds, or have a unit: 45s, 90m, 12h, 30d"),
    ],
)
def test_other_units_are_refused_with_examples(flag: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        read_settings("serve", ["--base-model", "fake", "--backend", "fake", flag, value])
