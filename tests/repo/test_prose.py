"""The prose checker finds its targets, and nothing in standard English."""

from pathlib import Path

import pytest

from tests.repo import prose


def test_long_table_cells_are_found_and_link_targets_do_not_count() -> None:
    text = f"| {'x' * 161} | y |\n| [x]({'u' * 200}) |\n{'x' * 200}\n```\n| {'x' * 200} |\n```\n"
    assert [number for number, _ in prose.find_long_cells(text)] == [1]


def test_links_to_missing_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    text = "[a](a.md) [part](a.md#part)\n[b](b.md#part)\n[web](https://example.org/c.md) [here](#here)\n"
    assert [number for number, _ in prose.find_broken_links(text, tmp_path)] == [2]


@pytest.mark.parametrize(
    ("docstring", "findings"),
    [("Return the size.", 0), ("What is kept.", 1), ("Where it is", 2), ("Whether it is full.", 0), ("The size", 1)],
)
def test_docstrings_begin_with_a_thing_or_an_action_and_end_with_a_period(docstring: str, findings: int) -> None:
    assert len(list(prose.check_docstrings(f'def f():\n    """{docstring}"""\n'))) == findings


def test_docstrings_of_attributes_are_checked() -> None:
    assert [number for number, _ in prose.check_docstrings('LIMIT = 1\n"""What a row holds."""\n')] == [2]
