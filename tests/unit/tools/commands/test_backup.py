"""`skyrl-tx backup` and `skyrl-tx restore`."""

import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
from sqlalchemy import make_url

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.store import models
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.commands import backup
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step
from tests.support.postgresql_server import PostgresqlServer

NUM_STEPS = 8


def skyrl_tx(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def submit_run(harness: EngineHarness, num_steps: int) -> tuple[ModelId, list[RequestId]]:
    """Submit a run that saves a sampler and a named checkpoint in every step, and return its request ids."""
    model_id, created = harness.create()
    submitted = [created]
    for step in range(num_steps):
        name = SamplingSessionId(f"{harness.session_id}:sample:{step}")
        for request in (
            forward_backward(step),
            optim_step(),
            SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name),
            SaveWeights(kind="weights", name=f"of-{step % 3}", overwrite=True),
        ):
            submitted.append(harness.submit(request, model_id=model_id, seq_id=len(submitted)))
    return model_id, submitted


def busy_harness(data_dir: Path, url: str | None) -> EngineHarness:
    """Return a harness that replaces snapshots and collects garbage continuously."""
    harness = EngineHarness(
        data_dir,
        database_url=url,
        snapshot_interval_requests=1,
        housekeeping_interval_s=0.05,
        sampler_retention_s=0.001,
        trash_retention_s=0.0,
    )
    harness.config = FakeConfig(vocab_size=128, step_delay_s=0.002)
    return harness


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_a_backup_under_load_is_restored_and_trains_on_bit_equal(kind, tmp_path, request, capsys) -> None:
    """The backup contains open requests.

    After a restore they get the same results as on the original server.
    """
    url = other_url = None
    if kind == "postgresql":
        url = request.getfixturevalue("postgresql_url")
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        other_url = server.new_database(empty=True)
    source = ("--data-dir", tmp_path / "data", *(() if url is None else ("--database-url", url)))
    target = ("--data-dir", tmp_path / "restored", *(() if other_url is None else ("--database-url", other_url)))
    harness = busy_harness(tmp_path / "data", url)
    (tmp_path / "data" / "signing.key").write_bytes(b"k" * 32)
    model_id, submitted = submit_run(harness, NUM_STEPS)
    training = threading.Thread(target=harness.run, args=(submitted[-1],))
    training.start()
    outputs = []

    while training.is_alive() and len(outputs) < 3:
        harness.api.wait(0.05)
        row = harness.api.read(lambda tx: models.get(tx, model_id))
        if row is not None and row.effect_order >= 7 * len(outputs) + 3:
            status, out, err = skyrl_tx(capsys, "backup", tmp_path / "backup", *source)
            assert status == 0, out + err
            outputs.append(row.effect_order)

    training.join()
    assert len(outputs) >= 2, "some backups were made during the training"

    expected = [harness.result(request_id) for request_id in submitted]
    harness.close()

    status, out, err = skyrl_tx(capsys, "restore", tmp_path / "backup", *target)
    assert status == 0 and "restored the backup of" in out, err
    assert "valid again" in out and f"skyrl-tx keys list --data-dir {tmp_path / 'restored'}" in out
    for folder in (tmp_path / "restored", tmp_path / "restored" / "artifacts"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    assert (tmp_path / "restored" / "signing.key").read_bytes() == b"k" * 32

    if other_url is not None:
        name = make_url(other_url).database
        assert name is not None and name in (tmp_path / "restored" / "database").read_text()
        status, _, err = skyrl_tx(capsys, "keys", "list", "--data-dir", tmp_path / "restored", "--database-url", url)
        assert status == 1 and "belongs to the database" in err

    _, out, err = skyrl_tx(capsys, "doctor", "--backend", "fake", "--json", *target)
    findings = [finding for finding in json.loads(out)["findings"] if finding["check"] in ("database", "artifacts")]
    assert {finding["level"] for finding in findings} == {"ok"}, out + err

    restored = EngineHarness(tmp_path / "restored", database_url=other_url)
    row = restored.api.read(lambda tx: models.get(tx, model_id))
    assert row is not None and row.effect_order >= outputs[-1]

    restored.run(submitted[-1])
    for request_id, result in zip(submitted, expected, strict=True):
        assert codec.encode(restored.result(request_id)) == codec.encode(result)
    identity = restored.artifacts.read_identity()
    assert identity is not None and identity.unclaimed == ()

    restored.close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Make a data directory with a short run."""
    harness = EngineHarness(tmp_path / "data")
    _, submitted = submit_run(harness, 3)
    harness.run(submitted[-1])
    harness.close()
    (tmp_path / "data" / "signing.key").write_bytes(b"k" * 32)
    return tmp_path / "data"


def test_the_next_backup_adds_new_artifacts_only(data_dir, tmp_path, capsys) -> None:
    folder = tmp_path / "backup"
    for num_new, flags in ((7, ()), (0, ()), (7, ("--copy",))):
        if flags:
            shutil.rmtree(folder)
        status, out, _ = skyrl_tx(capsys, "backup", folder, *flags, "--data-dir", data_dir)
        assert status == 0 and f"including {num_new} new ones" in out, out
        links = {path.stat().st_nlink for path in (folder / "artifacts").rglob("*") if path.is_file()}
        assert links == {1 if flags else 2}
    assert stat.S_IMODE((folder / "signing.key").stat().st_mode) == 0o600
    assert len(list(folder.glob("database-*"))) == 1
    with_rows = json.loads((folder / "backup.json").read_text())
    assert {"signing.key", with_rows["database"]} < with_rows["files"].keys()


def test_copy_replaces_hard_links_of_the_previous_backup(data_dir, tmp_path, capsys, monkeypatch) -> None:
    folder = tmp_path / "backup"
    assert skyrl_tx(capsys, "backup", folder, "--data-dir", data_dir)[0] == 0
    paths = [path for path in (folder / "artifacts").rglob("*") if path.is_file()]
    assert {path.stat().st_nlink for path in paths} == {2}

    # An interruption leaves a complete backup, in which some files are still links.
    replace, replaced = backup._replace_with_copy, []

    def interrupt(path: Path, temporary: Path) -> None:
        if len(replaced) == 3:
            backup._copy_file(path, temporary)
            raise KeyboardInterrupt
        replace(path, temporary)
        replaced.append(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backup, "_replace_with_copy", interrupt)
        main(["backup", str(folder), "--copy", "--data-dir", str(data_dir)])
    assert sum(path.stat().st_nlink == 1 for path in paths) == 3
    status, _, err = skyrl_tx(capsys, "restore", folder, "--data-dir", tmp_path / "first")
    assert status == 0, err

    # The next backup replaces the remaining links, and the one after it has nothing to replace.
    status, out, _ = skyrl_tx(capsys, "backup", folder, "--copy", "--data-dir", data_dir)
    assert status == 0 and "including 0 new ones" in out
    assert f"replaced {len(paths) - 3} hard links of the previous backup with copies" in out
    assert {path.stat().st_nlink for path in paths} == {1} and not list(folder.rglob(".tmp-*"))
    status, out, _ = skyrl_tx(capsys, "backup", folder, "--copy", "--data-dir", data_dir)
    assert status == 0 and "hard links" not in out

    # Damage to the data directory no longer affects the backup.
    for path in (data_dir / "artifacts").rglob("*.safetensors"):
        path.write_bytes(b"?")
    status, _, err = skyrl_tx(capsys, "restore", folder, "--data-dir", tmp_path / "second")
    assert status == 0, err


def test_an_interrupted_backup_leaves_the_one_before(data_dir, tmp_path, capsys, monkeypatch) -> None:
    folder = tmp_path / "backup"
    assert skyrl_tx(capsys, "backup", folder, "--data-dir", data_dir)[0] == 0
    harness = EngineHarness(data_dir)
    model_id, created = harness.create("other")
    harness.run(created, harness.submit(SaveWeights(kind="weights", name="late"), model_id=model_id, seq_id=1))
    harness.close()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backup, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        main(["backup", str(folder), "--data-dir", str(data_dir)])
    assert not list((data_dir / "artifacts").glob(".tmp-*"))
    status, _, err = skyrl_tx(capsys, "restore", folder, "--data-dir", tmp_path / "restored")
    assert status == 0, err
    assert skyrl_tx(capsys, "backup", folder, "--data-dir", data_dir)[0] == 0
    assert len(list(folder.glob("database-*"))) == 1


def test_a_damaged_artifact_is_left_out_and_reported(data_dir, tmp_path, capsys) -> None:
    damaged = sorted((data_dir / "artifacts").glob("art-*/adapter_model.safetensors"))[0]
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    status, out, _ = skyrl_tx(capsys, "backup", tmp_path / "backup", "--data-dir", data_dir)
    assert status == 1 and f"left out {damaged.parent.name}" in out
    status, out, err = skyrl_tx(capsys, "restore", tmp_path / "backup", "--data-dir", tmp_path / "restored")
    assert status == 0 and f"not in the backup: {damaged.parent.name}" in out, err


def test_restore_checks_all_hashes_first(data_dir, tmp_path, capsys) -> None:
    folder = tmp_path / "backup"
    assert skyrl_tx(capsys, "backup", folder, "--copy", "--data-dir", data_dir)[0] == 0
    damaged = sorted((folder / "artifacts").glob("art-*/adapter_model.safetensors"))[0]
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    (folder / "signing.key").unlink()
    status, _, err = skyrl_tx(capsys, "restore", folder, "--data-dir", tmp_path / "restored")
    assert status == 1 and f"{damaged} has changed since the backup" in err and "signing.key is missing" in err
    assert not (tmp_path / "restored").exists()


def test_directories_in_use_are_refused(data_dir, tmp_path, capsys) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    status, _, err = skyrl_tx(capsys, "backup", tmp_path / "other", "--data-dir", data_dir)
    assert status == 1 and "has files but is not a backup" in err
    status, _, err = skyrl_tx(capsys, "restore", tmp_path / "other", "--data-dir", tmp_path / "new")
    assert status == 1 and "is not a backup" in err
    assert skyrl_tx(capsys, "backup", tmp_path / "backup", "--data-dir", data_dir)[0] == 0
    status, _, err = skyrl_tx(capsys, "restore", tmp_path / "backup", "--data-dir", data_dir)
    assert status == 1 and "is not empty" in err
    status, _, err = skyrl_tx(
        capsys, "restore", tmp_path / "backup", "--data-dir", tmp_path / "new", "--database-url", "postgresql://h/d"
    )
    assert status == 1 and "is a backup of SQLite" in err


def test_unclaimed_artifacts_are_in_the_backup(data_dir, tmp_path, capsys) -> None:
    for path in data_dir.glob("skyrl_tx.db*"):
        path.unlink()
    harness = EngineHarness(data_dir)
    harness.run(harness.create()[1])
    harness.close()
    assert skyrl_tx(capsys, "backup", tmp_path / "backup", "--data-dir", data_dir)[0] == 0
    assert skyrl_tx(capsys, "restore", tmp_path / "backup", "--data-dir", tmp_path / "restored")[0] == 0
    identity = LocalArtifacts(tmp_path / "restored" / "artifacts").read_identity()
    assert identity is not None and len(identity.unclaimed) >= 4
    assert skyrl_tx(capsys, "recover", "--data-dir", tmp_path / "restored")[0] == 0


def test_a_missing_program_of_postgresql_is_named(tmp_path, postgresql_url, capsys, monkeypatch) -> None:
    harness = EngineHarness(tmp_path / "data", database_url=postgresql_url)
    harness.close()
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    flags = ("--data-dir", tmp_path / "data", "--database-url", postgresql_url)
    status, _, err = skyrl_tx(capsys, "backup", tmp_path / "backup", *flags)
    assert status == 1 and "pg_dump is not installed" in err and "secret-password" not in err


def test_no_artifact_is_removed_while_they_are_pinned(data_dir) -> None:
    artifacts = LocalArtifacts(data_dir / "artifacts")
    present = artifacts.list_ids()
    with artifacts.pin():
        assert artifacts.collect([], min_age_s=0) == [] and not artifacts.remove(present[0])
        assert artifacts.empty_trash(retention_s=0, max_bytes=0) == []
    assert artifacts.list_ids() == present
    assert artifacts.collect([], min_age_s=0) == present
