"""`skyrl-tx doctor` and `skyrl-tx recover`, on data directories that the engine wrote."""

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId, SamplingSessionId
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import StoreError, checkpoints, identity, keys, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow
from skyrl_tx.tools.cli import main
from tests.support.engine_harness import SPEC, EngineHarness, forward_backward, optim_step, sample

OLD_KEYS = ("name", "owner", "spec", "saved_at", "expires_at", "user_metadata")
"""Metadata that manifests of early releases lack."""


def skyrl_tx(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, ModelId, float]:
    """Train a run for two steps with a save after the first, and return its loss after the first step."""
    harness = EngineHarness(tmp_path / "data")
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.submit(
        SaveWeights(kind="weights", name="first", ttl_s=3600, user_metadata={"k": "v"}), model_id=model_id, seq_id=3
    )
    harness.submit(SaveWeights(kind="sampler_weights", name="first"), model_id=model_id, seq_id=4)
    loss = harness.submit(forward_backward(1, backward=False), model_id=model_id, seq_id=5)
    ephemeral = SaveWeights(
        kind="sampler_weights", name=None, sampling_session_id=SamplingSessionId(f"{harness.session_id}:sample:0")
    )
    harness.submit(ephemeral, model_id=model_id, seq_id=6)
    harness.submit(forward_backward(1), model_id=model_id, seq_id=7)
    harness.run(loss, harness.submit(optim_step(), model_id=model_id, seq_id=8))
    expected = harness.result(loss).metrics["loss:sum"]
    harness.close()
    return tmp_path / "data", model_id, expected


def doctor(capsys: pytest.CaptureFixture[str], data_dir: Path, *flags: str) -> tuple[dict[str, str], dict[str, dict]]:
    """Return the worst level of the findings about the database and the artifacts, and each artifact.

    Findings about this machine are ignored.
    """
    status, out, err = skyrl_tx(capsys, "doctor", "--backend", "fake", "--json", "--data-dir", data_dir, *flags)
    content = json.loads(out)
    order = ("ok", "warning", "error")
    levels = {"database": "ok", "artifacts": "ok"}
    for finding in content["findings"]:
        if finding["check"] in levels:
            levels[finding["check"]] = max(levels[finding["check"]], finding["level"], key=order.index)
    assert status >= max(map(order.index, levels.values())), err
    return levels, {record["artifact"]: record for record in content.get("artifacts", ())}


def lose_database(data_dir: Path) -> None:
    for path in data_dir.glob("skyrl_tx.db*"):
        path.unlink()
    for path in (data_dir / "artifacts").glob("art-*"):
        os.utime(path, (time.time() - 86_400,) * 2)


def checkpoint_rows(data_dir: Path) -> dict[str, tuple[CheckpointRow, ModelRow, str]]:
    """Return the run and owner of each checkpoint, by path."""

    def look(tx):
        rows = [
            row for run in models.list_owned(tx, None, 10, 0)[0] for row in checkpoints.list_by_run(tx, run.model_id, 0)
        ]
        return {str(row.path): (row, models.get(tx, row.model_id), models.get_owner(tx, row.model_id)) for row in rows}

    with closing(Store.open(data_dir, role="tool")) as store:
        return store.read(look)


def load(data_dir: Path, path: str) -> float:
    """Load a training checkpoint like the API, and return the loss of the next pass."""
    harness = EngineHarness(data_dir)
    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(path), time.time()))
    model = harness.api.read(lambda tx: models.get(tx, CheckpointPath.parse(path).model_id))
    assert row is not None and model is not None
    spec = codec.decode(model.spec)
    request = LoadWeights(path=path, artifact_id=row.artifact_id, spec=spec, optimizer=True, create=True)  # type: ignore[arg-type]
    copy, _ = harness.make(request, name="copy")
    result = harness.answer(forward_backward(1, backward=False), model_id=copy, seq_id=1)
    harness.close()
    return result.metrics["loss:sum"]


