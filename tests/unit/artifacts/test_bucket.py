"""A failing S3 store: rejected requests, timeouts, truncated and lost messages, slow responses."""

import logging
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from skyrl_tx.artifacts import ArtifactsUnreachable
from skyrl_tx.artifacts import bucket as buckets
from skyrl_tx.artifacts.bucket import Bucket
from skyrl_tx.artifacts.cache import ArtifactCache
from skyrl_tx.artifacts.objects import ObjectArtifacts
from skyrl_tx.contract.ids import ArtifactId
from tests.support.flaky_proxy import FAULTS, Fault, flaky_proxy
from tests.support.s3_server import SECRET_KEY, S3Server, variables

PART = 5 * 2**20
"""The minimum part size in S3."""
CLIENT = {"timeout": timedelta(seconds=30), "allow_http": True}
IMPATIENT = {**CLIENT, "timeout": timedelta(seconds=5)}
RETRY = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2},
}
CONTENT = bytes(range(256)) * (2 * PART // 256 + 1)
SECRETS = (SECRET_KEY, "AKIA", "Signature", "AWS4")


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PART_BYTES", PART)


def write(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(CONTENT)


@pytest.mark.parametrize("fault", [*FAULTS, "refuse", pytest.param("stall", marks=pytest.mark.slow)])
def test_each_second_request_may_fail(server: S3Server, tmp_path: Path, monkeypatch, fault: Fault) -> None:
    """Every second request for an object fails: an upload part, the manifest and a range."""
    with flaky_proxy(server.url, lambda path, nth: fault if nth % 2 else None) as proxy:
        for name, value in variables(proxy.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(buckets, "_CLIENT", IMPATIENT if fault == "stall" else CLIENT)
        monkeypatch.setattr(buckets, "_RETRY", RETRY)
        bucket = Bucket.open_url(f"s3://weights/{tmp_path.name}")
        made = ObjectArtifacts(bucket, ArtifactCache(tmp_path / "first", max_bytes=2**30)).create(write, {})
        elsewhere = ObjectArtifacts(bucket, ArtifactCache(tmp_path / "second", max_bytes=2**30))
        opened = elsewhere.open(made.artifact_id)
        assert (opened.path / "a.safetensors").read_bytes() == CONTENT
        assert elsewhere.list_ids() == [made.artifact_id]
        assert sum(proxy.done.values()) >= 6


@pytest.mark.parametrize("fault", ["refuse", "drop"])
def test_an_outage_is_reported_without_secrets(
    server: S3Server, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    caplog.set_level(logging.DEBUG)

    with flaky_proxy(server.url, lambda path, nth: fault) as proxy:
        for name, value in variables(proxy.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(buckets, "_CLIENT", CLIENT)
        monkeypatch.setattr(buckets, "_RETRY", {**RETRY, "max_retries": 1})
        bucket = Bucket.open_url(f"s3://weights/{tmp_path.name}")
        calls: list[Callable[[], object]] = [
            lambda: bucket.put("a", b"1"),
            lambda: bucket.create("a", b"1"),
            lambda: bucket.get("a"),
            lambda: bucket.download("a", tmp_path / "a", 10),
            lambda: list(bucket.list()),
            lambda: bucket.get_modification_time("a"),
            lambda: bucket.delete(["a"]),
        ]

        for call in calls:
            with pytest.raises(ArtifactsUnreachable, match="the object store cannot") as caught:
                call()
            text = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(caught.value)
            assert not [secret for secret in SECRETS if secret in text]
            assert fault != "refuse" or "status 503" in text


def test_a_bucket_that_does_not_exist_has_no_missing_artifacts(server: S3Server, tmp_path: Path, monkeypatch) -> None:
    """An artifact is only missing if its bucket exists.

    Otherwise models would be considered lost.
    """
    for name, value in variables(server.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "_CLIENT", CLIENT)
    monkeypatch.setattr(buckets, "_RETRY", RETRY)
    bucket = Bucket.open_url("s3://missing-bucket")
    store = ObjectArtifacts(bucket, ArtifactCache(tmp_path, max_bytes=2**30))
    for call in (
        store.list_ids,
        store.read_identity,
        lambda: store.has("art-" + "0" * 32),
        lambda: store.create(write),
    ):
        with pytest.raises(ArtifactsUnreachable, match="NoSuchBucket"):
            call()


def test_no_connection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables("http://127.0.0.1:9").items():  # no server listens on this port
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "_CLIENT", CLIENT)
    monkeypatch.setattr(buckets, "_RETRY", {**RETRY, "max_retries": 0})
    bucket = Bucket.open_url("s3://weights")
    with pytest.raises(ArtifactsUnreachable, match="the object store cannot read a: no connection"):
        bucket.get("a")


def test_an_interactive_call_gives_up_on_a_silent_store(tmp_path: Path, monkeypatch) -> None:
    """The store accepts connections and never responds. With the limits of downloads this would take minutes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        for name, value in variables(f"http://127.0.0.1:{silent.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        cache = ArtifactCache(tmp_path / "cache", max_bytes=2**30)
        store = ObjectArtifacts(
            Bucket.open_url("s3://weights"), cache, interactive=Bucket.open_url("s3://weights", timeout_s=0.1)
        )
        artifact_id = ArtifactId(f"art-{0:032x}")
        for call in (store.describe, store.has, lambda name: store.sign_url(name, "a.safetensors", 60.0)):
            with pytest.raises(ArtifactsUnreachable):
                call(artifact_id)
