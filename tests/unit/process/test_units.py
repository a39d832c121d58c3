"""Sizes and durations with units, and the settings that accept them."""

import re

import pytest

from skyrl_tx.launch.settings import SettingsError
from skyrl_tx.process.units import format_seconds, parse_bytes, parse_seconds
from skyrl_tx.tools.serve import read_settings


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
