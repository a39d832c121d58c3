"""Pieces of generated pages in Markdown."""

import inspect
from collections.abc import Iterable, Sequence


def sentence(text: str) -> str:
    """Return a help text as a sentence: first letter in upper case, full stop at the end."""
    text = " ".join(text.split())
    text = text if text[:1] in "'$" else text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def first_line(documented: object) -> str:
    """Return the first paragraph of a docstring as a sentence."""
    return sentence((inspect.getdoc(documented) or "").split("\n\n")[0])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def codes(names: Iterable[str]) -> str:
    """Return names as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)
