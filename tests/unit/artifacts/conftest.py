"""An object store in memory, in a directory, and behind the S3 protocol."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from skyrl_tx.artifacts.bucket import Bucket
from skyrl_tx.artifacts.cache import ArtifactCache
from skyrl_tx.artifacts.objects import ObjectArtifacts
from tests.support.client_environments import OBJECT_STORE, ClientEnvironment, PreparedEnvironment
from tests.support.s3_server import S3Server, s3_server, variables

Open = Callable[..., ObjectArtifacts]


@pytest.fixture(scope="session")
def server(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> Iterator[S3Server]:
    with s3_server(client_environment(OBJECT_STORE)) as server:
        server.create_bucket("weights")
        yield server


@pytest.fixture(params=["memory", "directory", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    match request.param:
        case "memory":
            return Bucket(MemoryStore(), "memory://")
        case "directory":
            return Bucket.open_url(f"file://{tmp_path}/objects")
        case _:
            server: S3Server = request.getfixturevalue("server")
            for name, value in variables(server.url).items():
                monkeypatch.setenv(name, value)
            return Bucket.open_url(f"s3://weights/{tmp_path.name}")


@pytest.fixture
def open_here(bucket: Bucket, tmp_path: Path) -> Open:
    """Return a function that opens the artifacts on one of multiple machines."""

    def open_on(machine: str = "first", max_bytes: int = 2**30) -> ObjectArtifacts:
        return ObjectArtifacts(bucket, ArtifactCache(tmp_path / machine, max_bytes=max_bytes))

    return open_on
