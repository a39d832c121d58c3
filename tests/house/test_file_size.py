"""Every file keeps one room: at most 400 lines."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 400
SOURCES = sorted(
    path
    for folder in ("skyrl_tx", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith("_pb2.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LIMIT, f"{path.relative_to(ROOT)} has {lines} lines: split it by idea, not by length"
