"""Artifacts in an object store: in memory, in a directory, and behind the S3 protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, ArtifactsUnreachable, Identity
from skyrl_tx.artifacts import location as places
from skyrl_tx.artifacts.bucket import Bucket
from skyrl_tx.artifacts.objects import ObjectArtifacts
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.process import failpoints

Open = Callable[..., ObjectArtifacts]
CHECKPOINT = {"base_model": "tiny", "model_id": "s:train:0", "kind": "weights", "name": "a"}
NAMED = ArtifactId("art-" + "7" * 32)
DAY_S = 86_400.0
CREATE = """
import sys
from pathlib import Path
from skyrl_tx.artifacts import open_artifacts

def write(folder):
    (folder / "a.safetensors").write_bytes(b"weights")
    (folder / "b.json").write_text("{}")

open_artifacts(Path(sys.argv[1]), sys.argv[2]).create(write, {"base_model": "tiny"}, sys.argv[3])
"""


def write_adapter(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.json").write_text('{"step": 3}')


def objects(bucket: Bucket) -> list[str]:
    return sorted(stored.path for stored in bucket.list())


def test_an_artifact_opens_on_a_machine_without_a_copy(open_here: Open) -> None:
    made = open_here().create(write_adapter, CHECKPOINT)
    elsewhere = open_here("second")
    opened = elsewhere.open(made.artifact_id)
    assert (opened.files, opened.metadata) == (made.files, CHECKPOINT)
    assert (opened.path / "adapter_model.safetensors").read_bytes() == b"weights" * 1000
    assert json.loads((opened.path / "state" / "optimizer.json").read_text()) == {"step": 3}
    assert opened.path != made.path and elsewhere.open_verified(made.artifact_id) == opened
    assert elsewhere.describe(made.artifact_id) == opened and elsewhere.has(made.artifact_id)
    assert elsewhere.list_ids() == [made.artifact_id]


@pytest.mark.parametrize("name", ["", "..", "art-" + "0" * 32, "art-" + "0" * 32 + "/..", "identity.json"])
def test_unknown_ids_are_missing(open_here: Open, name: str) -> None:
    store = open_here()
    assert not store.has(ArtifactId(name))
    for read in (store.open, store.describe, store.open_verified, store.discard, store.restore, store.remove):
        with pytest.raises(ArtifactMissing):
            read(ArtifactId(name))


def test_an_artifact_is_created_once(open_here: Open, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes create an artifact with the same name, and neither sees the other before writing its files."""
    first, second = open_here(), open_here("second")
    made = first.create(write_adapter, CHECKPOINT, NAMED)
    assert second.create(lambda folder: pytest.fail("it exists"), {}, NAMED).files == made.files
    monkeypatch.setattr(second, "_find_existing", lambda artifact_id: None)
    before = objects(bucket)
    later = second.create(lambda folder: (folder / "other.json").write_text("1") and None, {}, NAMED)
    assert (later.files, later.metadata) == (made.files, CHECKPOINT)
    assert objects(bucket) == before
    assert (second.open(NAMED).path / "adapter_model.safetensors").is_file()


def test_a_manifest_whose_answer_is_lost_is_committed(
    open_here: Open, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = bucket.create

    def lose_answer(path: str, content: bytes) -> bool:
        return create(path, content) and create(path, content)  # simulates a repeated request

    monkeypatch.setattr(bucket, "create", lose_answer)
    made = open_here().create(write_adapter, CHECKPOINT)
    assert open_here("second").open(made.artifact_id).files == made.files


def test_a_creation_that_fails_leaves_no_artifact(open_here: Open, bucket: Bucket, monkeypatch, tmp_path: Path) -> None:
    put = bucket.put

    def fail_at_the_second(path: str, content: bytes | Path) -> None:
        if path.endswith("optimizer.json"):
            raise ArtifactsUnreachable("no connection")
        put(path, content)

    monkeypatch.setattr(bucket, "put", fail_at_the_second)
    store = open_here()
    with pytest.raises(ArtifactsUnreachable):
        store.create(write_adapter, CHECKPOINT, NAMED)
    assert store.list_ids() == [] and not store.has(NAMED)
    assert list((tmp_path / "first").iterdir()) == []
    monkeypatch.setattr(bucket, "put", put)
    assert store.create(write_adapter, CHECKPOINT, NAMED).artifact_id == NAMED
    assert store.collect({NAMED}) == [] and len(objects(bucket)) == 5, "the first attempt may still be running"
    assert store.collect({NAMED}, now=2 * DAY_S + store._read_clock()) == []
    assert len(objects(bucket)) == 4 and open_here("second").open(NAMED)


@pytest.mark.parametrize(
    ("point", "exists"),
    [("artifact.uploading:1", False), ("artifact.uploaded:1", False), ("artifact.committed:1", True)],
)
def test_a_kill_leaves_a_whole_artifact_or_none(tmp_path: Path, point: str, exists: bool) -> None:
    url = f"file://{tmp_path}/objects"
    (tmp_path / "data").mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", CREATE, tmp_path / "data", url, NAMED], env={**os.environ, failpoints.VARIABLE: point}
    )
    assert killed.returncode == -9

    (tmp_path / "elsewhere").mkdir()
    store = places.open_artifacts(tmp_path / "elsewhere", url)
    assert isinstance(store, ObjectArtifacts)
    assert store.has(NAMED) == exists and store.list_ids() == [NAMED] * exists
    assert store.collect(set()) == [] and list((tmp_path / "objects").glob("art-*/*/a.safetensors"))

    if exists:
        assert (store.open(NAMED).path / "a.safetensors").read_bytes() == b"weights"
    else:
        assert store.collect(set(), now=2 * DAY_S + store._read_clock()) == []
        assert not list((tmp_path / "objects").glob("art-*/**/*.safetensors"))
    places.open_artifacts(tmp_path / "data", url).collect({NAMED})
    assert not list((tmp_path / "data").glob("artifact-cache/.tmp-*"))


