"""Checks of the model and the disk before a server starts its engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.launch import data
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.tools.serve import read_settings
from tests.support.denied import deny_directory, obey_modes


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
        data.check_model_files(settings("--base-model", "x", flag, "/nope"))


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named_with_its_mode(tmp_path: Path, name: str) -> None:
    with unreadable(tmp_path / name), pytest.raises(CannotServe) as raised:
        data.check_model_files(settings("--base-model", str(tmp_path)))
    assert str(raised.value) == f"--base-model {tmp_path / name}: has mode 0000: change its mode"


def test_a_directory_that_cannot_be_entered_is_named_with_its_owner() -> None:
    with deny_directory("config.json") as (directory, reason), pytest.raises(CannotServe) as raised:
        data.check_model_files(settings("--base-model", str(directory)))
    assert str(raised.value) == f"--base-model {directory}: {reason}"


def test_names_of_the_hub_and_other_files_are_not_checked(tmp_path: Path) -> None:
    data.check_model_files(settings("--base-model", "Qwen/Qwen3-8B"))
    with unreadable(tmp_path / "notes.txt"):
        data.check_model_files(settings("--base-model", str(tmp_path)))


def test_a_nearly_full_disk_is_reported(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: SimpleNamespace(free=37 * 2**20))
    data.warn_if_disk_is_full(settings("--base-model", "x", "--data-dir", str(tmp_path / "new")))
    assert "only 37.0 MiB are free on the disk of" in caplog.text and "until there are 1.0 GiB" in caplog.text
    caplog.clear()
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 2**30))
    data.warn_if_disk_is_full(settings("--base-model", "x", "--data-dir", str(tmp_path)))
    assert caplog.text == ""
