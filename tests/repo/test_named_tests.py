"""The tests that the documents name exist, and each published attack has a test."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
ATTACKS = "tests/faults/test_known_attacks.py"
NUMBER = re.compile(r"CVE-\d{4}-\d{4,}")


@cache
def list_test_functions(path: str) -> frozenset[str]:
    """Return the names of the test functions of a module."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def read_attacks() -> list[list[str]]:
    """Return the cells of each row of the table of known attacks: attack, numbers, defence, tests."""
    text = (ROOT / "docs/internals/reliability.md").read_text()
    section = text.partition("\n## Known attacks\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_tests_exist(page: Path) -> None:
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        assert (ROOT / path).is_file(), f"{path} does not exist"
        assert not name or name in list_test_functions(path), f"{path} has no test {name}"


def test_every_attack_has_its_tests() -> None:
    for attack, numbers, defence, tests in read_attacks():
        named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", tests)
        assert NUMBER.search(numbers) and defence and len(named) == tests.count("`") // 2 > 0, attack
        for path, name in named:
            assert name in list_test_functions(path or ATTACKS), f"{attack}: there is no test {name}"


def test_every_number_in_a_test_is_in_the_table() -> None:
    listed = {number for _, numbers, _, _ in read_attacks() for number in NUMBER.findall(numbers)}
    assert set(NUMBER.findall((ROOT / ATTACKS).read_text())) <= listed
