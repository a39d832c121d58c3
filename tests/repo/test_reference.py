"""The committed reference pages equal the pages that the generator makes from the code."""

import re
from pathlib import Path

import pytest
import yaml

from docs import example_config, which_model
from docs.generate_reference import generate
from skyrl_tx.backends.jax.config import JaxFlags
from skyrl_tx.backends.registry import find_backend
from skyrl_tx.compose import APP_SETTINGS
from skyrl_tx.launch.settings import list_short_flags, make_settings_class
from skyrl_tx.tools.serve import read_settings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("endpoints.md", "losses.md", "metrics.md", "models.md", "python_api.md", "recipes.md", "settings.md")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generate()


@pytest.mark.parametrize("page", PAGES)
def test_the_committed_page_equals_the_generated_one(pages: dict[str, str], page: str) -> None:
    committed = (DOCS / "reference" / page).read_text()
    assert committed == pages[page], f"docs/reference/{page} is out of date: run make reference and commit it"


def test_the_tests_run_every_program_of_the_cookbook_that_a_page_names(pages: dict[str, str]) -> None:
    named = set(re.findall(r"python -m tinker_cookbook\.([\w.]+)", pages["recipes.md"]))
    tests = "".join(path.read_text() for path in (DOCS.parent / "tests" / "recipes").glob("test_*.py"))
    assert len(named) > 20
    assert [
        name for name in named if f'"{name}"' not in tests and f'"{name.removeprefix("recipes.")}"' not in tests
    ] == []


def test_every_page_is_generated(pages: dict[str, str]) -> None:
    assert sorted(path.name for path in (DOCS / "reference").glob("*.md")) == sorted(pages) == sorted(PAGES)


def test_the_committed_example_of_a_configuration_equals_the_generated_one() -> None:
    assert example_config.PATH.read_text() == example_config.example_config(), "run make reference and commit the file"


def test_the_example_sets_the_model_only() -> None:
    settings = read_settings("serve", ["--config", str(example_config.PATH)])
    defaults = read_settings("serve", ["--base-model", settings.base_model])
    assert settings.model_dump(exclude={"config"}) == defaults.model_dump(exclude={"config"})


def test_every_setting_of_the_example_is_valid_and_the_default(tmp_path: Path) -> None:
    """With all settings uncommented, the file sets everything and changes nothing."""
    text = re.sub(r"^( *)#(\w)", r"\1\2", example_config.PATH.read_text(), flags=re.MULTILINE)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    content = yaml.safe_load(text)
    known = set(make_settings_class(find_backend("jax"), {}, apps=APP_SETTINGS).model_fields) - {
        "config",
        "sampler_config",
    }
    known -= set(list_short_flags())
    assert set(content) == known and set(content["backend_config"]) == set(JaxFlags.model_fields)

    settings = read_settings("serve", ["--config", str(file)])
    defaults = read_settings("serve", ["--base-model", settings.base_model])
    depends = {"config", "data_dir", "backend_config"}
    assert settings.model_dump(exclude=depends) == defaults.model_dump(exclude=depends)
    for name, value in defaults.backend_config:
        if name != "compile_cache_dir":
            assert getattr(settings.backend_config, name) == value, name


@pytest.mark.parametrize(
    ("model", "num_rows"),
    [
        ("Qwen/Qwen3-8B", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("Qwen/Qwen3-30B-A3B", 3), ("Qwen/Qwen3.5-4B", 6))),
    ],
)
def test_the_rows_of_a_model_and_its_gpus_are_current(model: str, num_rows: int) -> None:
    page = which_model.PATH.read_text()
    plans = which_model.make_plans([model])
    rows = [which_model.overview_row(plans), *which_model.detail_rows(plans)]
    assert len(rows) == num_rows, "the overview, and each GPU that it fits on"
    for row in rows:
        assert f"| {' | '.join(row)} |" in page, "docs/guides/which_model.md is out of date: run make reference"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_tables_of_models_and_gpus_are_current() -> None:
    """Some plans trace large models, so this takes minutes."""
    page = which_model.PATH.read_text()
    expected = "\n\n".join(which_model.tables())
    found = page.partition(which_model.BEGIN)[2].partition(which_model.END)[0].strip()
    assert found == expected, "docs/guides/which_model.md is out of date: run make reference"
