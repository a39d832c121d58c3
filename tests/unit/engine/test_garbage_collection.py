"""Garbage collection after the loss of the database or a restore of an older copy, and the trash."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.artifacts import LocalArtifacts, local
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.process import failpoints
from skyrl_tx.store import checkpoints, identity, models, sampling_sessions
from skyrl_tx.store.database import Store
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample


def train_and_save(harness: EngineHarness, name: str) -> ArtifactId:
    """Train a new model for one step, save a training checkpoint, and return its artifact id."""
    model_id, _ = harness.create(name)
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    result = harness.answer(SaveWeights(kind="weights", name=name), model_id=model_id, seq_id=3)
    path = CheckpointPath.parse(result.path)
    row = harness.api.read(lambda tx: checkpoints.get(tx, path, time.time()))
    assert row is not None
    return row.artifact_id


def age(data_dir: Path, seconds: float = 172_800.0) -> None:
    """Backdate all artifacts."""
    for path in (data_dir / "artifacts").glob("art-*"):
        os.utime(path, (time.time() - seconds,) * 2)


def run_housekeeping(harness: EngineHarness) -> None:
    """Run an engine that does housekeeping in every turn."""
    harness.settings = harness.settings.model_copy(update={"housekeeping_interval_s": 0.001})
    harness.answer(sample(max_tokens=40, eos_stops=False))


def present(harness: EngineHarness) -> set[str]:
    return {path.name for path in (harness.data_dir / "artifacts").glob("art-*")}


def remove_database(data_dir: Path) -> None:
    for path in data_dir.glob("skyrl_tx.db*"):
        path.unlink()


def test_a_lost_database_loses_no_weights(tmp_path, caplog):
    harness = EngineHarness(tmp_path)
    artifact_id = train_and_save(harness, "monday")
    harness.close()
    remove_database(tmp_path)
    age(tmp_path)
    for _ in range(2):
        caplog.clear()
        harness = EngineHarness(tmp_path)
        run_housekeeping(harness)
        assert artifact_id in present(harness)
        assert "skyrl-tx recover" in caplog.text
        harness.close()


@pytest.mark.parametrize("is_same_start", [False, True])
def test_an_older_database_loses_no_weights(tmp_path, is_same_start):
    """The database copy was taken during an earlier run of the engine or during the current one."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    harness = EngineHarness(data_dir, housekeeping_interval_s=0.001 if is_same_start else 60.0)
    monday = train_and_save(harness, "monday")
    harness.close()
    copy.mkdir()
    for path in data_dir.glob("skyrl_tx.db*"):
        shutil.copy(path, copy)
    identity = data_dir / "artifacts" / "identity.json"
    epoch = identity.read_bytes() if identity.is_file() else b""
    harness = EngineHarness(data_dir, housekeeping_interval_s=0.001)
    tuesday = train_and_save(harness, "tuesday")
    harness.close()
    if is_same_start:
        assert epoch != identity.read_bytes(), "the epoch grows with time, too"
    remove_database(data_dir)
    for path in copy.iterdir():
        shutil.copy(path, data_dir)
    age(data_dir)
    harness = EngineHarness(data_dir)
    run_housekeeping(harness)
    assert {monday, tuesday} <= present(harness)

    harness.close()


def test_a_checkpoint_recorded_behind_other_writes_is_not_collected(tmp_path, monkeypatch):
    """The checkpoint is young when the references are read.

    The collection runs much later, after queued writes.
    """
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    harness.run(harness.create()[1])
    unrecorded = harness.artifacts.create(lambda folder: (folder / "a.json").write_text("{}") and None).artifact_id
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(local, "time", clock)
    collect = harness.artifacts.collect

    def collect_late(*arguments, **options):
        clock.time = lambda: time.time() + 700.0
        return collect(*arguments, **options)

    harness.artifacts.collect = collect_late
    harness.answer(sample(max_tokens=40, eos_stops=False))
    assert unrecorded in present(harness)
    harness.close()


def delete(harness: EngineHarness) -> None:
    """Delete all checkpoints."""
    for run in harness.api.read(lambda tx: models.list_owned(tx, None, 10, 0))[0]:
        for row in harness.api.read(lambda tx, run=run: checkpoints.list_by_run(tx, run.model_id, time.time())):
            harness.api.write(lambda tx, row=row: checkpoints.delete(tx, row.path))


def test_a_deleted_checkpoint_goes_to_the_trash_first(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    harness = EngineHarness(tmp_path)
    artifact_id = train_and_save(harness, "monday")
    delete(harness)
    age(tmp_path)
    run_housekeeping(harness)
    assert artifact_id not in present(harness) and harness.artifacts.list_ids(trashed=True) == [artifact_id]
    assert (
        f"moved artifact {artifact_id} (tinker://{harness.session_id}:train:monday/weights/monday) to the"
        in caplog.text
    )

    harness.settings = harness.settings.model_copy(update={"trash_retention_s": 0.0})
    run_housekeeping(harness)
    assert harness.artifacts.list_ids(trashed=True) == []
    assert f"removed artifact {artifact_id} (tinker://" in caplog.text

    harness.close()


def test_ephemeral_samplers_and_replaced_snapshots_skip_the_trash(tmp_path):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=1)
    harness.save_samplers(3)
    harness.api.write(lambda tx: sampling_sessions.release_unused(tx, time.time(), keep_newest=0))
    age(tmp_path)
    run_housekeeping(harness)
    assert len(present(harness)) == 1 and harness.artifacts.list_ids(trashed=True) == []
    harness.close()


