"""Decisions are numbered once and in order, and each says its parts once: merges have put entries into each other."""

import re
from itertools import pairwise
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text()
ENTRIES = re.split(r"^(?=## )", TEXT, flags=re.MULTILINE)[1:]
PARTS = ("Context", "Decision", "Consequence")
MOST_LINES = 12


def test_numbers_ascend() -> None:
    assert re.findall(r"[^\n]\n(## .*)", TEXT) == [], "there is an empty line above each"
    numbers = [int(entry.removeprefix("## ").partition(". ")[0]) for entry in ENTRIES]
    assert [later for earlier, later in pairwise(numbers) if later <= earlier] == []


def test_each_says_its_parts_once_and_shortly() -> None:
    for entry in ENTRIES:
        title, *lines = entry.rstrip().splitlines()
        parts = re.findall(r"^\*(\w+)\.\*", entry, flags=re.MULTILINE)
        assert parts == [part for part in PARTS if part in parts], title
        assert "Decision" in parts and len(lines) < MOST_LINES, title