def test_recover_restores_checkpoints_and_the_newest_snapshot(trained, capsys) -> None:
    data_dir, model_id, loss = trained
    before = checkpoint_rows(data_dir)
    lose_database(data_dir)
    harness = EngineHarness(data_dir, housekeeping_interval_s=0.001)
    harness.answer(sample(max_tokens=20, eos_stops=False))
    harness.close()
    levels, found = doctor(capsys, data_dir)
    assert levels["artifacts"] == "warning" and "unclaimed" in {record["state"] for record in found.values()}

    out = skyrl_tx(capsys, "doctor", "--backend", "fake", "--data-dir", data_dir)[1]
    assert "unclaimed" in out and "skyrl-tx recover" in out

    status, out, err = skyrl_tx(capsys, "recover", "--list", "--data-dir", data_dir)
    assert status == 0 and "first" in out and "snapshot" in out and checkpoint_rows(data_dir) == {}

    status, out, err = skyrl_tx(capsys, "recover", "--data-dir", data_dir)
    assert status == 0, err

    after = checkpoint_rows(data_dir)
    assert after.keys() - before.keys() == {f"tinker://{model_id}/weights/snapshot-6"}

    for path, (row, run, owner) in before.items():
        restored, restored_run, restored_owner = after[path]
        assert (restored.artifact_id, restored.size_bytes) == (row.artifact_id, row.size_bytes)
        assert (restored.user_metadata, restored.public) == (row.user_metadata, False)
        assert restored.step == row.step == 1 and restored_run.num_steps == 2
        assert abs(restored.created_at - row.created_at) < 10
        assert (restored.expires_at is None) == (row.expires_at is None)
        assert (restored_run.base_model, restored_run.spec, restored_owner) == (run.base_model, run.spec, owner)
        assert restored_run.status == "unloaded" and restored_run.base_model_hash == run.base_model_hash

    assert after[f"tinker://{model_id}/weights/snapshot-6"][0].step == 2
    assert load(data_dir, f"tinker://{model_id}/weights/first") == loss
    assert load(data_dir, f"tinker://{model_id}/weights/snapshot-6") < loss

    status, out, _ = skyrl_tx(capsys, "recover", "--data-dir", data_dir)
    assert status == 0 and out == "nothing to restore\n"


def test_unclaimed_artifacts_go_to_the_trash_on_request_and_return(trained, capsys) -> None:
    data_dir, model_id, _ = trained
    lose_database(data_dir)
    for _ in range(2):  # a server starts and stops in between, which must not affect removal and recovery
        Store.open(data_dir, role="tool").close()
        status, out, _ = skyrl_tx(capsys, "doctor", "--remove-unclaimed", "--yes", "--data-dir", data_dir)
        assert status == 0 and "to the trash" in out
        assert LocalArtifacts(data_dir / "artifacts").list_ids() == []
        harness = EngineHarness(data_dir, housekeeping_interval_s=0.001)
        harness.answer(sample(max_tokens=20, eos_stops=False))
        harness.close()
        status, _, err = skyrl_tx(capsys, "recover", "--trash", "--data-dir", data_dir)
        assert f"tinker://{model_id}/weights/first" in checkpoint_rows(data_dir), err
        lose_database(data_dir)


def test_recovered_data_before_keys_belongs_to_the_admin(trained, capsys) -> None:
    data_dir, _, _ = trained
    lose_database(data_dir)
    with closing(Store.open(data_dir, role="tool")) as store:
        for owner, scope in (("bob", "user"), ("root", "admin")):
            store.write(
                lambda tx, owner=owner, scope=scope: keys.create(
                    tx, owner=owner, scope=scope, name="", note="", now=time.time()
                )
            )
    assert skyrl_tx(capsys, "recover", "--data-dir", data_dir)[0] == 0
    assert {owner for _, _, owner in checkpoint_rows(data_dir).values()} == {"root"}


def test_recover_from_manifests_of_early_releases(trained, capsys) -> None:
    """Early manifests lack names, owners and specifications.

    The rank is read from the files, and names are generated.
    """
    data_dir, model_id, loss = trained

    for path in (data_dir / "artifacts").glob("art-*/manifest.json"):
        manifest = json.loads(path.read_text())
        for key in (*OLD_KEYS, *(["base_model"] if "effect_order" in manifest["metadata"] else [])):
            manifest["metadata"].pop(key, None)
        path.write_text(json.dumps(manifest))

    lose_database(data_dir)
    assert skyrl_tx(capsys, "recover", "--data-dir", data_dir)[0] == 0

    found = checkpoint_rows(data_dir)
    (training,) = (path for path in found if "/weights/recovered-" in path)
    assert {path.rsplit("/", 1)[0] for path in found} >= {
        f"tinker://{model_id}/{kind}" for kind in ("weights", "sampler_weights")
    }

    _, run, owner = found[training]
    spec = codec.decode(run.spec)
    assert spec.lora.rank == SPEC.lora.rank and owner == "local"  # type: ignore[union-attr]
    assert load(data_dir, training) == loss


