"""Garbage collection: a lost or an older database loses no weights, and deleted checkpoints go to the trash first."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx import artifacts
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.store import checkpoints
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample


def saved(harness: EngineHarness, name: str) -> ArtifactId:
    """Train a new model for a step and save a training checkpoint; return its artifact."""
    model_id, _ = harness.create(name)
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    result = harness.answer(SaveWeights(kind="weights", name=name), model_id=model_id, seq_id=3)
    path = CheckpointPath.parse(result.path)
    row = harness.api.read(lambda tx: checkpoints.get(tx, path, time.time()))
    assert row is not None
    return row.artifact_id


def age(data_dir: Path, seconds: float = 172_800.0) -> None:
    """Make all artifacts older."""
    for path in (data_dir / "artifacts").glob("art-*"):
        os.utime(path, (time.time() - seconds,) * 2)


def run_housekeeping(harness: EngineHarness) -> None:
    """Run an engine whose housekeeping is due in each turn."""
    harness.settings = harness.settings.model_copy(update={"housekeeping_interval_s": 0.001})
    harness.answer(sample(max_tokens=40, eos_stops=False))


def present(harness: EngineHarness) -> set[str]:
    return {path.name for path in (harness.data_dir / "artifacts").glob("art-*")}


def remove_database(data_dir: Path) -> None:
    for path in data_dir.glob("skyrl_tx.db*"):
        path.unlink()


def test_a_lost_database_loses_no_weights(tmp_path, caplog):
    harness = EngineHarness(tmp_path)
    artifact_id = saved(harness, "monday")
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
    """The copy of the database is from an earlier start of the engine, or from the same one."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    harness = EngineHarness(data_dir, housekeeping_interval_s=0.001 if is_same_start else 60.0)
    monday = saved(harness, "monday")
    harness.close()
    copy.mkdir()
    for path in data_dir.glob("skyrl_tx.db*"):
        shutil.copy(path, copy)
    identity = data_dir / "artifacts" / "identity.json"
    epoch = identity.read_bytes() if identity.is_file() else b""
    harness = EngineHarness(data_dir, housekeeping_interval_s=0.001)
    tuesday = saved(harness, "tuesday")
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
    """It was young when the references were read; the collection runs a long time later, behind queued writes."""
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    harness.run(harness.create()[1])
    unrecorded = harness.artifacts.create(lambda folder: (folder / "a.json").write_text("{}") and None).artifact_id
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(artifacts, "time", clock)
    collect = harness.artifacts.collect

    def collect_late(*arguments, **options):
        clock.time = lambda: time.time() + 700.0
        return collect(*arguments, **options)

    harness.artifacts.collect = collect_late
    harness.answer(sample(max_tokens=40, eos_stops=False))
    assert unrecorded in present(harness)
    harness.close()
