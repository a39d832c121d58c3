"""Commands on a data directory whose artifacts are in an object store."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.cli import main


def skyrl_tx(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/objects"


@pytest.fixture
def path(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Import an adapter and return the path of its checkpoint."""
    model = write_model(tmp_path / "model", tied_embeddings=False)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    factors = {"lora_A": np.ones((2, 32), np.float32), "lora_B": np.ones((64, 2), np.float32)}
    names = {
        f"base_model.model.model.layers.0.self_attn.q_proj.{name}.weight": factor for name, factor in factors.items()
    }
    save_file(names, tmp_path / "adapter" / "adapter_model.safetensors")
    command = ("import", tmp_path / "adapter", "--name", "mine", "--base-model", model)
    status, out, err = skyrl_tx(capsys, *command, "--data-dir", tmp_path / "data", "--artifacts", url)
    assert status == 0, err
    return next(word for word in out.split() if "/weights/mine" in word)


def test_export_reads_the_object_store(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir = tmp_path / "data"
    assert not list(data_dir.glob("artifacts/art-*"))
    shutil.rmtree(data_dir / "artifact-cache")
    assert skyrl_tx(capsys, "export", path, tmp_path / "out", "--data-dir", data_dir)[0] == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    other = ("--artifacts", f"file://{tmp_path}/others")
    status, _, err = skyrl_tx(capsys, "export", path, tmp_path / "again", "--data-dir", data_dir, *other)
    assert status == 1 and f"the artifacts of {data_dir} are in file://{tmp_path}/objects" in err


def test_doctor_and_recover_read_the_object_store(path: str, url: str, tmp_path: Path, capsys) -> None:
    def doctor() -> dict:
        _, out, _ = skyrl_tx(capsys, "doctor", "--backend", "fake", "--json", "--data-dir", data_dir)
        return json.loads(out)

    data_dir = tmp_path / "data"
    found = doctor()
    assert [record["state"] for record in found["artifacts"]] == ["ok"]
    assert [finding["level"] for finding in found["findings"] if finding["check"] == "storage"] == ["ok"]
    (weights,) = (tmp_path / "objects").glob("art-*/*/adapter_model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert [record["state"] for record in doctor()["artifacts"]] == ["damaged"]
    weights.write_bytes(content)
    for database in data_dir.glob("skyrl_tx.db*"):
        database.unlink()
    status, out, err = skyrl_tx(capsys, "recover", "--data-dir", data_dir)
    assert status == 0 and path in out, err
    assert [record["state"] for record in doctor()["artifacts"]] == ["ok"]


def test_a_backup_is_refused(path: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = skyrl_tx(capsys, "backup", tmp_path / "backup", "--data-dir", tmp_path / "data")
    assert status == 1 and f"the weights are in the object store {url}, which this command does not copy" in err
    assert not (tmp_path / "backup").exists()


def test_files_are_left_to_the_server(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's engine may run on another machine, which does not see this data directory's lock."""
    status, out, _ = skyrl_tx(capsys, "checkpoints", "delete", "--now", path, "--data-dir", tmp_path / "data")
    assert status == 0 and "the server removes the unused files" in out
    assert list((tmp_path / "objects").glob("art-*/manifest.json"))
