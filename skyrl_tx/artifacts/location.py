"""The location of artifacts: the data directory, or an object store (`--artifacts`).

The data directory records the URL of its object store. So commands find the object store, and no
server uses another object store by mistake.
"""

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
"""File in the data directory with the URL of the object store."""
_FORGET = "artifacts.forget"
"""File in the data directory that asks to delete the identity in the object store."""
_SCHEMES = ("s3", "gs", "az", "file")


class InvalidLocation(ValueError):
    """The location of the artifacts is invalid, or does not match the data directory."""


def normalize_url(url: str) -> str:
    """Return the URL of an object store without a final slash.

    Raises InvalidLocation. The message contains no secrets of the URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise InvalidLocation(f"it must be a URL that starts with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidLocation(
            "it must not contain credentials or options: set the provider's environment variables instead"
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise InvalidLocation("it must name a directory: file:///directory")
    if parts.scheme != "file" and not parts.netloc:
        raise InvalidLocation(f"it must name a bucket: {parts.scheme}://bucket/prefix")
    return url.rstrip("/")


def read_recorded_url(data_dir: Path) -> str | None:
    """Return the recorded URL of a data directory; None if its artifacts are in the directory."""
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
    interactive_timeout_s: float | None = None,
) -> ArtifactStore:
    """Open the artifacts of a data directory.

    Args:
        data_dir: The data directory.
        url: URL of an object store. The default is the recorded URL, or the data directory without one.
        max_cache_bytes: Size of the cache of an object store on this machine.
        min_free_bytes: Free space on the disk that new artifacts must leave.
        is_recorded: Whether to record `url`, so that the directory cannot be used with another URL later.
        interactive_timeout_s: Time limit for a call to the object store while a client waits. The
            default is the limit of uploads and downloads, a minute.

    Raises:
        InvalidLocation: The artifacts of the directory are elsewhere, or obstore is not installed.
    """
    recorded = read_recorded_url(data_dir)
    if url is None and recorded is None:
        return LocalArtifacts(data_dir / DIRECTORY, min_free_bytes=min_free_bytes)

    # Open the object store. The import is late, because obstore is optional.
    bucket = open_bucket(data_dir, url or recorded or "")
    from skyrl_tx.artifacts.cache import ArtifactCache
    from skyrl_tx.artifacts.objects import ObjectArtifacts

    cache = ArtifactCache(data_dir / CACHE, max_bytes=max_cache_bytes, min_free_bytes=min_free_bytes)
    interactive = None
    if interactive_timeout_s is not None:
        interactive = open_bucket(data_dir, bucket.name, timeout_s=interactive_timeout_s)
    artifacts = ObjectArtifacts(bucket, cache, interactive=interactive)
    if not is_recorded:
        return artifacts

    # Record the URL, and delete the identity if `forget_identity` could not delete it.
    if recorded is None:
        write_note(data_dir, _RECORD, bucket.name)
    if (data_dir / _FORGET).exists():
        artifacts.forget_identity()
        (data_dir / _FORGET).unlink(missing_ok=True)
    return artifacts


def open_bucket(data_dir: Path, url: str, *, timeout_s: float | None = None) -> "Bucket":
    """Open an object store for a data directory, which is not changed. Raises InvalidLocation.

    `timeout_s` limits each call, see `Bucket.open_url`.
    """
    url, recorded = normalize_url(url), read_recorded_url(data_dir)
    if recorded not in (None, url):
        raise InvalidLocation(
            f"--artifacts {url}: the artifacts of {data_dir} are in {recorded}; use this URL or another data directory"
        )
    if any((data_dir / DIRECTORY).glob("art-*")):
        raise InvalidLocation(f"--artifacts {url}: {data_dir} already contains artifacts; use another data directory")
    try:
        from skyrl_tx.artifacts.bucket import Bucket
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise InvalidLocation(f"--artifacts {url} needs obstore: pip install '{DISTRIBUTION}[storage]'") from error
    return Bucket.open_url(url, timeout_s=timeout_s)


def forget_identity(data_dir: Path) -> None:
    """Delete the identity of the artifacts because their database is damaged.

    The identity in an object store is deleted when a server opens the artifacts the next time.
    """
    LocalArtifacts(data_dir / DIRECTORY).forget_identity()
    if read_recorded_url(data_dir) is not None:
        (data_dir / _FORGET).touch(mode=0o600)


def write_note(data_dir: Path, name: str, text: str) -> None:
    """Write a small text file into the data directory, readable only by its owner."""
    # Write a temporary file and rename it, because other processes may start at the same time.
    # `mkstemp` chooses a unique name even if containers that share a volume have the same process
    # id.
    descriptor, temporary = tempfile.mkstemp(dir=data_dir, prefix=f"{name}.")
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{text}\n")
    Path(temporary).rename(data_dir / name)
