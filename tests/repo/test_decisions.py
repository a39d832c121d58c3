"""The index of the decision records is complete, and each record has its sections."""

import re
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = {path.name: path.read_text() for path in sorted(DIRECTORY.glob("*.md")) if path.name != "index.md"}


def read_records(page: str) -> list[tuple[str, str]]:
    """Return the title and the text of each record of a page."""
    sections = re.split(r"^## ", PAGES[page], flags=re.MULTILINE)[1:]
    return [(section.partition("\n")[0], section) for section in sections]


def test_the_index_links_every_record() -> None:
    linked = re.findall(r"\[(.+)\]\(([a-z]+\.md)#", (DIRECTORY / "index.md").read_text())
    assert sorted(linked) == sorted((title, page) for page in PAGES for title, _ in read_records(page))


def test_each_record_states_context_decision_and_consequences() -> None:
    for page in PAGES:
        for title, text in read_records(page):
            sections = re.findall(r"^\*\*(\w+)\.\*\*", text, flags=re.MULTILINE)
            assert sections in (
                ["Context", "Decision", "Consequences"],
                ["Context", "Decision", "Consequences", "Rejected"],
            ), f"{page}: {title}"


def test_guides_rank_above_decisions_in_the_search_of_the_site() -> None:
    for path in DIRECTORY.glob("*.md"):
        front_matter = re.match(r"---\nsearch:\n  boost: (.+)\n---\n", path.read_text())
        assert front_matter is not None, f"{path.name} has no search.boost"
        assert float(front_matter[1]) < 1, path.name