def test_doctor_finds_damaged_and_missing_files(trained, capsys) -> None:
    data_dir, model_id, _ = trained
    levels, found = doctor(capsys, data_dir)
    assert set(levels.values()) == {"ok"} and [record["state"] for record in found.values()] == ["ok"] * 4

    rows = {path: row for path, (row, _, _) in checkpoint_rows(data_dir).items()}
    damaged, missing = (
        rows[f"tinker://{model_id}/{kind}/first"].artifact_id for kind in ("weights", "sampler_weights")
    )
    weights = data_dir / "artifacts" / damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    LocalArtifacts(data_dir / "artifacts").discard(missing)
    levels, found = doctor(capsys, data_dir)
    assert levels["artifacts"] == "error"
    assert found[damaged]["state"] == "damaged" and found[missing]["state"] == "missing"
    assert found[missing]["used_by"] == f"tinker://{model_id}/sampler_weights/first"
    assert "it is in the trash" in found[missing]["detail"]
    assert skyrl_tx(capsys, "recover", missing, "--data-dir", data_dir)[0] == 0

    levels, _ = doctor(capsys, data_dir, "--no-hashes")
    assert levels["artifacts"] == "ok" and LocalArtifacts(data_dir / "artifacts").open(ArtifactId(missing))


def test_doctor_reports_a_damaged_database(trained, capsys) -> None:
    data_dir, _, _ = trained
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_requests_answers'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with (data_dir / "skyrl_tx.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\x2a" * size)
    assert doctor(capsys, data_dir)[0]["database"] == "error"
    root = data_dir / "artifacts"
    assert LocalArtifacts(root).read_identity() is not None
    with pytest.raises(StoreError, match="skyrl-tx recover"):
        Store.open(data_dir, role="engine")
    assert LocalArtifacts(root).read_identity() is None, "what replaces the database may lack rows"


def test_deletion_before_the_first_start_after_an_upgrade_leaves_nothing_unclaimed(trained, capsys) -> None:
    data_dir, model_id, _ = trained
    (data_dir / "artifacts" / "identity.json").unlink()
    artifacts = LocalArtifacts(data_dir / "artifacts")
    with closing(Store.open(data_dir, role="tool")) as store:
        store.write(lambda tx: tx.delete(identity.get(tx)))
        path = f"tinker://{model_id}/weights/first"
        assert skyrl_tx(capsys, "checkpoints", "delete", "--now", path, "--data-dir", data_dir)[0] == 0
        assert identity.find_unclaimed(store, artifacts) == set()
        assert identity.is_current(store.read(identity.get), artifacts.read_identity())


def test_recover_creates_no_directory(tmp_path, capsys) -> None:
    status, _, err = skyrl_tx(capsys, "recover", "--data-dir", tmp_path / "mistyped")
    assert status == 1 and "no server has stored weights there" in err and not (tmp_path / "mistyped").exists()


def test_recover_names_an_unknown_artifact(trained, capsys) -> None:
    data_dir, _, _ = trained
    status, _, err = skyrl_tx(capsys, "recover", "art-" + "0" * 32, "--data-dir", data_dir)
    assert status == 1 and "neither unclaimed nor in the trash" in err


def test_doctor_compares_nothing_before_an_engine_has_claimed_the_artifacts(trained, capsys) -> None:
    """An older release records no identity, and a start may be refused before the engine records one."""
    data_dir, _, _ = trained
    with closing(sqlite3.connect(data_dir / "skyrl_tx.db")) as connection, connection:
        connection.execute("DELETE FROM identity")
    assert doctor(capsys, data_dir)[0]["artifacts"] == "warning", "only the database has lost its identity"
    (data_dir / "artifacts" / "identity.json").unlink()
    assert doctor(capsys, data_dir)[0]["artifacts"] == "ok"
