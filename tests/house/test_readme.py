"""The README names everything a user can ask for."""

import re
from pathlib import Path

import pytest

from skyrl_tx.api.app import create_app
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.backends.jax import BACKEND
from skyrl_tx.losses import LOSSES
from skyrl_tx.models import FAMILIES
from skyrl_tx.settings import settings_class
from skyrl_tx.store.database import Store

README = (Path(__file__).parents[2] / "README.md").read_text()
SETTINGS = sorted(set(settings_class(BACKEND, {}).model_fields) - {"backend_config"})


def flag(name: str) -> str:
    return name.replace("_", "-")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_flag(name: str) -> None:
    assert f"`--{flag(name)}`" in README


@pytest.mark.parametrize("name", BACKEND.config.model_fields)
def test_every_flag_of_the_jax_backend(name: str) -> None:
    assert f"--backend-config.{flag(name)}`" in README or f"`.{flag(name)}`" in README


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_defaults(name: str) -> None:
    row = next((line for line in README.splitlines() if line.startswith(f"| `{name}`")), None)
    assert row is not None
    for key, default in LOSSES[name].spec.config.items():
        assert f"`{key}` {default}" in row


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family(architecture: str) -> None:
    assert f"`{architecture}`" in README


def test_every_route_and_no_other(tmp_path: Path) -> None:
    store = Store.open(tmp_path, role="api")
    try:
        paths = create_app(ApiSettings(data_dir=tmp_path, base_model="tiny"), store).openapi()["paths"]
    finally:
        store.close()
    table = README.split("| Endpoints")[1].split("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) - {"/api/v1"} == {path.removeprefix("/api/v1/") for path in paths}
