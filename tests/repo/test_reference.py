"""The committed reference pages are those that the generator makes of the code."""

from pathlib import Path

import pytest

from docs.generate_reference import generate

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("endpoints.md", "losses.md", "metrics.md", "models.md", "recipes.md", "settings.md")


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate()


@pytest.mark.parametrize("page", PAGES)
def test_the_committed_page_equals_the_generated_one(generated: dict[str, str], page: str) -> None:
    committed = (DOCS / "reference" / page).read_text()
    assert committed == generated[page], f"docs/reference/{page} is out of date: run make reference and commit it"


def test_every_page_is_generated(generated: dict[str, str]) -> None:
    assert sorted(path.name for path in (DOCS / "reference").glob("*.md")) == sorted(generated) == sorted(PAGES)
