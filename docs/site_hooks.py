"""Hooks of MkDocs: the OpenAPI document, the page of the changelog, and the rank of pages in the search."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from openapi import read_openapi

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
_LATE_IN_SEARCH = "decisions/", "internals/", "changelog.md"
"""Pages that the search lists after guides and reference."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the OpenAPI document, which is not committed, because its details depend on the version of FastAPI."""
    files.append(File.generated(config, "reference/openapi.json", content=json.dumps(read_openapi(), indent=1)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page: of the changelog CHANGELOG.md, and of the endpoints with a link to their schemas."""
    name = page.file.src_uri
    if name.startswith(_LATE_IN_SEARCH):
        page.meta.setdefault("search", {"boost": 0.5})
    if name == "changelog.md":
        return CHANGELOG.read_text().replace("](docs/", "](")
    if name == "reference/endpoints.md":
        return markdown.replace("`/openapi.json`", "`/openapi.json`, and this site has [a copy](openapi.json)")
    return markdown
