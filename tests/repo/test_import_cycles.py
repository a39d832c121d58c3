"""No module of the product imports itself through other modules."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def read_imports(package: Path) -> dict[str, set[str]]:
    """Return the modules of the same package that each module imports when it is loaded."""
    sources = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in package.rglob("*.py")
    }
    imports: dict[str, set[str]] = {name: set() for name in sources}

    for name, source in sources.items():
        for node in ast.parse(source).body:  # an import inside a function is not part of loading
            if isinstance(node, ast.Import):
                imports[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports[name].update(
                    full if (full := f"{node.module}.{alias.name}") in sources else node.module for alias in node.names
                )
    return {name: imported & sources.keys() - {name} for name, imported in imports.items()}


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert find_cycle(read_imports(ROOT / "skyrl_tx")) == []


@pytest.mark.parametrize("last", ["a", "c"])
def test_a_cycle_is_found(tmp_path: Path, last: str) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "a.py").write_text("from p import b\n")
    (package / "b.py").write_text(f"from p.{last} import x\n")
    (package / "c.py").write_text("import p.a\nx = 1\n")
    assert set(find_cycle(read_imports(package))) == {"p.a", "p.b"} | {f"p.{last}"}
