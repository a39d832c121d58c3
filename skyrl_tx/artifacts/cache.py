"""Copies on this machine of the artifacts of an object store, bounded by their bytes."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tx.artifacts.files import ARTIFACT_ID, check_free_space, compute_size_bytes
from skyrl_tx.artifacts.local import TEMPORARY, create_locked, lock_folder, remove_interrupted
from skyrl_tx.contract.ids import ArtifactId


class ArtifactCache:
    """A directory of whole artifacts. Several processes may share it; none removes what another one holds.

    A directory in use has a shared lock, and is removed only under an exclusive one.
    """

    def __init__(self, root: Path, *, max_bytes: int, min_free_bytes: int = 0) -> None:
        """Use a directory; the artifacts in it take `max_bytes` at most, unless more are in use at a time."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes

    def get_path(self, artifact_id: ArtifactId) -> Path:
        """Return the place of an artifact, which may not be there."""
        return self._root / artifact_id

    @contextmanager
    def keep_local(self, artifact_id: ArtifactId) -> Generator[bool]:
        """Keep an artifact here until the end, and yield True; yield False if it is not here."""
        path = self.get_path(artifact_id)
        try:
            with lock_folder(path, fcntl.LOCK_SH) as descriptor:
                is_here = _is_at(descriptor, path)
                if is_here:
                    os.utime(path)  # the least recently used is evicted first
                yield is_here
        except FileNotFoundError:
            if path.exists():
                raise
            yield False

    @contextmanager
    def create_folder(self, num_bytes: int = 0) -> Generator[Path]:
        """Yield an empty directory, to fill and to `add`; it is removed at the end, or after a crash.

        Raises CapacityError if the disk has no room for that number of bytes, whatever is evicted.
        """
        self._evict(num_bytes)
        check_free_space(self._root, self._min_free_bytes + num_bytes)
        folder = self._root / f"{TEMPORARY}{secrets.token_hex(16)}"
        try:
            with create_locked(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def check_free_space(self) -> None:
        """Raise CapacityError if less than the minimum of the disk is free."""
        check_free_space(self._root, self._min_free_bytes)

    def add(self, folder: Path, artifact_id: ArtifactId) -> None:
        """Rename a complete directory to an artifact, unless that is here already; evict others if there is no room."""
        try:
            folder.rename(self.get_path(artifact_id))
        except OSError:
            if not self.get_path(artifact_id).is_dir():
                raise
        self._evict(0, kept=artifact_id)

    def drop(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact; return False if it is in use, or not here."""
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
        """Remove what interrupted processes left."""
        for path in self._root.glob(f"{TEMPORARY}*"):
            remove_interrupted(path)

    def _evict(self, num_bytes: int, *, kept: ArtifactId | None = None) -> None:
        """Remove the least recently used artifacts until there is room for `num_bytes` more."""
        found = [path for path in self._root.iterdir() if ARTIFACT_ID.fullmatch(path.name)]
        sizes = {path: compute_size_bytes(path) for path in sorted(found, key=_get_use_time)}
        total = sum(sizes.values())
        for path, size in sizes.items():
            has_disk = shutil.disk_usage(self._root).free >= self._min_free_bytes + num_bytes
            if has_disk and total + num_bytes <= self._max_bytes:
                return
            if path.name != kept and self.drop(ArtifactId(path.name)):
                total -= size


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open directory is still the one at a path: it may have been removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _get_use_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # evicted by another process
        return 0.0
