"""The extra `testing`: what backend authors need to use `skyrl_tx.testing` in their own projects."""

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
TESTING = ROOT / "skyrl_tx" / "testing"


def find_imports() -> Iterator[str]:
    """Yield the name of each package outside Python that a module of `skyrl_tx.testing` imports."""
    for path in TESTING.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from (name.partition(".")[0] for name in names)


def test_the_extra_has_every_import_of_the_test_kit():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["testing"]]
    installed = {canonicalize_name(Requirement(text).name) for text in requirements}
    imported = {canonicalize_name(name) for name in set(find_imports()) - sys.stdlib_module_names - {"skyrl_tx"}}
    assert "pytest" in imported and imported <= installed


def test_without_pytest_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    expected = re.escape("pytest is not installed: pip install 'skyrl-tx-server[testing]'")
    with pytest.raises(ModuleNotFoundError, match=expected):
        runpy.run_path(str(TESTING / "backend_suite.py"))
