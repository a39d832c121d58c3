import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.console import rendering
from skyrl_tx.apps.console.rendering import make_visible


@given(st.text())
def test_no_character_stays_hidden_or_changes_the_direction(text: str) -> None:
    for character in make_visible(text):
        assert character in "\t\n" or unicodedata.category(character) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )


def test_hidden_characters_are_escapes_and_long_text_is_cut() -> None:
    assert make_visible("a\u202eb\x00\x1b[31m\u200b") == "a\\u202eb\\x00\\x1b[31m\\u200b"
    assert make_visible("été — 漢字 שלום") == "été — 漢字 שלום"
    assert make_visible("x" * 2**20) == "x" * 20_000 + "… (1,048,576 characters)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (999, "999"), (48_100_000, "48.1M"), (1500, "1.5k"), (2e12, "2.0T"), (None, "–")],
)
def test_counts(value: float | None, text: str) -> None:
    assert rendering.format_count(value) == text


def test_other_numbers() -> None:
    assert [rendering.format_number(value) for value in (0.41, 1e-5, 123456.0, 0.0, float("nan"))] == [
        "0.41",
        "1e-5",
        "1.23e5",
        "0",
        "–",
    ]
    assert [rendering.format_size(value) for value in (0, 1023, 1536, 220_000_000)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "210 MiB",
    ]
    assert [rendering.format_duration(value) for value in (0.02, 3.21, 90, 7260, 90_000)] == [
        "20 ms",
        "3.2 s",
        "1 min 30 s",
        "2 h 1 min",
        "1 d 1 h",
    ]
    assert [rendering.format_age(100.0, now) for now in (100.5, 130.0, 40.0, 8000.0)] == [
        "now",
        "30 s ago",
        "in 1 min",
        "2 h ago",
    ]
    assert rendering.shorten_id("session-0123456789abcdef:train:0") == "01234567:train:0"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_number_is_written_shortly(value: float) -> None:
    assert (
        len(rendering.format_number(value)) <= 12
        and len(rendering.format_count(value)) <= 310
        and len(rendering.format_duration(value)) <= 320
    )
