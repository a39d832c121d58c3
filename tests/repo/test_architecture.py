"""Every path, module, class and function that the documents name exists in the tree, and so does every flag."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "docs/architecture.md", "docs/glossary.md")),
    *sorted([*ROOT.glob("docs/internals/adding_*.md"), *ROOT.glob("docs/decisions/*.md")]),
]
GUIDES = [ROOT / "README.md", ROOT / "docs/index.md", *sorted(ROOT.glob("docs/guides/*.md"))]
SOURCES = ("skyrl_tx", "tests", "benchmarks")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")
NOT_OURS = frozenset(
    {
        *(
            "--build-arg",
            "--rm",
            "--entrypoint",
            "--health-cmd",
            "--constraint",
            "SKYRL_TX_BACKEND_CONFIG__DTYPE",
            "Host",
        ),
        *(
            "--enable-lora",
            "--max-cpu-loras",
            "--max-loras",
            "--max-logprobs",
            "--max-model-len",
            "--max-num-seqs",
            "--dtype",
        ),
        *("_bytes", "_s", "num_", "async", "def", "null", "healthz", "pyproject.toml"),
        *(
            "configuration_*.py",
            "modeling_*.py",
            "lax.ragged_dot",
            "optax.adamw",
            "optax.apply_updates",
            "optax.GradientTransformation",
            "quick_check",
            "shard_map",
        ),
        *("transformers", "unembed_tokens", "wandb_name", "XLA_FLAGS"),
    }
)
"""Names of other projects, parts of names, and files outside of the package."""


@dataclass(frozen=True)
class Names:
    """The names that are defined in the tree."""

    all: set[str]
    members: dict[str, set[str]]
    """The methods, fields and bases of each class."""

    def has(self, dotted: str) -> bool:
        """Return whether `module.function`, `Class.member` or a plain name exists."""
        first, *rest = dotted.split(".")
        if first in self.members and rest:
            return any(rest[0] in self.members[name] for name in self.mro(first))
        return all(part in self.all for part in (first, *rest))

    def mro(self, name: str) -> Iterator[str]:
        """Yield a class and its base classes in this tree."""
        yield name
        for base in self.members[name] & self.members.keys():
            yield from self.mro(base)


@cache
def read_names() -> Names:
    """Read the names of all modules, classes, functions, parameters and variables, and the product's string keys."""
    names = Names(set(), {})

    for path in (path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        names.all.update(path.relative_to(ROOT).with_suffix("").parts)

        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef():
                    names.all.add(node.name)
                    members = names.members.setdefault(node.name, set())
                    members.update(base.id for base in node.bases if isinstance(base, ast.Name))
                    for child in ast.walk(node):
                        match child:
                            case ast.FunctionDef() | ast.AsyncFunctionDef():
                                members.add(child.name)
                            case ast.Name(ctx=ast.Store()):
                                members.add(child.id)
                            case _:
                                pass
                # Functions, variables, attributes and parameters.
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    names.all.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    names.all.add(node.id)
                case ast.Attribute(ctx=ast.Store()):
                    names.all.add(node.attr)
                case ast.arg() | ast.keyword():
                    names.all.add(node.arg or "")
                # String keys of the product.
                case ast.Constant(value=str() as text) if path.is_relative_to(ROOT / "skyrl_tx"):
                    if re.fullmatch(r"(--)?[a-z_][\w-]*", text):
                        names.all.add(text.removeprefix("--").replace("-", "_"))
                case _:
                    pass

    return names


def read_code_spans(page: Path) -> Iterator[str]:
    """Yield the inline code of a page. Blocks of code are examples."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def is_missing(span: str) -> bool:
    """Return whether a piece of inline code looks like one of our names, but names nothing that exists."""
    if span in NOT_OURS or "…" in span or "<" in span:
        return False
    if span.startswith("--"):
        return not read_names().has(span.removeprefix("--").split(".")[-1].split(" ")[0].replace("-", "_"))
    if "/" in span and " " not in span and not span.startswith(("/", "tinker:")):
        return not any((ROOT / prefix / span).exists() for prefix in ("", "skyrl_tx"))
    if IDENTIFIER.fullmatch(span):
        return not read_names().has(re.sub(r"\(.*\)", "", span).removesuffix(".py"))
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_name_exists(page: Path) -> None:
    assert [span for span in dict.fromkeys(read_code_spans(page)) if is_missing(span)] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_flag_exists(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if "skyrl-tx " in line or "`--" in line]
    flags = re.findall(r"(?<![\w-])--[a-z][\w.-]*", "\n".join(lines))
    assert [flag for flag in dict.fromkeys(flags) if flag not in NOT_OURS and is_missing(flag)] == []


@pytest.mark.parametrize("span", ["skyrl_tx/engine/no_such.py", "NoSuchClass", "Loss.no_such", "--no-such-flag"])
def test_missing_names_are_found(span: str) -> None:
    assert is_missing(span)


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 160
