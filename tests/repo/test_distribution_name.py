"""The name of the distribution, its extras, and all places that mention them."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from skyrl_tx import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PLACES = (
    *("skyrl_tx", "tests", "benchmarks", "examples", "docs", "deploy", ".github", ".ci"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Dockerfile", "Makefile", "pyproject.toml"),
)
SUFFIXES = frozenset({".py", ".md", ".toml", ".yml", ".yaml", ".tpl", ".txt", ".json", ".service", ".env", ""})
WITH_EXTRAS = re.compile(
    r"""(\{DISTRIBUTION\}|\bskyrl[_-]tx[\w-]*|(?<=['"])\.)\\?\[([a-z][a-z0-9]*(?:,[a-z][a-z0-9]*)*)"""
)
"""A distribution name, or the clone, with extras, for example `.[ray,cuda12]`, also in f-strings and patterns."""
WITHOUT_EXTRAS = re.compile(r"""pip install [^\n|&;#`]*?(?<=[\s'"])(skyrl[_-]tx[\w-]*)""")
BUILD_ARGUMENT = re.compile(r"EXTRA=(\w+)")


class Mention(NamedTuple):
    """A place that names the distribution, or the clone, with or without extras."""

    path: str
    name: str
    extras: frozenset[str]


def read_project(directory: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((directory / "pyproject.toml").read_text())["project"]


def read_places() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file that may tell someone how to install the project."""
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if (
                file.is_file()
                and file.suffix in SUFFIXES
                and "__pycache__" not in file.parts
                and file != Path(__file__)
            ):
                yield str(file.relative_to(ROOT)), file.read_text()


def find_mentions() -> list[Mention]:
    found: list[Mention] = []
    for path, text in read_places():
        found += [Mention(path, name, frozenset(extras.split(","))) for name, extras in WITH_EXTRAS.findall(text)]
        found += [Mention(path, name, frozenset()) for name in WITHOUT_EXTRAS.findall(text)]
        found += [Mention(path, ".", frozenset({extra})) for extra in BUILD_ARGUMENT.findall(text)]
    return found


def test_messages_have_the_name_of_the_distribution() -> None:
    assert read_project()["name"] == DISTRIBUTION


def test_the_name_is_not_the_one_of_another_project() -> None:
    """To pip, `skyrl_tx` equals `skyrl-tx`, which is another project on PyPI."""
    assert canonicalize_name(DISTRIBUTION) == DISTRIBUTION != canonicalize_name("skyrl_tx")


def test_every_mention_is_of_this_distribution_and_its_extras() -> None:
    mentions, extras = find_mentions(), read_project()["optional-dependencies"].keys()
    names = {DISTRIBUTION, "{DISTRIBUTION}", "."}
    assert [found for found in mentions if found.name not in names or not found.extras <= extras] == []

    # The search finds the expected mentions in messages, documents and deployment files.
    message_extras = {extra for found in mentions if found.name == "{DISTRIBUTION}" for extra in found.extras}
    assert message_extras >= {"cuda12", "postgres", "quickstart", "ray", "storage", "tpu", "vllm"}
    paths = {found.path for found in mentions}
    assert paths >= {"README.md", "CONTRIBUTING.md", "Dockerfile", "deploy/compose.env", "docs/index.md", ".ci/run"}
    assert paths >= {"pyproject.toml", "examples/gsm8k/README.md", "examples/torch_backend/README.md"}


def test_the_example_backend_and_its_extra_name_each_other() -> None:
    project, example = read_project(), read_project(ROOT / "examples" / "torch_backend")
    (extra,) = map(Requirement, project["optional-dependencies"]["torch"])
    assert extra.name == example["name"] == f"{DISTRIBUTION}-torch"
    assert extra.specifier.contains(example["version"])
    assert DISTRIBUTION in {Requirement(text).name for text in example["dependencies"]}


def test_images_have_the_name_of_the_command() -> None:
    """The image is built from the clone and has the name that the chart and the Compose files expect."""
    project, deploy = read_project(), ROOT / "deploy"
    (command,) = project["scripts"]
    built = set(re.findall(r"docker build -t (\S+)", (ROOT / "Dockerfile").read_text()))
    chart = yaml.safe_load((deploy / "helm" / "skyrl-tx" / "values.yaml").read_text())["image"]["repository"]
    composed = {
        name
        for file in ("compose.yaml", "compose.engines.yaml")
        for name in re.findall(r"image: (?:&\w+ )?(skyrl\S*):\$", (deploy / file).read_text())
    }
    assert built == {chart} == composed == {command}
