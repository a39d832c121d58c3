import json
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, LocalArtifacts, files
from skyrl_tx.contract.ids import ArtifactId
from tests.support.polling import until

EXIT_AT_RENAME = """
import os, sys
from pathlib import Path
from skyrl_tx.artifacts import LocalArtifacts
Path.rename = lambda self, target: os._exit(9)
LocalArtifacts(Path(sys.argv[1])).create(lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"weights"))
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "artifacts")


def write_adapter(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.json").write_text('{"step": 3}')


def entries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "artifacts").iterdir())


def test_create_and_open(store: LocalArtifacts) -> None:
    made = store.create(write_adapter, {"kind": "weights"})
    path = store.open(made.artifact_id).path
    assert path == made.path
    assert (path / "adapter_model.safetensors").read_bytes() == b"weights" * 1000
    assert json.loads((path / "state" / "optimizer.json").read_text()) == {"step": 3}
    assert made.size_bytes == 7000 + len('{"step": 3}')
    assert store.describe(made.artifact_id) == made
    assert made.metadata == {"kind": "weights"}


def test_ids_are_random_and_directories_private(store: LocalArtifacts, tmp_path: Path) -> None:
    first, second = store.create(write_adapter), store.create(write_adapter)
    assert first.artifact_id != second.artifact_id and len(first.artifact_id) >= 32
    for folder in (tmp_path / "artifacts", first.path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_failed_creation_leaves_nothing(store: LocalArtifacts, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_adapter(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.create(fail)
    assert entries(tmp_path) == []


def test_an_interrupted_creation_is_invisible_and_removed(tmp_path: Path) -> None:
    """A child process exits after everything is written and before anything is renamed."""
    root = tmp_path / "artifacts"
    child = subprocess.run([sys.executable, "-c", EXIT_AT_RENAME, root])
    assert child.returncode == 9
    (left,) = entries(tmp_path)
    store = LocalArtifacts(root)
    with pytest.raises(ArtifactMissing):
        store.open(ArtifactId(left))
    with pytest.raises(ArtifactMissing):
        store.open(ArtifactId(left.removeprefix(".tmp-")))
    assert store.collect(set()) == []
    assert entries(tmp_path) == []


def test_a_creation_begins_again_if_its_directory_is_removed_at_once(
    store: LocalArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process's garbage collection may see the directory before it is locked."""
    create = Path.mkdir
    removed: list[Path] = []

    def create_and_remove_the_first(path: Path, *args: object, **kwargs: object) -> None:
        create(path, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        if path.name.startswith(".tmp-") and not removed:
            removed.append(path)
            assert store.collect(set()) == []
            assert not path.exists()

    monkeypatch.setattr(Path, "mkdir", create_and_remove_the_first)
    made = store.create(write_adapter)
    assert removed
    assert store.open(made.artifact_id) == made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda at: flip(at / "adapter_model.safetensors"),
            "file adapter_model.safetensors does not match the manifest",
        ),
        (
            lambda at: (at / "state" / "optimizer.json").write_text("{}"),
            "file state/optimizer.json does not match the manifest",
        ),
        (lambda at: (at / "state" / "optimizer.json").unlink(), "file state/optimizer.json is missing"),
        (lambda at: (at / "more.safetensors").touch(), "file more.safetensors is unknown"),
        (lambda at: (at / "more.json").symlink_to("/etc/hostname"), "more.json is a link"),
        (lambda at: (at / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda at: (at / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_error_names_the_damaged_file(store: LocalArtifacts, damage, message: str) -> None:
    made = store.create(write_adapter)
    damage(made.path)
    with pytest.raises(ArtifactCorrupt, match=f"{made.artifact_id}.*{message}"):
        store.open(made.artifact_id)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../artifacts", "/etc", "art-" + "0" * 32, "art-" + "0" * 32 + "/..", "a\0b"]
)
def test_ids_cannot_escape_the_root(store: LocalArtifacts, name: str) -> None:
    with pytest.raises(ArtifactMissing, match="no artifact"):
        store.open(ArtifactId(name))


def test_a_link_in_the_root_is_no_artifact(store: LocalArtifacts, tmp_path: Path) -> None:
    name = "art-" + "1" * 32
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "artifacts" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactMissing):
        store.open(ArtifactId(name))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: (folder / "weights.pkl").touch(), "weights.pkl must end in .age, .json, .safetensors"),
        (lambda folder: (folder / "manifest.json").touch(), "manifest.json"),
        (lambda folder: (folder / "a.json").symlink_to("/etc/hostname"), "a.json is a link"),
    ],
)
def test_only_plain_files_with_known_suffixes(store: LocalArtifacts, tmp_path: Path, write, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store.create(write)
    assert entries(tmp_path) == []


def test_collect_removes_unreferenced_artifacts(store: LocalArtifacts) -> None:
    kept, first, second = (store.create(write_adapter).artifact_id for _ in range(3))
    assert store.collect({kept}, min_age_s=0) == sorted([first, second])
    assert store.open(kept)
    with pytest.raises(ArtifactMissing):
        store.open(first)


def test_collect_keeps_recent_and_unfinished_artifacts(store: LocalArtifacts) -> None:
    fresh = store.create(write_adapter).artifact_id
    is_writing, may_end = threading.Event(), threading.Event()

    def write_slowly(folder: Path) -> None:
        write_adapter(folder)
        is_writing.set()
        assert may_end.wait(10)

    made: list[ArtifactId] = []
    writing = threading.Thread(target=lambda: made.append(store.create(write_slowly).artifact_id))
    writing.start()
    assert is_writing.wait(10)
    assert store.collect(set()) == []
    may_end.set()
    writing.join(10)
    assert store.open(fresh) and store.open(made[0])


def test_files_are_verified_by_one_thread_at_a_time(store: LocalArtifacts, monkeypatch) -> None:
    made = store.create(write_adapter)
    num_hashed, may_end, verify = [0], threading.Event(), files.verify

    def verify_slowly(path: Path, manifest: files.Manifest) -> None:
        num_hashed[0] += 1
        may_end.wait(10)
        verify(path, manifest)

    monkeypatch.setattr(files, "verify", verify_slowly)
    with ThreadPoolExecutor(8) as pool:
        opened = [pool.submit(store.open_verified, made.artifact_id) for _ in range(8)]
        until(lambda: num_hashed[0] > 0)
        may_end.set()
        assert [future.result() for future in opened] == [made] * 8
    assert num_hashed == [1]


def test_files_are_verified_once_and_again_after_a_change(store: LocalArtifacts, monkeypatch) -> None:
    made = store.create(write_adapter)
    hashed_names: list[str] = []
    hashed = files.hash_file
    monkeypatch.setattr(files, "hash_file", lambda path: (hashed_names.append(path.name), hashed(path))[1])
    assert [store.open_verified(made.artifact_id) for _ in range(3)] == [made] * 3
    assert sorted(hashed_names) == ["adapter_model.safetensors", "optimizer.json"]
    (made.path / "adapter_model.safetensors").write_bytes(b"weighty" * 1000)
    for _ in range(2):
        with pytest.raises(ArtifactCorrupt, match=r"adapter_model\.safetensors does not match the manifest"):
            store.open_verified(made.artifact_id)
