"""The style counter finds what it is meant to find, and the tree is within its budgets."""

import pytest

from tests.repo import style
from tests.repo.style import AREAS, Area

MODULE = '''"""The plan of a mesh, and those of others."""


def size_of(rows):  # whatever they hold
    for each in rows:
        yield each


def held(rows):
    raise ValueError("rows go on")
'''


def test_constructions_of_docstrings_and_comments_are_found() -> None:
    assert [finding.text for finding in style.find_constructions("a.py", MODULE)] == ["those of", "others", "whatever"]


def test_constructions_of_messages_are_found() -> None:
    assert [finding.text for finding in style.find_messages("a.py", MODULE)] == ["go on"]
    assert [finding.line for finding in style.find_messages("a.jinja", "<p>\nthose that {{ wait }}\n")] == [2]


def test_code_in_markdown_is_not_prose() -> None:
    text = "`those of`\n```\nthose of\n```\nthose of\n"
    assert [finding.line for finding in style.find_constructions("a.md", text)] == [5]


def test_names_are_found() -> None:
    kinds = [finding.kind for finding in style.find_names("a.py", MODULE)]
    assert sorted(kinds) == ["loop over each", "of function", "participle function"]


def test_class_names_used_twice_are_found() -> None:
    first = style.find_public_classes("a.py", "class Row: ...\nclass Part: ...\nclass _Part: ...\n")
    second = style.find_public_classes("b.py", "class Row: ...\nclass _Part: ...\n")
    (found,) = style.find_repeated_classes([*first, *second])
    assert (found.path, found.text) == ("b.py", "Row")


@pytest.mark.parametrize(("num_lines", "num_findings"), [(15, 0), (16, 1)])
def test_long_runs_are_found(num_lines: int, num_findings: int) -> None:
    body = "".join(f"    x = {number}\n" for number in range(num_lines))
    assert len(list(style.find_names("a.py", f"def work():\n{body}"))) == num_findings


def test_a_count_above_or_below_the_budget_is_a_problem() -> None:
    area = Area((), constructions=2, names={"of function": 1})
    assert not list(style.compare("a", area, {"construction": 2, "of function": 1}))
    (above,) = style.compare("a", area, {"construction": 3, "of function": 1})
    assert "the budget is 2" in above
    (below,) = style.compare("a", area, {"construction": 2})
    assert "lower the budget from 1" in below


@pytest.mark.parametrize("title", sorted(AREAS))
def test_areas_have_files(title: str) -> None:
    area = AREAS[title]
    assert not area.paths or any((style.ROOT / path).exists() for path in area.paths)
