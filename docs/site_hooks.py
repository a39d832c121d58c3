"""Hooks of MkDocs: the page of the changelog, and the rank of pages in the search."""

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
_LATE_IN_SEARCH = "decisions/", "internals/", "changelog.md"
"""Pages that the search lists after guides and reference."""


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page. The changelog is CHANGELOG.md, whose links begin with `docs/`."""
    name = page.file.src_uri
    if name.startswith(_LATE_IN_SEARCH):
        page.meta.setdefault("search", {"boost": 0.5})
    if name == "changelog.md":
        return CHANGELOG.read_text().replace("](docs/", "](")
    return markdown
