"""Settings removed since the last release are accepted and ignored with a warning."""

from pathlib import Path

import pytest

from skyrl_tx.launch.removed_settings import _REMOVED
from skyrl_tx.launch.settings import SettingsError, has_setting
from skyrl_tx.tools.serve import read_settings

JAX = ["--base-model", "m"]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "upgrading.md"


@pytest.fixture(autouse=True)
def _isolated_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


@pytest.mark.parametrize("source", ["flag", "flag with =", "environment", "file"])
@pytest.mark.parametrize("name", ["max_attempts", "hosts.silence_s", "backend_config.prefill_tokens"])
def test_a_removed_setting_is_ignored_with_a_warning(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, arguments = f"--{name.replace('_', '-')}", list(JAX)
    match source:
        case "flag":
            arguments += [flag, "7"]
        case "flag with =":
            arguments += [f"{flag}=7"]
        case "environment":
            monkeypatch.setenv(f"SKYRL_TX_{name.replace('.', '__').upper()}", "7")
        case _:
            first, _, second = name.partition(".")
            (tmp_path / "a.yaml").write_text(f"{first}: {{{second}: 7}}\n" if second else f"{first}: 7\n")
            arguments += ["--config", str(tmp_path / "a.yaml")]
    settings = read_settings("serve", arguments)

    assert capsys.readouterr().err == (
        f"skyrl-tx serve: warning: {flag} no longer exists and is ignored: {_REMOVED[name]}\n"
    )
    assert settings.model_dump(exclude={"config"}) == read_settings("serve", JAX).model_dump(exclude={"config"})


def test_a_switch_has_no_value_and_flags_after_it_count(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-backend-config.async-decoding", "--port", "3", "--backend-config.compile-threads", "0", "--fresh"]
    settings = read_settings("serve", [*JAX, *flags])
    assert settings.port == 3 and settings.fresh
    assert capsys.readouterr().err.count("warning") == 2


def test_a_setting_that_another_backend_has_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings("serve", [*JAX, "--backend", "fake", "--backend-config.max-pass-tokens", "9"])
    assert settings.backend_config.model_dump()["max_pass_tokens"] == 9
    assert not capsys.readouterr().err


def test_no_removed_setting_exists_and_each_is_in_the_guide() -> None:
    settings = type(read_settings("serve", [*JAX, "--sampler", "vllm"]))
    assert not [name for name in _REMOVED if has_setting(settings, name)]
    page = GUIDE.read_text()
    assert not [name for name in _REMOVED if f"| `--{name.replace('_', '-')}` |" not in page]


def test_a_name_that_never_was_a_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TX_HOSTS__NOISE", "1")
    with pytest.raises(SettingsError, match=r"variable SKYRL_TX_HOSTS__NOISE: there is no setting 'hosts\.noise'"):
        read_settings("serve", JAX)
