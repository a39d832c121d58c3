"""The metadata of the distributions: licences, the description on PyPI, the citation, and tested versions."""

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from skyrl_tx import DISTRIBUTION, __version__
from tests.support.fetch_vendored import VENDOR, packages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "skyrl_tx"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Licences


def find_other_licences() -> dict[str, str]:
    """Return the licence of each directory of the package that has files of another project."""
    vendored = {f"{(VENDOR / found['directory']).relative_to(ROOT)}/": found["license"] for found in packages()}
    return vendored | {"skyrl_tx/tools/quickstart/": "MIT"}


def test_metadata_names_every_licence_and_has_its_text() -> None:
    assert set(PROJECT["license"].split(" AND ")) == {"Apache-2.0", *find_other_licences().values()}
    assert f'image.licenses="{PROJECT["license"]}"' in (ROOT / "Dockerfile").read_text()

    texts = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    assert {f"{path.parent.relative_to(ROOT)}/" for path in texts} == {"./", *find_other_licences()}
    assert texts == {ROOT / "LICENSE", *(path for path in PACKAGE.rglob("*") if path.name.startswith("LICENSE"))}


def test_the_files_of_every_other_project_are_named() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(skyrl_tx/\S+?/)(?:[\w.]+)?` \|.*\| ([\w.-]+) \|$", text, re.MULTILINE)
    assert dict(rows) == find_other_licences()
    for found in packages():
        major = re.match(r"\d+", found["version"])
        assert major and re.search(rf"{found['directory']}\S*\) {major[0]}", text, re.IGNORECASE)


# Description and citation


def test_links_of_the_description_work_on_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    runpy.run_path(str(ROOT / "setup.py"))
    assert "readme" in PROJECT["dynamic"] and given["long_description_content_type"] == "text/markdown"

    links = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", given["long_description"])
    assert [link for _, link in links if not link.startswith(("https://", "#"))] == []
    source, tag = PROJECT["urls"]["Source"], f"v{__version__}"
    folders = {"": f"{source}/blob/{tag}/", "!": f"{source.replace('github', 'raw.githubusercontent')}/{tag}/"}
    files = [(image, link.removeprefix(folders[image])) for image, link in links if f"/{tag}/" in link]
    assert {image for image, _ in files} == {"", "!"}
    assert [path for _, path in files if not (ROOT / path.partition("#")[0]).is_file()] == []


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["repository-code"] == PROJECT["urls"]["Source"]
    assert f"\n## {__version__} - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()


# Tested versions


def read_constraints() -> dict[str, Version]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def test_constraints_have_a_version_of_every_dependency_within_its_bounds() -> None:
    """Devices, Ray and tools of developers are left out: the environment in which the tests pass lacks them."""
    constraints, extras = read_constraints(), PROJECT["optional-dependencies"]
    tested = extras.keys() - {"cuda12", "cuda13", "tpu", "ray", "torch", "lint", "docs", "dev"}
    lines = [*PROJECT["dependencies"], *(line for extra in tested for line in extras[extra])]
    requirements = [found for found in map(Requirement, lines) if found.name != DISTRIBUTION]
    assert {found.name for found in requirements if canonicalize_name(found.name) not in constraints} == set()
    outside = [found for found in requirements if constraints[canonicalize_name(found.name)] not in found.specifier]
    assert outside == []


def test_the_image_is_built_from_the_tested_versions() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^COPY .*\bconstraints\.txt ", dockerfile, re.MULTILINE)
    assert "pip install --no-cache-dir --constraint constraints.txt" in dockerfile
