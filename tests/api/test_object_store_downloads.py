"""Downloads of weights from an object store through the API."""

import io
import shutil
import tarfile
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
import tinker

from skyrl_tx.artifacts.bucket import Bucket
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack


@pytest.fixture
def object_store_stack(tmp_path: Path) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path, artifacts=f"file://{tmp_path}/objects") as stack:
        yield stack


def test_downloads_fetch_what_is_not_on_the_machine(object_store_stack: LiveStack, tmp_path: Path, monkeypatch) -> None:
    rest = tinker.RestClient(base_url=object_store_stack.url)
    with tinker.ServiceClient(base_url=object_store_stack.url) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        path = training.save_weights_external("out").result().path

    cache = tmp_path / "data" / "artifact-cache"
    (saved,) = [copy for copy in cache.glob("art-*") if "external" in (copy / "manifest.json").read_text()]
    weights = (saved / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(cache)
    cache.mkdir()
    url = rest.get_external_weights_urls(path).result().urls["adapter_model.safetensors"]
    assert list(cache.iterdir()) == [], "the names of the files are in the manifest"
    assert httpx.get(url).content == weights

    part = httpx.get(url, headers={"range": "bytes=10-19"})
    assert part.status_code == HTTPStatus.PARTIAL_CONTENT and part.content == weights[10:20]
    run, kind, name = path.removeprefix("tinker://").split("/")
    archive_url = f"{object_store_stack.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    archive = httpx.get(archive_url, follow_redirects=True)
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        member = tar.extractfile("adapter_model.safetensors")
        assert member is not None and member.read() == weights

    def list_nothing(bucket: Bucket, folder: str | None = None) -> None:
        raise OSError("a path of the server")

    with monkeypatch.context() as patch:
        patch.setattr("obstore.list", list_nothing)
        answer = httpx.get(url)
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.json()["detail"] == "the object store of the weights does not respond"
    shutil.rmtree(tmp_path / "objects" / saved.name)
    assert httpx.get(url).status_code == HTTPStatus.NOT_FOUND
