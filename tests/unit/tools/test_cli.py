"""The command line: sources of settings, their precedence, and error messages."""

import json
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl_tx import __version__
from skyrl_tx.launch.command import CommandParser
from skyrl_tx.launch.settings import SettingsError, get_default_data_dir
from skyrl_tx.tools.cli import COMMANDS, main
from skyrl_tx.tools.serve import HELP_GROUPS, add_settings, read_settings, resolve_tiny_model

ROOT = Path(__file__).parents[3]

FAKE = ["--base-model", "m", "--backend", "fake"]
VLLM = ["--sampler", "vllm", "--vllm-url", "http://a"]


@pytest.fixture(autouse=True)
def _isolated_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


def test_defaults_are_local_and_private(tmp_path: Path) -> None:
    settings = read_settings("serve", FAKE)
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.data_dir == get_default_data_dir() == tmp_path / "share" / "skyrl_tx"
    assert settings.served_model_name is None


def test_default_backend_is_jax_and_its_flags_need_no_import_of_jax() -> None:
    code = (
        "import sys; from skyrl_tx.tools.serve import read_settings; s = read_settings('serve', ['--base-model', 'm']);"
        "print(s.backend, type(s.backend_config).__name__, 'jax' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["jax", "JaxFlags", "False"]


def test_precedence_is_flags_environment_file_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "backend: fake\nport: 1\nhost: ::1\nbase_model: from-file\nbackend_config: {vocab_size: 7, eos_token_id: 3}\n"
    )
    monkeypatch.setenv("SKYRL_TX_CONFIG", str(file))
    monkeypatch.setenv("SKYRL_TX_PORT", "2")
    monkeypatch.setenv("SKYRL_TX_BASE_MODEL", "from-environment")
    monkeypatch.setenv("SKYRL_TX_BACKEND_CONFIG__EOS_TOKEN_ID", "4")
    settings = read_settings("serve", ["--port", "3", "--backend-config.slice-tokens", "5"])
    assert (settings.port, settings.base_model, settings.host) == (3, "from-environment", "::1")
    config = settings.backend_config.model_dump()
    assert (config["vocab_size"], config["eos_token_id"], config["slice_tokens"]) == (7, 4, 5)


@pytest.mark.parametrize("name", ["SKYRL_TX_BACKEND", "file"])
def test_backend_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments = ["--base-model", "m", "--backend-config.vocab-size", "9"]
    if name == "file":
        (tmp_path / "a.yaml").write_text("backend: fake\n")
        arguments += ["--config", str(tmp_path / "a.yaml")]
    else:
        monkeypatch.setenv(name, "fake")
    settings = read_settings("serve", arguments)
    assert settings.backend == "fake"
    assert settings.backend_config.model_dump()["vocab_size"] == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "fake"], "--base-model is required"),
        ([*FAKE, "--port", "many"], "--port 'many'"),
        ([*FAKE, "--port", "70000"], "--port '70000'"),
        ([*FAKE, "--backend-config.vocab-size", "x"], "--backend-config.vocab-size 'x'"),
        ([*FAKE, "--load-format", "dummy"], "--load-format"),
        ([*FAKE, "--vllm-url", "http://a"], "--vllm-url: --sampler is not set"),
        ([*FAKE, "--vllm-command", "vllm"], "--vllm-command: --sampler is not set"),
        (
            [*FAKE, *VLLM, "--sampler-config.command", "vllm"],
            "--sampler-config: command has no effect with url",
        ),
        ([*FAKE, "--sampler-fallback", "trainer"], "--sampler-fallback: --sampler is not set"),
        ([*FAKE, "--sampler-check-share", "0.5"], "--sampler-check-share: --sampler is not set"),
        (["--base-model", "m", "--backend", "nope"], "'nope' is not installed"),
        ([*FAKE, "--config", "/nowhere/a.yaml"], "/nowhere/a.yaml: No such file"),
    ],
)
def test_error_names_an_invalid_setting(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_settings("serve", arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example.org", False)),
    ],
)
def test_loopback_addresses(host: str, is_loopback: bool) -> None:
    assert read_settings("serve", [*FAKE, "--host", host]).make_api_settings().is_loopback == is_loopback


def test_no_auth_allows_any_address() -> None:
    assert read_settings("serve", [*FAKE, "--host", "0.0.0.0", "--no-auth"]).no_auth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "server.yaml: there is no setting 'prot'; did you mean port?"),
        ("backend_config: {vocab_sise: 1}\n", r"no setting 'backend_config\.vocab_sise'; did you mean vocab_size\?"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not YAML"),
    ],
)
def test_error_names_an_invalid_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_settings("serve", [*FAKE, "--config", str(file)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SKYRL_TX_PROT", "variable SKYRL_TX_PROT: there is no setting 'prot'; did you mean port"),
        (
            "SKYRL_TX_BACKEND_CONFIG__VOCAB_SISE",
            "VOCAB_SISE: there is no .*_config.vocab_sise'; did you mean vocab_size",
        ),
    ],
)
def test_error_names_an_invalid_environment_variable(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=message):
        read_settings("serve", FAKE)


