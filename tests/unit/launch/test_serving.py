"""Checks of settings, model and disk before a server starts its engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.compose import APPS
from skyrl_tx.launch import serving
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.tools.serve import read_settings
from tests.support.denied import deny_directory, obey_modes

HOSTS = ("--base-model", "fake", "--backend", "fake", "--hosts.size", "2")


def settings(*flags: str) -> ServerSettings:
    return read_settings("serve", ["--backend", "fake", *flags])


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    file.touch()
    file.chmod(0o000)
    with obey_modes():
        yield


@pytest.mark.parametrize("flag", ["--base-model", "--tokenizer-id"])
def test_a_model_that_does_not_exist_is_refused_by_the_parent(flag: str) -> None:
    with pytest.raises(CannotServe, match=rf"^{flag} /nope: no such directory$"):
        serving.check_model_files(settings("--base-model", "x", flag, "/nope"))


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named_with_its_mode(tmp_path: Path, name: str) -> None:
    with unreadable(tmp_path / name), pytest.raises(CannotServe) as raised:
        serving.check_model_files(settings("--base-model", str(tmp_path)))
    assert str(raised.value) == f"--base-model {tmp_path / name}: has mode 0000: change its mode"


def test_a_directory_that_cannot_be_entered_is_named_with_its_owner() -> None:
    with deny_directory("config.json") as (directory, reason), pytest.raises(CannotServe) as raised:
        serving.check_model_files(settings("--base-model", str(directory)))
    assert str(raised.value) == f"--base-model {directory}: {reason}"


def test_names_of_the_hub_and_other_files_are_not_checked(tmp_path: Path) -> None:
    serving.check_model_files(settings("--base-model", "Qwen/Qwen3-8B"))
    with unreadable(tmp_path / "notes.txt"):
        serving.check_model_files(settings("--base-model", str(tmp_path)))


def test_a_nearly_full_disk_is_reported(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(serving.shutil, "disk_usage", lambda _: SimpleNamespace(free=37 * 2**20))
    serving.warn_if_disk_is_full(settings("--base-model", "x", "--data-dir", str(tmp_path / "new")))
    assert "only 37.0 MiB are free on the disk of" in caplog.text and "until there are 1.0 GiB" in caplog.text
    caplog.clear()
    monkeypatch.setattr(serving.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 2**30))
    serving.warn_if_disk_is_full(settings("--base-model", "x", "--data-dir", str(tmp_path)))
    assert caplog.text == ""


def test_only_rank_0_serves(tmp_path):
    address = ("--hosts.address", "host0:7700", "--hosts.key", "secret")
    flags = (*HOSTS, "--data-dir", str(tmp_path), "--hosts.rank", "1", *address)
    with pytest.raises(CannotServe, match=r"host 1 of 2 serves no API: run `skyrl-tx engine` here"):
        serving.serve(read_settings("serve", flags), APPS)


def test_only_an_engine_alone_has_a_metrics_port(tmp_path):
    flags = ("--base-model", "fake", "--backend", "fake", "--data-dir", str(tmp_path), "--metrics-port", "9100")
    refusal = "--metrics-port is for an engine alone: `skyrl-tx engine` on its own machine"
    with pytest.raises(CannotServe, match=refusal):
        serving.serve(read_settings("serve", (*flags, "--port", "0")), APPS)
    with pytest.raises(CannotServe, match=refusal):
        serving.serve_engine(read_settings("engine", (*flags, "--launcher", "ray")), APPS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"\xff", "not a text in UTF-8"),
        (b"{{ messages }}\n{% if %}", "the chat template is malformed: line 2: Expected an expression"),
    ],
)
@pytest.mark.parametrize("serve", [serving.serve, serving.serve_api])
def test_a_chat_template_that_cannot_be_used_is_refused(tmp_path, serve, content, reason):
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content)
    flags = ("--base-model", "fake", "--backend", "fake", "--data-dir", str(tmp_path / "data"))
    settings = read_settings("serve", (*flags, "--port", "0", "--chat-template", str(template)))
    with pytest.raises(CannotServe, match=rf"^--chat-template {template}: {reason}"):
        serve(settings, APPS)
    assert not settings.data_dir.exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_sampler_with_several_hosts_is_refused_with_the_reason(tmp_path, rank):
    flags = (*HOSTS, "--data-dir", str(tmp_path), "--hosts.rank", rank, "--hosts.address", "127.0.0.1:7700")
    flags += ("--sampler", "vllm", "--vllm-url", "http://a:1")
    reason = r"--sampler vllm: it cannot be used with --hosts.size 2: every host repeats each backend call"
    with pytest.raises(CannotServe, match=reason):
        serving.make_engine_launch(read_settings("engine", flags))


def test_hosts_without_an_address_and_a_launcher_without_its_variables_are_named(tmp_path, monkeypatch):
    with pytest.raises(CannotServe, match=r"--hosts.address is required with hosts.size"):
        serving.make_engine_launch(read_settings("serve", (*HOSTS, "--data-dir", str(tmp_path))))
    monkeypatch.delenv("LWS_GROUP_SIZE", raising=False)
    with pytest.raises(CannotServe, match=r"--launcher lws: the environment lacks LWS_GROUP_SIZE"):
        serving.make_engine_launch(read_settings("serve", (*HOSTS, "--data-dir", str(tmp_path), "--launcher", "lws")))
