"""The reference page of the Python API for backend authors, generated from the docstrings.

The source is read without importing it, because only the source has the docstrings of fields.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from docs import reference_text

ROOT = Path(__file__).parents[1]
PACKAGES = ("skyrl_tx.contract", "skyrl_tx.testing")
SECTIONS: Mapping[str, Sequence[str]] = {
    "Backends": ("contract.backend", "contract.capabilities", "contract.errors", "contract.meters"),
    "Inputs and results": ("contract.batches", "contract.results", "contract.requests", "contract.ids"),
    "Losses": ("contract.losses", "contract.loss_reference", "contract.custom_loss"),
    "Helpers for backends": (
        *("contract.passes", "contract.samples", "contract.logit_adjuster", "contract.constraints"),
        *("contract.state_files", "contract.arrays"),
    ),
    "Samplers": ("contract.sampler",),
    "Tests": ("testing.backend_suite", "testing.loss_checks", "testing.backend_driver", "testing.tiny_models"),
}
LEFT_OUT = frozenset({"contract.codec", "contract.numbers", "testing.sampling_checks", "testing.state_checks"})
"""Modules that no backend author calls: the encoding of stored requests, and classes that have nothing but tests."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_api_page() -> Iterator[str]:
    """Yield the page of all public modules, by purpose."""
    yield "# Python API for backends"
    yield reference_text.PYTHON_API_INTRO
    listed = {name for names in SECTIONS.values() for name in names} | LEFT_OUT
    existing = {f"{path.parent.name}.{path.stem}" for path in _module_paths()}
    assert listed == existing, f"modules that are in no section, or do not exist: {sorted(listed ^ existing)}"

    for title, names in SECTIONS.items():
        yield f"## {title}"
        for name in names:
            yield from _describe_module(name)


def _module_paths() -> Iterator[Path]:
    for package in PACKAGES:
        directory = ROOT / package.replace(".", "/")
        yield from (path for path in directory.glob("*.py") if path.stem != "__init__")


def _describe_module(name: str) -> Iterator[str]:
    path = ROOT / "skyrl_tx" / (name.replace(".", "/") + ".py")
    module = ast.parse(path.read_text(encoding="utf-8"))
    yield f"### `skyrl_tx.{name}`"
    yield _render(ast.get_docstring(module))

    # Constants and functions first, because they are short
    lines = [*_describe_values(module.body, documented_only=True)]
    lines += [_describe_function(node) for node in module.body if _is_public_function(node)]
    if lines:
        yield "\n".join(lines)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _describe_class(node)


def _describe_class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases if ast.unparse(base) != "ABC")
    yield f"#### `{node.name}`"
    text = _render(ast.get_docstring(node))
    yield f"Base: {bases}.\n\n{text}" if bases else text

    methods = [child for child in node.body if _is_public_function(child)]
    lines = [*_describe_values(node.body), *map(_describe_function, methods)]
    if lines:
        yield "\n".join(lines)


def _describe_values(body: Sequence[ast.stmt], *, documented_only: bool = False) -> Iterator[str]:
    """Yield a list item for each public constant or field, with the docstring that follows it."""
    for node, following in zip(body, [*body[1:], None], strict=True):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(name, ast.Name) and not name.id.startswith("_") for name in names):
            continue

        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        if text or not documented_only:
            yield _list_item(_value_signature(node), text)


def _value_signature(node: ast.stmt) -> str:
    """Return the source of a constant or field; long values are left out."""
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    if isinstance(node, ast.AnnAssign):
        signature = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    else:
        signature = ast.unparse(node.targets[0])
    value = "" if node.value is None else ast.unparse(node.value)
    return f"{signature} = {value}" if value and len(value) <= 44 and "field(" not in value else signature


def _is_public_function(node: ast.stmt) -> bool:
    """Whether a function belongs on the page: no test, no fixture, and no override that only refers to its base."""
    if not isinstance(node, _Function):
        return False
    if node.name.startswith(("_", "test_")) and node.name not in ("__init__", "__len__"):
        return False
    is_fixture = any("pytest.fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    return not is_fixture and bool(text := ast.get_docstring(node)) and not text.startswith("See ")


def _describe_function(node: ast.stmt) -> str:
    assert isinstance(node, _Function)
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    returned = ast.unparse(node.returns) if node.returns else "None"

    # Callers do not pass the instance or the class.
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    signature = f"{node.name}: {returned}" if "property" in decorators else f"{node.name}({arguments}) -> {returned}"

    notes = [name for name in ("abstract", "property", "classmethod") if decorators & {name, f"{name}method"}]
    return _list_item(signature, ast.get_docstring(node) or "", ", ".join(notes))


def _list_item(signature: str, text: str, notes: str = "") -> str:
    """Return a list item; further paragraphs of its text are indented."""
    head = f"- `{signature}`{f' ({notes})' if notes else ''}"
    if not text:
        return head
    body = _render(text).replace("\n", "\n    ")
    body = re.sub(r"(?m)^ +$", "", body)
    return f"{head}: {body}"


def _render(text: str | None) -> str:
    """Return a docstring as Markdown: one line for each paragraph, and lists for arguments."""
    blocks: list[str] = []
    for paragraph in (text or "").split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0] == "Args:":
            blocks.append("\n".join(_argument_items(lines[1:])))
        elif paragraph.startswith("    "):
            blocks.append("```text\n" + inspect.cleandoc(paragraph) + "\n```")
        else:
            blocks.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(blocks)


def _argument_items(lines: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a docstring as list items; a deeper line continues the one before it."""
    items: list[str] = []
    for line in lines:
        if line.startswith("     "):
            items[-1] += f" {line.strip()}"
        else:
            name, _, description = line.strip().partition(":")
            items.append(f"- `{name}`: {description.strip()}")
    yield from items
