"""Engines with artifacts in an object store: new machines, outages, garbage collection, and a wrong location."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tx.artifacts import ArtifactsUnreachable, LocalArtifacts
from skyrl_tx.artifacts.bucket import Bucket
from skyrl_tx.artifacts.cache import ArtifactCache
from skyrl_tx.artifacts.objects import ObjectArtifacts
from skyrl_tx.contract.errors import ErrorCategory, UserError
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId, SamplerId
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import StoreUnreachable, checkpoints, identity
from tests.support.engine_harness import SPEC, EngineHarness, forward_backward, optim_step, sample

NUM_STEPS = 3


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket.open_url(f"file://{tmp_path}/objects")


@pytest.fixture
def harness(tmp_path: Path, bucket: Bucket) -> Iterator[EngineHarness]:
    harness = EngineHarness(tmp_path / "data", snapshot_interval_requests=1)
    harness.artifacts = on_machine(tmp_path, bucket, "first")
    yield harness
    harness.close()


def on_machine(tmp_path: Path, bucket: Bucket, name: str) -> ObjectArtifacts:
    return ObjectArtifacts(bucket, ArtifactCache(tmp_path / name, max_bytes=2**30))


def train(harness: EngineHarness, model_id: ModelId, seq_id: int = 1) -> list[float]:
    """Train for some steps and return the losses."""
    losses: list[float] = []
    for step in range(NUM_STEPS):
        passed = harness.submit(forward_backward(step), model_id=model_id, seq_id=seq_id + 2 * step)
        harness.run(passed, harness.submit(optim_step(), model_id=model_id, seq_id=seq_id + 2 * step + 1))
        losses.append(harness.result(passed).metrics["loss:sum"])
    return losses


def save(harness: EngineHarness, model_id: ModelId, seq_id: int, name: str = "a") -> ArtifactId:
    result = harness.answer(SaveWeights(kind="weights", name=name), model_id=model_id, seq_id=seq_id)
    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(result.path), time.time()))
    assert row is not None
    return row.artifact_id


def age(tmp_path: Path) -> None:
    """Backdate all artifacts."""
    for path in (tmp_path / "objects").glob("art-*/**/*"):
        os.utime(path, (time.time() - 172_800,) * 2)


def collect_until(harness: EngineHarness, is_done) -> None:
    """Run engines that do housekeeping in every turn until the expected state is reached."""
    harness.settings = harness.settings.model_copy(update={"housekeeping_interval_s": 0.001})
    for _ in range(20):
        harness.answer(sample(max_tokens=100, eos_stops=False))
        if is_done():
            return
    pytest.fail("the garbage collection did not do it")


def test_a_new_machine_continues_bit_equal(harness: EngineHarness, bucket: Bucket, tmp_path: Path) -> None:
    model_id, created = harness.create()
    harness.run(created)
    first = train(harness, model_id)
    checkpoint = save(harness, model_id, 7)
    assert not list((tmp_path / "data").glob("artifacts/art-*"))
    harness.artifacts = on_machine(tmp_path, bucket, "second")
    second = train(harness, model_id, seq_id=8)
    loaded, created = harness.make(
        LoadWeights(artifact_id=checkpoint, path="tinker://a", optimizer=True, create=True, spec=SPEC), "loaded"
    )
    harness.run(created)
    assert train(harness, loaded) == second
    sampler = save(harness, model_id, 14, "b")
    harness.artifacts = on_machine(tmp_path, bucket, "third")
    tokens = harness.answer(sample(sampler=SamplerId(sampler))).sequences[0].tokens

    local = EngineHarness(tmp_path / "local", snapshot_interval_requests=1)
    model_id, created = local.create()
    local.run(created)
    assert train(local, model_id) == first
    save(local, model_id, 7)
    assert train(local, model_id, seq_id=8) == second
    sampler = save(local, model_id, 14, "b")
    assert list(local.answer(sample(sampler=SamplerId(sampler))).sequences[0].tokens) == list(tokens)
    local.close()


def fail(*_: object) -> None:
    raise ArtifactsUnreachable("the object store cannot read it: no connection")


def test_an_outage_ends_the_engine_and_fails_no_restored_model(
    harness: EngineHarness, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id, created = harness.create()
    harness.run(created)
    train(harness, model_id)
    harness.artifacts = on_machine(tmp_path, bucket, "second")
    passed = harness.submit(forward_backward(), model_id=model_id, seq_id=7)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "list", fail)
        with pytest.raises((StoreUnreachable, ArtifactsUnreachable)):
            harness.run(passed)
    harness.run(passed)
    assert harness.result(passed).metrics["num_datums:sum"] == 2


def test_a_save_during_an_outage_fails_and_training_goes_on(
    harness: EngineHarness, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id, created = harness.create()
    harness.run(created)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "put", fail)
        refused = harness.submit(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
        passed = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
        harness.run(refused, passed)
    failure = harness.result(refused)
    assert failure.category == ErrorCategory.SERVER and "Remote I/O error" in failure.message
    assert harness.result(passed).metrics["num_datums:sum"] == 2
    assert save(harness, model_id, 3) in harness.artifacts.list_ids()


def test_a_deleted_checkpoint_goes_to_the_trash_and_is_removed_later(harness: EngineHarness, tmp_path: Path) -> None:
    model_id, created = harness.create()
    harness.run(created)
    deleted, kept = save(harness, model_id, 1), save(harness, model_id, 2, "b")
    path = CheckpointPath.of_parts(model_id, "weights", "a")
    harness.api.write(lambda tx: checkpoints.delete(tx, path))
    age(tmp_path)
    collect_until(harness, lambda: harness.artifacts.list_ids(trashed=True) == [deleted])
    assert kept in harness.artifacts.list_ids()
    age(tmp_path)
    harness.settings = harness.settings.model_copy(update={"trash_retention_s": 3600.0})
    collect_until(harness, lambda: not list((tmp_path / "objects").glob(f"{deleted}/*")))
    assert kept in harness.artifacts.list_ids()


def test_a_new_database_removes_nothing(harness: EngineHarness, bucket: Bucket, tmp_path: Path, caplog) -> None:
    model_id, created = harness.create()
    harness.run(created)
    artifact_id = save(harness, model_id, 1)
    age(tmp_path)
    other = EngineHarness(tmp_path / "other", housekeeping_interval_s=0.001)
    other.artifacts = on_machine(tmp_path, bucket, "second")
    for _ in range(3):
        other.answer(sample(max_tokens=100, eos_stops=False))
    other.close()
    assert artifact_id in other.artifacts.list_ids() and other.artifacts.list_ids(trashed=True) == []
    assert "skyrl-tx recover" in caplog.text


def test_a_database_is_served_with_its_own_artifacts_only(
    harness: EngineHarness, bucket: Bucket, tmp_path: Path
) -> None:
    model_id, created = harness.create()
    harness.run(created)
    artifact_id = save(harness, model_id, 1)
    right = harness.artifacts
    empty = Bucket.open_url(f"file://{tmp_path}/others")

    for wrong in (on_machine(tmp_path, empty, "second"), LocalArtifacts(tmp_path / "data" / "artifacts")):
        harness.artifacts = wrong
        with pytest.raises(
            UserError, match=r"the database refers to \d artifacts, but .* has none of them: set --artifacts"
        ):
            harness.run(created)

    harness.artifacts = right
    harness.run(created)
    right.forget_identity()  # simulates a damaged database
    identity.check_artifacts(harness.api, right)
    assert artifact_id in right.list_ids()


def test_a_database_without_artifacts_may_be_moved_to_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path / "data")
    harness.answer(sample())
    harness.artifacts = on_machine(tmp_path, bucket, "first")
    model_id, created = harness.create("later")
    harness.run(created)
    assert save(harness, model_id, 1) in harness.artifacts.list_ids()
    recorded = harness.artifacts.read_identity()
    assert recorded is not None and recorded.store_id.startswith("remote-")
    harness.close()
