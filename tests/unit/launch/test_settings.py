"""Settings that installed backends, samplers, launchers and apps add."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import BaseModel

from skyrl_tx.apps.teams.prices import Prices, TeamsSettings
from skyrl_tx.backends import registry
from skyrl_tx.backends.registry import find_backend
from skyrl_tx.launch import serving
from skyrl_tx.launch import settings as settings_module
from skyrl_tx.launch.launcher import EngineStarts, LauncherSpec
from skyrl_tx.launch.settings import SettingsError, list_short_flags
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.tools.serve import read_settings

FAKE = ["--base-model", "m", "--backend", "fake"]


class OwnConfig(BaseModel):
    """Settings of a launcher in another package."""

    queue: str = "default"


@contextmanager
def start_engines(config: OwnConfig, launch: object, num_engines: int) -> Generator[EngineStarts]:
    raise CannotServe(f"queue {config.queue} takes no {num_engines} engines")
    yield []


LAUNCHER = LauncherSpec(config=OwnConfig, load=lambda: start_engines)


@pytest.fixture
def own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the launcher `slurm`."""
    installed = registry.entry_points

    def with_own(*, group: str) -> Sequence[EntryPoint]:
        own = EntryPoint("slurm", f"{__name__}:LAUNCHER", group)
        return [*installed(group=group), *([own] if group == "skyrl_tx.launchers" else [])]

    original = EntryPoint.load

    def load(entry: EntryPoint) -> object:
        return LAUNCHER if entry.name == "slurm" else original(entry)

    monkeypatch.setattr(registry, "entry_points", with_own)
    monkeypatch.setattr(EntryPoint, "load", load)


@pytest.mark.usefixtures("own_launcher")
def test_a_launcher_of_another_package_has_flags_and_starts_the_engines(tmp_path: Path) -> None:
    flags = [*FAKE, "--launcher", "slurm", "--slurm.queue", "gpu", "--data-dir", str(tmp_path), "--port", "0"]
    settings = read_settings("serve", flags)
    assert settings.has_remote_engines
    with pytest.raises(CannotServe, match="queue gpu takes no 1 engines"):
        serving.serve(settings, [])


def test_an_unknown_launcher_is_named() -> None:
    with pytest.raises(SettingsError, match="--launcher: launcher 'slurm' is not installed; installed are: ray"):
        read_settings("serve", [*FAKE, "--launcher", "slurm"])


def test_short_names_come_from_specs() -> None:
    found = {name: (short.kind, short.field) for name, short in list_short_flags().items()}
    expected = {"load_format": ("backend", "load_format"), "vllm_url": ("sampler", "url")}
    assert found == {**expected, "vllm_command": ("sampler", "command")}


def test_a_short_name_of_a_missing_field_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(find_backend("fake"), flags={"size": "num_rows"})
    monkeypatch.setattr(settings_module, "list_specs", lambda group, *_: {"fake": wrong} if "backend" in group else {})
    problems: list[str] = []
    assert list_short_flags(lambda error: problems.append(str(error))) == {}
    assert problems == ["flags['size']: FakeConfig has no field 'num_rows'"]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_short_names_work_in_each_source(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*FAKE, "--sampler", "vllm"]
    if source == "flag":
        arguments += ["--vllm-url", "http://a"]
    elif source == "environment":
        monkeypatch.setenv("SKYRL_TX_VLLM_URL", "http://a")
    else:
        (tmp_path / "a.yaml").write_text("vllm_url: http://a\n")
        arguments += ["--config", str(tmp_path / "a.yaml")]
    config = read_settings("serve", arguments).sampler_config
    assert config is not None and config.model_dump()["url"] == "http://a"


def test_settings_of_apps_reach_the_api() -> None:
    settings = read_settings("serve", [*FAKE, "--prices.training", "1.5"])
    assert settings.make_api_settings().get_app_settings(TeamsSettings).prices == Prices(training=1.5)
    assert read_settings("serve", FAKE).make_api_settings().get_app_settings(TeamsSettings).prices == Prices()