def test_damage_is_found(open_here: Open, bucket: Bucket) -> None:
    made = open_here().create(write_adapter, CHECKPOINT)
    (path,) = [path for path in objects(bucket) if path.endswith("adapter_model.safetensors")]
    bucket.put(path, b"weighty" * 1000)
    with pytest.raises(ArtifactCorrupt, match=r"adapter_model\.safetensors does not match the manifest"):
        open_here("second").open(made.artifact_id)
    bucket.put(path, b"short")
    with pytest.raises(ArtifactCorrupt, match=r"adapter_model\.safetensors does not match the manifest"):
        open_here().describe(made.artifact_id)
    bucket.delete([path])
    for read in (open_here("third").open, open_here().describe):
        with pytest.raises(ArtifactCorrupt, match=r"adapter_model\.safetensors is missing"):
            read(made.artifact_id)


@pytest.mark.parametrize("read", [ObjectArtifacts.open, ObjectArtifacts.open_verified])
def test_a_damaged_copy_is_fetched_again(open_here: Open, read) -> None:
    store = open_here()
    made = store.create(write_adapter)
    (made.path / "adapter_model.safetensors").write_bytes(b"weighty" * 1000)
    assert (read(store, made.artifact_id).path / "adapter_model.safetensors").read_bytes() == b"weights" * 1000


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", "a/../../outside.json"])
def test_files_of_a_manifest_stay_in_their_directory(open_here: Open, bucket: Bucket, name: str) -> None:
    file = {"size_bytes": 1, "sha256": "0"}
    manifest = {"version": 1, "metadata": {}, "files": {name: file}, "upload": "u"}
    bucket.put(f"{NAMED}/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(ArtifactCorrupt, match="names a file outside the artifact"):
        open_here().open(NAMED)


def test_collect_moves_what_is_missed_to_the_trash_and_removes_the_rest(open_here: Open, bucket: Bucket) -> None:
    store = open_here()
    kept, missed, ephemeral = (store.create(write_adapter, data).artifact_id for data in (CHECKPOINT, CHECKPOINT, {}))
    assert store.collect({kept}) == [], "they are young"
    assert store.collect({kept}, min_age_s=-2) == sorted([missed, ephemeral])
    assert store.list_ids() == [kept] and store.list_ids(trashed=True) == [missed]
    assert not [path for path in objects(bucket) if path.startswith(ephemeral)]
    with pytest.raises(ArtifactMissing):
        store.open(missed)
    assert store.describe(missed, trashed=True).metadata == CHECKPOINT
    assert store.collect({kept}, min_age_s=-2) == []


def test_an_artifact_of_the_trash_is_young_when_it_is_restored(open_here: Open) -> None:
    store = open_here()
    made = store.create(write_adapter, CHECKPOINT)
    store.discard(made.artifact_id)
    assert store.list_ids() == [] and store.empty_trash(retention_s=60, max_bytes=2**30) == []
    store.restore(made.artifact_id)
    assert store.list_ids(trashed=True) == [] and store.collect(set()) == []
    assert open_here("second").open(made.artifact_id).files == made.files


def test_the_trash_is_emptied_by_age_and_size(open_here: Open, bucket: Bucket) -> None:
    store = open_here()
    first, second = (store.create(write_adapter, CHECKPOINT).artifact_id for _ in range(2))
    for artifact_id in (first, second):
        store.discard(artifact_id)
    assert store.empty_trash(retention_s=60, max_bytes=2**30) == []
    removed = store.empty_trash(retention_s=60, max_bytes=8000)
    assert len(removed) == 1 and store.list_ids(trashed=True) == sorted({first, second} - set(removed))
    assert len(store.empty_trash(retention_s=-2, max_bytes=2**30)) == 1
    assert objects(bucket) == ["clock"] and store.list_ids(trashed=True) == []


def test_a_removal_and_a_restoration_at_the_same_time(open_here: Open, bucket: Bucket, monkeypatch) -> None:
    """Either the artifact is complete and not in the trash, or restoring it has failed."""
    store, other = open_here(), open_here("second")
    made = store.create(write_adapter, CHECKPOINT)
    store.discard(made.artifact_id)
    put = bucket.put

    def restore_first(path: str, content: bytes | Path) -> None:
        if path.endswith("/removing"):
            monkeypatch.setattr(bucket, "put", put)
            other.restore(made.artifact_id)
        put(path, content)

    monkeypatch.setattr(bucket, "put", restore_first)
    assert store.empty_trash(retention_s=-2, max_bytes=0) == []
    assert open_here("third").open(made.artifact_id).files == made.files
    store.discard(made.artifact_id)

    def restore_later(path: str, content: bytes | Path) -> None:
        put(path, content)
        if path.endswith("/removing"):
            with pytest.raises(ArtifactMissing):
                other.restore(made.artifact_id)

    monkeypatch.setattr(bucket, "put", restore_later)
    assert store.empty_trash(retention_s=-2, max_bytes=0) == [made.artifact_id]
    assert not other.has(made.artifact_id)


def test_an_interrupted_removal_is_completed(open_here: Open, bucket: Bucket, monkeypatch) -> None:
    store = open_here()
    made = store.create(write_adapter, {}, NAMED)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_erase", lambda *_: None)
        assert store.remove(NAMED)
    assert not store.has(NAMED) and store.list_ids() == [] and store.collect({NAMED}) == []
    assert not [path for path in objects(bucket) if path.startswith(NAMED)]
    with monkeypatch.context() as patch:
        patch.setattr(store, "_erase", lambda *_: None)
        store.create(write_adapter, {}, NAMED)
        store.remove(NAMED)
    again = store.create(write_adapter, {}, NAMED)
    assert again.files == made.files and open_here("second").open(NAMED)


def test_the_cache_is_bounded_and_keeps_what_is_in_use(open_here: Open, tmp_path: Path) -> None:
    def copies() -> set[str]:
        return {path.name for path in (tmp_path / "second").glob("art-*")}

    store, other = open_here(), open_here("second", max_bytes=20_000)
    first, second, third, fourth = (store.create(write_adapter).artifact_id for _ in range(4))
    with other.keep_local(first):
        for artifact_id in (second, third, fourth):
            opened = other.open(artifact_id)
            assert (opened.path / "adapter_model.safetensors").is_file()
        assert copies() == {first, fourth}
    other.open(second)
    assert copies() == {fourth, second}
    small = open_here("third", max_bytes=1)
    with small.keep_local(first), small.keep_local(second):
        assert len(list((tmp_path / "third").glob("art-*"))) == 2, "those in use may exceed the bound"


def test_a_full_disk_is_no_place_for_copies(open_here: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here()
    made = store.create(write_adapter)
    other = open_here("second")
    monkeypatch.setattr(other._cache, "_min_free_bytes", 2**62)
    with pytest.raises(CapacityError, match="must stay free"):
        other.open(made.artifact_id)
    with pytest.raises(CapacityError, match="must stay free"):
        other.create(write_adapter)


def test_the_identity_is_touched_while_nothing_changes(open_here: Open) -> None:
    store = open_here()
    assert store.read_identity() is None and store.touch_identity() is None
    written_at = store.write_identity(Identity(store_id="remote-1", epoch=4))
    touched_at = store.touch_identity()
    assert touched_at is not None and touched_at >= written_at
    assert open_here("second").read_identity() == Identity(store_id="remote-1", epoch=4)
    open_here("second").create(write_adapter)
    assert store.touch_identity() is None
    store.forget_identity()
    assert store.read_identity() is None


def test_probe(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bucket.probe() and objects(bucket) == []
    monkeypatch.setattr(bucket, "create", lambda path, content: bucket.put(path, content) is None)
    assert not bucket.probe(), "it creates an object twice"


def test_only_stores_of_a_provider_sign_urls(open_here: Open) -> None:
    store = open_here()
    made = store.create(write_adapter)
    url = store.sign_url(made.artifact_id, "state/optimizer.json", 60.0)
    assert (url is not None) == store.location.startswith("s3:")
    with pytest.raises(ArtifactMissing):
        store.sign_url(made.artifact_id, "other.json", 60.0)