def test_error_names_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_settings("serve", [*FAKE, "--prot", "1"])
    assert "--prot" in capsys.readouterr().err


def test_error_names_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server"]) == 2
    assert "'server'" in capsys.readouterr().err


def test_help_lists_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    groups = re.findall(r"^(\w+):\n((?:  .*\n)+)", page, flags=re.MULTILINE)
    assert [name for name, _ in groups] == ["run", "weights", "administration", "diagnosis"]
    assert {line.split()[0] for _, lines in groups for line in lines.splitlines()} == COMMANDS.keys()
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--backend", "fake", "--help"])
    page = capsys.readouterr().out
    for field in read_settings("serve", FAKE).__class__.model_fields:
        if field not in ("backend_config", "sampler_config", "load_format"):
            assert f"--{field.replace('_', '-')}" in page
    assert "--backend-config.vocab-size" in page and "--load-format" not in page  # a short flag of the backend jax
    assert "None" not in page


@pytest.mark.parametrize("name", COMMANDS)
def test_the_code_of_every_command_adds_arguments_and_a_function(name: str) -> None:
    parser = COMMANDS[name].make_parser(())
    assert isinstance(parser, CommandParser) and "-h, --help" in parser.format_help()
    assert all(line == line.rstrip() for line in parser.format_help().splitlines())


@pytest.mark.parametrize(
    ("old", "new"), [(("top", "--times", "1"), "status --watch"), (("stacks",), "status --stacks")]
)
def test_an_old_name_of_a_command_works_and_names_the_new_one(
    old: tuple[str, ...], new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*old, "--data-dir", str(tmp_path)]) == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == f"skyrl-tx: use `{new}` instead of `{old[0]}`, which release 0.4 removes"
    assert error.startswith(f"skyrl-tx status: --data-dir {tmp_path}: no server")


def test_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "skyrl_tx", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"skyrl-tx {__version__}\n"


def extra_packages(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=\[]", requirement)[0] for requirement in project["optional-dependencies"][name]]


@pytest.mark.parametrize(
    ("name", "architecture"), [("tiny", "Qwen3ForCausalLM"), ("tiny-qwen3_5", "Qwen3_5ForCausalLM")]
)
def test_built_in_models_are_written_and_served_by_their_names(tmp_path: Path, name: str, architecture: str) -> None:
    settings = resolve_tiny_model(read_settings("serve", ["--base-model", name, "--data-dir", str(tmp_path / "data")]))
    assert settings.served_model_name == name and settings.base_model == str(tmp_path / "data" / "models" / name)
    assert json.loads((Path(settings.base_model) / "config.json").read_text())["architectures"] == [architecture]


@pytest.mark.parametrize("package", extra_packages("quickstart"))
def test_quickstart_names_its_extra(package: str) -> None:
    hidden = f"import sys; sys.modules['{package}'] = None"
    code = f"{hidden}; from skyrl_tx.tools.cli import main; sys.exit(main(['quickstart']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"skyrl-tx quickstart: {package} is not installed: pip install 'skyrl-tx-server[quickstart]'\n"
    )


def test_a_model_may_be_given_without_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []
    monkeypatch.setattr("skyrl_tx.tools.serve._run_server", lambda _, settings: served.append(settings.base_model))
    assert main(["serve", "Qwen/Qwen3-0.6B", "--backend", "fake"]) == 0
    assert main(["serve", "a", "--base-model", "a", "--backend", "fake"]) == 0
    assert served == ["Qwen/Qwen3-0.6B", "a"]
    assert main(["serve", "a", "--base-model", "b", "--backend", "fake"]) == 2
    assert "MODEL a: --base-model b names another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["serve", "--backend", "fake", "--prot", "80"], "did you mean --port?"),
        (["keys", "create", "ann", "--admn"], "did you mean --admin?"),
    ],
)
def test_misspelt_words_get_a_suggestion(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(words) == 2
    assert hint in capsys.readouterr().err


def test_help_of_serve_is_grouped_and_has_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve", "--backend", "fake", "--help"], ["help", "serve"]):
        with pytest.raises(SystemExit):
            main(words)
        shown = capsys.readouterr().out
        titles = re.findall(r"^(\w[\w -]*):$", shown, re.MULTILINE)
        assert titles[:3] == ["common options", "clients", "network"] and "options" not in titles
        assert "--max-request-bytes SIZE" in shown and "(default: 256.0 MiB)" in shown and "(default: 7d)" in shown
        assert not re.search(r"SecretStr|list\[|default: (None|False|\[\])", shown)


def test_every_flag_in_a_group_of_the_help_exists() -> None:
    parser = CommandParser(["--sampler", "vllm"])
    add_settings(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert [flag for flags in HELP_GROUPS.values() for flag in flags if flag not in known] == []
