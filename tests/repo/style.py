"""Count constructions and names that make this project hard to read, against a budget for each area.

Run as `python tests/repo/style.py` (`make lint` does), or with `--list` to print every finding. A
budget is the number of findings that an area may have. It may only shrink: a lower count fails as
well, until the budget is lowered to it.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CONSTRUCTIONS = re.compile(
    r"\b(?:(?:that|those) of|in place of|(?:ones?|those) (?:that|which|whose)|(?:of|for|than|with|by|to|from|in) what"
    r"|(?:of|for|to|by|from|with) which|of (?:its|their|our|his|her) own|(?:go|goes|went|going) on"
    r"|whatever|as far as|by (?:itself|themselves)|others)\b",
    re.IGNORECASE,
)
"""Constructions that other projects hardly use, for example a pronoun where the noun should be repeated."""

LONGEST_RUN = 15
"""Lines of a function without a blank line or a comment."""

NOT_VERBS = frozenset(
    {"shown", "held", "given", "taken", "made", "found", "written", "sent", "drawn", "seen", "kept", "done"}
)
VERBS_IN_ED = frozenset({"feed", "need", "seed", "embed", "unembed", "exceed", "succeed", "proceed"})
MESSAGE_CALLS = frozenset(
    {"info", "warning", "error", "exception", "debug", "critical", "require", "refuse", "add_argument", "print"}
)


@dataclass(frozen=True, slots=True)
class Area:
    """Files that share a budget: at most `constructions` in their prose, and at most so many `names` findings."""

    paths: Sequence[str]
    constructions: int = 0
    messages: int = 0
    names: Mapping[str, int] | None = None


AREAS = {
    "README and guides": Area(("README.md", "CHANGELOG.md", "docs/index.md", "docs/guides")),
    "reference": Area(("docs/reference", "docs/glossary.md", "docs/performance.md")),
    "internals": Area(("docs/architecture.md", "docs/internals", "docs/decisions", "CONTRIBUTING.md")),
    "product": Area(
        ("skyrl_tx",), names={"of function": 10, "participle function": 7, "run of more than 15 lines": 12}
    ),
    "tests": Area(
        ("tests", "benchmarks", "examples"),
        names={"of function": 1, "participle function": 22, "run of more than 15 lines": 81},
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One place to rewrite."""

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def find_constructions(path: str, text: str) -> Iterator[Finding]:
    """Yield the constructions in the prose of a Markdown file, or in the docstrings and comments of a module."""
    for line, sentence in read_markdown(text) if path.endswith(".md") else read_docstrings_and_comments(text):
        for match in CONSTRUCTIONS.finditer(sentence):
            yield Finding(path, line, "construction", match[0])


def read_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line outside code."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(text.splitlines(), 1):
        yield number, re.sub(r"`[^`]*`", "", line)


def read_docstrings_and_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each line of a docstring, and of each comment."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from enumerate(value.value.splitlines(), statement.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def find_messages(path: str, text: str) -> Iterator[Finding]:
    """Yield the constructions in texts that users read: help texts, error messages, log lines and templates."""
    for line, message in read_messages(text) if path.endswith(".py") else read_template(text):
        for match in CONSTRUCTIONS.finditer(message):
            yield Finding(path, line, "construction in a message", match[0])


def read_messages(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of strings in calls that print, log or raise."""
    for node in ast.walk(ast.parse(text)):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if called in MESSAGE_CALLS or isinstance(node, ast.Raise):
            for child in ast.walk(node):
                if isinstance(child, ast.Constant) and isinstance(child.value, str) and " " in child.value:
                    yield child.lineno, child.value


def read_template(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a Jinja template, without markup."""
    text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>", " ", text, flags=re.DOTALL)
    yield from enumerate(text.splitlines(), 1)


def find_names(path: str, text: str) -> Iterator[Finding]:
    """Yield functions that are not named by a verb, loops over `each`, and long bodies without a break."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "each":
            yield Finding(path, node.lineno, "loop over each", "each")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue

        name = node.name.strip("_")
        first = name.split("_")[0]
        if not node.name.startswith(("__", "test_")):
            is_participle = first.endswith("ed") and len(first) > 4 and first not in VERBS_IN_ED
            if is_participle or first in NOT_VERBS:
                yield Finding(path, node.lineno, "participle function", node.name)
            if name == "of" or name.endswith("_of") or name.startswith("of_"):
                yield Finding(path, node.lineno, "of function", node.name)

        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body and _count_longest_run(lines[body[0].lineno - 1 : node.end_lineno]) > LONGEST_RUN:
            yield Finding(path, node.lineno, "run of more than 15 lines", node.name)


def find_repeated_classes(classes: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the classes whose name an earlier file has used."""
    first: dict[str, str] = {}
    for found in classes:
        if first.setdefault(found.text, found.path) != found.path:
            yield found


def find_public_classes(path: str, text: str) -> Iterator[Finding]:
    """Yield the public classes of a module."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield Finding(path, node.lineno, "class name used twice", node.name)


def _count_longest_run(lines: Sequence[str]) -> int:
    """Return the length of the longest run of lines without a blank line or a comment."""
    longest = run = 0
    for line in lines:
        is_break = not line.strip() or line.strip().startswith("#")
        run = 0 if is_break else run + 1
        longest = max(longest, run)
    return longest


def find_all(area: Area) -> Iterator[Finding]:
    """Yield the findings in the tracked files of an area."""
    command = ("git", "ls-files", *area.paths)
    classes: list[Finding] = []
    for path in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if path.endswith("_pb2.py") or not path.endswith((".py", ".md", ".jinja", ".html")):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith((".py", ".md")):
            yield from find_constructions(path, text)
        if not path.endswith(".md") and path.startswith("skyrl_tx/"):
            yield from find_messages(path, text)
            classes += find_public_classes(path, text) if path.endswith(".py") else ()
        if path.endswith(".py") and area.names is not None:
            yield from find_names(path, text)
    yield from find_repeated_classes(classes)


def compare(title: str, area: Area, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each count that differs from the budget."""
    budgets = {"construction": area.constructions, "construction in a message": area.messages, **(area.names or {})}
    for kind in sorted(budgets.keys() | counts.keys()):
        count, budget = counts.get(kind, 0), budgets.get(kind, 0)
        if count > budget:
            yield f"{title}: {kind}: {count} findings, and the budget is {budget}: rewrite the new ones (see --list)"
        elif count < budget:
            yield f"{title}: {kind}: {count} findings: lower the budget from {budget} in tests/repo/style.py"


def main(arguments: Sequence[str]) -> int:
    """Print what differs from the budgets, or all findings with `--list`; return 1 if something differs."""
    problems: list[str] = []
    for title, area in AREAS.items():
        found = list(find_all(area))
        if "--list" in arguments:
            print(*found, sep="\n")
        problems += compare(title, area, Counter(finding.kind for finding in found))
    print(*problems, sep="\n") if problems else print("style: within the budgets")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
