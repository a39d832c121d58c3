"""A file holds one concept, in about 500 lines at most."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 500
LONGER: dict[str, int] = {}
"""Reviewed exceptions: the path and the number of lines.

The docstring of the file gives the reason.
"""


def test_files_have_at_most_500_lines() -> None:
    sources = [
        path
        for folder in ("skyrl_tx", "tests", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith("_pb2.py")
    ]
    assert len(sources) > 100
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {name: count for name, count in lines.items() if count > LONGER.get(name, LIMIT)} == {}
