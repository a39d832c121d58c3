"""The cache of an object store: copies of artifacts on this machine, up to a maximum size."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tx.artifacts.files import ARTIFACT_ID, check_free_space, compute_size_bytes
from skyrl_tx.artifacts.local import TEMPORARY, create_temporary, lock_folder, remove_interrupted
from skyrl_tx.contract.ids import ArtifactId


class ArtifactCache:
    """A directory of complete artifacts that multiple processes may share.

    A process that uses an artifact holds a shared file lock on it. To remove an artifact, a process
    needs an exclusive lock, so no process removes an artifact that another process uses.
    """

    def __init__(self, root: Path, *, max_bytes: int, min_free_bytes: int = 0) -> None:
        """Use a directory.

        The cache exceeds `max_bytes` only if the artifacts in use need more space.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes

    def get_path(self, artifact_id: ArtifactId) -> Path:
        """Return the path of an artifact, which may not exist."""
        return self._root / artifact_id

    @contextmanager
    def keep_local(self, artifact_id: ArtifactId) -> Generator[bool]:
        """Keep an artifact in the cache while the context is open.

        Yield whether the artifact is in the cache.
        """
        path = self.get_path(artifact_id)
        try:
            with lock_folder(path, fcntl.LOCK_SH) as descriptor:
                is_cached = _is_at(descriptor, path)
                if is_cached:
                    os.utime(path)  # the least recently used artifact is evicted first
                yield is_cached
        except FileNotFoundError:
            if path.exists():
                raise
            yield False

    @contextmanager
    def create_folder(self, num_bytes: int = 0) -> Generator[Path]:
        """Yield an empty directory for files that the caller writes and then passes to `add`.

        The directory is removed at the end, or after a crash. Raises CapacityError if the disk has
        no space for `num_bytes` even after eviction.
        """
        self._evict(num_bytes)
        check_free_space(self._root, self._min_free_bytes + num_bytes)
        with create_temporary(self._root) as folder:
            yield folder

    def check_free_space(self) -> None:
        """Raise CapacityError if the disk has less free space than the minimum."""
        check_free_space(self._root, self._min_free_bytes)

    def add(self, folder: Path, artifact_id: ArtifactId) -> None:
        """Move a complete directory into the cache, unless the artifact is there already.

        If the cache is then too large, evict other artifacts.
        """
        try:
            folder.rename(self.get_path(artifact_id))
        except OSError:
            if not self.get_path(artifact_id).is_dir():
                raise
        self._evict(0, kept=artifact_id)

    def drop(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact. Return False if it is in use or not in the cache."""
        path = self.get_path(artifact_id)
        try:
            with lock_folder(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as descriptor:
                if not _is_at(descriptor, path):
                    return False
                removed = path.rename(self._root / f"{TEMPORARY}{secrets.token_hex(16)}")
        except (BlockingIOError, FileNotFoundError):
            return False
        shutil.rmtree(removed, ignore_errors=True)
        return True

    def clean(self) -> None:
        """Remove the directories that interrupted processes have left."""
        for path in self._root.glob(f"{TEMPORARY}*"):
            remove_interrupted(path)

    def _evict(self, num_bytes: int, *, kept: ArtifactId | None = None) -> None:
        """Remove the least recently used artifacts until there is space for `num_bytes` more.

        The artifact `kept` and artifacts in use are not removed.
        """
        paths = [path for path in self._root.iterdir() if ARTIFACT_ID.fullmatch(path.name)]
        sizes = {path: compute_size_bytes(path) for path in sorted(paths, key=_get_use_time)}
        total = sum(sizes.values())
        for path, size in sizes.items():
            has_disk = shutil.disk_usage(self._root).free >= self._min_free_bytes + num_bytes
            if has_disk and total + num_bytes <= self._max_bytes:
                return
            if path.name != kept and self.drop(ArtifactId(path.name)):
                total -= size


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open directory is still at this path.

    It may have been removed before it was locked.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _get_use_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has evicted it
        return 0.0
