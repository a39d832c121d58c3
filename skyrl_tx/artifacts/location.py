"""The place of the artifacts of a data directory: in it, or in an object store that `--artifacts` names."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skyrl_tx import DISTRIBUTION
from skyrl_tx.artifacts.base import ArtifactStore
from skyrl_tx.artifacts.local import LocalArtifacts

if TYPE_CHECKING:
    from skyrl_tx.artifacts.bucket import Bucket

DIRECTORY = "artifacts"
CACHE = "artifact-cache"
_RECORD = "artifacts.url"
_FORGET = "artifacts.forget"
_SCHEMES = ("s3", "gs", "az", "file")


class InvalidLocation(ValueError):
    """The place of the artifacts is invalid, or not the one of the data directory; the message says so."""


def normalize_url(url: str) -> str:
    """Return the URL of an object store without a final slash. Raises InvalidLocation; the message has no secrets."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise InvalidLocation(f"it must be a URL that starts with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidLocation("no credentials or options in the URL: they are read from the provider's variables")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise InvalidLocation("it must name a directory: file:///directory")
    if parts.scheme != "file" and not parts.netloc:
        raise InvalidLocation(f"it must name a bucket: {parts.scheme}://bucket/prefix")
    return url.rstrip("/")


def read_recorded_url(data_dir: Path) -> str | None:
    """Return the object store that a data directory names; None if it has its artifacts in itself."""
    try:
        return (data_dir / _RECORD).read_text().strip()
    except FileNotFoundError:
        return None


def open_artifacts(
    data_dir: Path,
    url: str | None = None,
    *,
    max_cache_bytes: int = 64 * 2**30,
    min_free_bytes: int = 0,
    is_recorded: bool = True,
) -> ArtifactStore:
    """Open the artifacts of a data directory, in `url` if it is given or if the directory names it.

    `is_recorded`: the directory names `url` from now on, and no server or command uses it with another one.

    Raises InvalidLocation if the directory has artifacts elsewhere, or obstore is missing.
    """
    recorded = read_recorded_url(data_dir)
    if url is None and recorded is None:
        return LocalArtifacts(data_dir / DIRECTORY, min_free_bytes=min_free_bytes)
    bucket = open_bucket(data_dir, url or recorded or "")
    from skyrl_tx.artifacts.cache import ArtifactCache
    from skyrl_tx.artifacts.objects import ObjectArtifacts  # late, because it imports obstore

    cache = ArtifactCache(data_dir / CACHE, max_bytes=max_cache_bytes, min_free_bytes=min_free_bytes)
    artifacts = ObjectArtifacts(bucket, cache)
    if not is_recorded:
        return artifacts
    if recorded is None:
        _record_url(data_dir, bucket.name)
    if (data_dir / _FORGET).exists():
        artifacts.forget_identity()
        (data_dir / _FORGET).unlink(missing_ok=True)
    return artifacts


def open_bucket(data_dir: Path, url: str) -> "Bucket":
    """Open the object store of a data directory, which is not changed. Raises InvalidLocation."""
    url, recorded = normalize_url(url), read_recorded_url(data_dir)
    if recorded not in (None, url):
        raise InvalidLocation(f"--artifacts {url}: {data_dir} has its artifacts in {recorded}")
    if any((data_dir / DIRECTORY).glob("art-*")):
        raise InvalidLocation(f"--artifacts {url}: {data_dir} has artifacts in itself; use another data directory")
    try:
        from skyrl_tx.artifacts.bucket import Bucket
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise InvalidLocation(f"--artifacts {url} needs obstore: pip install '{DISTRIBUTION}[storage]'") from error
    return Bucket.open_url(url)


def forget_identity(data_dir: Path) -> None:
    """Let the artifacts forget their database, which is damaged: now, or when they are opened if they are elsewhere."""
    LocalArtifacts(data_dir / DIRECTORY).forget_identity()
    if read_recorded_url(data_dir) is not None:
        (data_dir / _FORGET).touch(mode=0o600)


def _record_url(data_dir: Path, url: str) -> None:
    """Name the object store in the data directory, so that commands find it and no server uses another one."""
    # Not a name with the process id, which all containers that share a volume may have; `mkstemp` makes it private.
    descriptor, temporary = tempfile.mkstemp(dir=data_dir, prefix=f"{_RECORD}.")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{url}\n")
    Path(temporary).rename(data_dir / _RECORD)