def test_the_trash_takes_no_more_space_than_allowed_or_free(tmp_path, monkeypatch):
    store = LocalArtifacts(tmp_path)
    made = [
        store.create(lambda folder: (folder / "a.json").write_text("1" * 1000) and None, {"base_model": "m"})
        for _ in range(4)
    ]
    for number, artifact in enumerate(made):
        store.discard(artifact.artifact_id)
        os.utime(tmp_path / "trash" / artifact.artifact_id, (time.time() - 100 + number,) * 2)
    names = [artifact.artifact_id for artifact in made]
    size = sum(path.stat().st_size for path in (tmp_path / "trash" / names[0]).iterdir())
    assert store.empty_trash(retention_s=1000, max_bytes=4 * size) == []
    assert store.empty_trash(retention_s=1000, max_bytes=3 * size) == names[:1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * size))
    assert store.empty_trash(retention_s=1000, max_bytes=4 * size) == names[1:2]
    assert store.empty_trash(retention_s=97.5, max_bytes=4 * size) == names[2:3]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_kill_on_the_way_to_the_trash_or_out_of_it_loses_no_other_artifact(tmp_path, nth):
    """The process is killed before the artifact is moved to the trash, or while it is removed from the trash."""
    store = LocalArtifacts(tmp_path)
    write = lambda folder: (folder / "a.json").write_text("1") and None  # noqa: E731
    deleted, kept = (store.create(write, {"base_model": "m"}).artifact_id for _ in range(2))
    program = (
        "from pathlib import Path; from skyrl_tx.artifacts import LocalArtifacts; "
        f"s = LocalArtifacts(Path({str(tmp_path)!r})); "
        f"s.collect([{kept!r}], min_age_s=0); s.empty_trash(retention_s=0, max_bytes=0)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, failpoints.VARIABLE: f"artifact.collect:{nth}"},
        check=False,
        timeout=30,
    )
    assert killed.returncode == -signal.SIGKILL
    assert store.has(deleted) == (nth == 1) and store.open(kept)
    assert store.collect([kept], min_age_s=0) == ([deleted] if nth == 1 else [])
    assert store.list_ids(trashed=True) == ([deleted] if nth == 1 else [])

    store.empty_trash(retention_s=0, max_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept, "trash"]


@pytest.mark.parametrize("point", ["compared", "advanced"])
def test_a_crash_while_the_identities_are_compared_keeps_artifacts_unclaimed(tmp_path, monkeypatch, point):
    """The engine ends before it marks the artifacts, or after it has advanced the database's epoch."""
    harness = EngineHarness(tmp_path)
    artifact_id = train_and_save(harness, "monday")
    harness.close()
    remove_database(tmp_path)
    age(tmp_path)
    store = Store.open(tmp_path, role="engine")
    root = LocalArtifacts(tmp_path / "artifacts")
    write, num_writes = root.write_identity, 1 if point == "advanced" else 0

    def write_or_end(recorded):
        nonlocal num_writes
        if not num_writes:
            raise KeyboardInterrupt
        num_writes -= 1
        return write(recorded)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(root, "write_identity", write_or_end)
        identity.claim(store, root)
    store.close()
    harness = EngineHarness(tmp_path)
    run_housekeeping(harness)
    assert artifact_id in present(harness)
    assert artifact_id in harness.artifacts.read_identity().unclaimed
    harness.close()


def test_an_engine_on_a_full_disk_starts_and_removes_nothing(tmp_path, monkeypatch, caplog):
    harness = EngineHarness(tmp_path)
    artifact_id = train_and_save(harness, "monday")
    delete(harness)
    age(tmp_path)

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness.artifacts, "write_identity", fail)
    run_housekeeping(harness)
    assert "cannot write the identity of the data directory" in caplog.text
    assert artifact_id in present(harness)
    harness.close()


def test_a_directory_of_an_early_release_is_claimed_without_a_warning(tmp_path, caplog):
    """Neither the database nor the directory has an identity, and every artifact has a row."""
    harness = EngineHarness(tmp_path)
    artifact_id = train_and_save(harness, "monday")
    harness.api.write(lambda tx: tx.delete(identity.get(tx)))
    (tmp_path / "artifacts" / "identity.json").unlink()
    age(tmp_path)
    run_housekeeping(harness)
    assert "skyrl-tx recover" not in caplog.text and artifact_id in present(harness)
    delete(harness)
    age(tmp_path)
    run_housekeeping(harness)
    assert artifact_id not in present(harness)
    harness.close()


def test_a_save_moves_older_checkpoints_to_the_trash(tmp_path: Path) -> None:
    """The files follow when the deletion can no longer be undone."""
    harness = EngineHarness(tmp_path)
    harness.settings = harness.settings.model_copy(update={"keep_last": 2, "deletion_undo_s": 0.0})
    model_id, _ = harness.create("run")
    for seq_id in range(1, 5):
        kinds = "sampler_weights" if seq_id == 4 else "weights"
        harness.answer(SaveWeights(kind=kinds, name=f"c{seq_id}"), model_id=model_id, seq_id=seq_id)
    left = harness.api.read(lambda tx: checkpoints.list_by_run(tx, model_id, time.time()))
    assert [row.name for row in left] == ["c2", "c3", "c4"]
    age(harness.data_dir)
    run_housekeeping(harness)
    assert len(present(harness)) >= 3 and len(harness.artifacts.list_ids(trashed=True)) == 1
    harness.close()
