"""Check docstring openings, Markdown table cells and links. `style.py` counts constructions and names.

Run as `python tests/repo/prose.py [PATH ...]`; without a path it checks the whole tree.
The exit status is 1 if there is a finding.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = (
    *("skyrl_tx", "tests", "benchmarks", "examples", "docs", ".github", ".ci"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"),
    *("Dockerfile", "Makefile", "mkdocs.yml", "pyproject.toml", ".pre-commit-config.yaml"),
)
SUFFIXES = frozenset({".py", ".md", ".toml", ".yml", ".yaml", ".mako", ".sh", ""})
SKIPPED_FILES = re.compile(r"_pb2\.py$|(^|/)tests/repo/(test_)?prose\.py$|(^|/)(LICENSE|py\.typed|__pycache__/)")
"""Generated files, licences, and this checker with its test."""

DOCSTRING_OPENINGS = re.compile(r"(What|Who|Whom|Whose|Where|Of|That)\b")
"""First words that would make a clause the subject of a docstring, instead of a thing or an action."""

MOST_CELL_CHARACTERS = 160

_LINK_TARGET = re.compile(r"\]\([^)]*\)")


def find_long_cells(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each Markdown table cell that is too long; link targets do not count."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if in_code or not line.lstrip().startswith("|"):
            continue
        longest = max(len(_LINK_TARGET.sub("]", cell).strip()) for cell in re.split(r"(?<!\\)\|", line))
        if longest > MOST_CELL_CHARACTERS:
            yield number, f"table cell of {longest} characters, at most {MOST_CELL_CHARACTERS}"


def find_broken_links(text: str, directory: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each relative Markdown link from `directory` whose file does not exist."""
    for number, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)#?\s]+)[^)]*\)", line):
            if not re.match(r"[a-z]+:", target) and not (directory / target).exists():
                yield number, f"link to {target}, which does not exist"


def check_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message of each docstring, attribute docstrings included, with a poor first line."""
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if not isinstance(statement.value.value, str):
                continue
            first = statement.value.value.strip().split("\n", 1)[0]
            if DOCSTRING_OPENINGS.match(first):
                yield (
                    statement.lineno,
                    f"docstring starts with {first.split()[0]!r}: name the thing or the action first",
                )
            if not first.endswith((".", ":")):
                yield statement.lineno, "first line of a docstring is not a sentence that ends with a period"


def check_file(path: Path) -> Iterator[str]:
    """Yield each finding of one file as PATH:LINE: MESSAGE."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []
    if path.suffix == ".md":
        found += [*find_long_cells(text), *find_broken_links(text, path.parent)]
    if path.suffix == ".py":
        found += check_docstrings(text)
    for number, message in sorted(found):
        yield f"{name}:{number}: {message}"


def list_files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files to check in `paths`, directories recursively."""
    for path in paths:
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in candidates:
            checked = file.is_file() and file.suffix in SUFFIXES
            if checked and not SKIPPED_FILES.search(file.relative_to(ROOT).as_posix()):
                yield file


def main(arguments: list[str]) -> int:
    """Print all findings; return 1 if there is one."""
    paths = [Path(argument).resolve() for argument in arguments] or [ROOT / name for name in TREE]
    lines = [line for file in list_files([path for path in paths if path.exists()]) for line in check_file(file)]
    print(*lines, sep="\n") if lines else print("prose: no findings")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
