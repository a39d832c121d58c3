"""The location of a data directory's artifacts."""

import stat
import sys
from pathlib import Path

import pytest

from skyrl_tx.artifacts import (
    Identity,
    InvalidLocation,
    LocalArtifacts,
    normalize_url,
    open_artifacts,
    read_recorded_url,
)
from skyrl_tx.artifacts import location as places
from skyrl_tx.artifacts.objects import ObjectArtifacts


def make_url(tmp_path: Path, name: str = "objects") -> str:
    return f"file://{tmp_path}/{name}"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("weights", "must be a URL that starts with s3://, gs://, az://, file://"),
        ("memory://", "must be a URL"),
        ("http://127.0.0.1/weights", "must be a URL"),
        ("s3://key:secret@bucket/prefix", "must not contain credentials or options"),
        ("az://container/prefix?sig=secret", "must not contain credentials or options"),
        ("s3:///prefix", "must name a bucket: s3://bucket/prefix"),
        ("file:///", "must name a directory"),
    ],
)
def test_bad_urls_are_refused_without_their_secrets(url: str, message: str) -> None:
    with pytest.raises(InvalidLocation, match=message) as caught:
        normalize_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/prefix/", "gs://bucket", "az://container/a/b", "file:///srv/weights"])
def test_urls_of_object_stores(url: str) -> None:
    assert normalize_url(url) == url.rstrip("/")


def test_the_default_is_the_data_directory(data_dir: Path) -> None:
    store = open_artifacts(data_dir)
    assert isinstance(store, LocalArtifacts) and not store.is_remote
    assert [path.name for path in data_dir.iterdir()] == ["artifacts"]


def test_a_data_directory_names_its_object_store(data_dir: Path, tmp_path: Path) -> None:
    made = open_artifacts(data_dir, make_url(tmp_path) + "/").create(
        lambda at: (at / "a.json").write_text("1") and None
    )
    assert read_recorded_url(data_dir) == make_url(tmp_path)
    assert stat.S_IMODE((data_dir / "artifacts.url").stat().st_mode) == 0o600
    found = open_artifacts(data_dir)
    assert isinstance(found, ObjectArtifacts) and found.location == make_url(tmp_path) and found.has(made.artifact_id)
    with pytest.raises(InvalidLocation, match=f"the artifacts of {data_dir} are in {make_url(tmp_path)}"):
        open_artifacts(data_dir, make_url(tmp_path, "others"))


def test_a_data_directory_with_artifacts_keeps_them(data_dir: Path, tmp_path: Path) -> None:
    open_artifacts(data_dir).create(lambda at: (at / "a.json").write_text("1") and None)
    with pytest.raises(InvalidLocation, match="already contains artifacts; use another data directory"):
        open_artifacts(data_dir, make_url(tmp_path))
    assert read_recorded_url(data_dir) is None


def test_without_obstore_the_extra_is_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bucket", "objects"):
        monkeypatch.delitem(sys.modules, f"skyrl_tx.artifacts.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        InvalidLocation, match=r"--artifacts s3://weights needs obstore: pip install 'skyrl-tx-server\[storage\]'"
    ):
        open_artifacts(data_dir, "s3://weights")
    assert read_recorded_url(data_dir) is None


def test_a_damaged_database_is_forgotten_when_the_object_store_is_opened(data_dir: Path, tmp_path: Path) -> None:
    open_artifacts(data_dir, make_url(tmp_path)).write_identity(Identity(store_id="remote-1", epoch=1))
    places.forget_identity(data_dir)
    assert open_artifacts(data_dir).read_identity() is None
    open_artifacts(data_dir).write_identity(Identity(store_id="remote-2", epoch=1))
    assert open_artifacts(data_dir).read_identity() == Identity(store_id="remote-2", epoch=1)
