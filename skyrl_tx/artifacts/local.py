"""Artifacts in a local directory.

The files of an artifact are written to a temporary directory, which is then renamed. To remove an
artifact, its directory is renamed first. So no reader sees an incomplete artifact.
"""

import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from typing_extensions import override

from skyrl_tx.artifacts.base import IDENTITY_DECODER, ArtifactStore, Identity
from skyrl_tx.artifacts.files import (
    ARTIFACT_ID,
    Artifact,
    ArtifactCorrupt,
    ArtifactMissing,
    VerificationCache,
    check_free_space,
    compute_size_bytes,
    encode,
    fsync,
    open_artifact,
    read_manifest,
    seal,
)
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.process.failpoints import failpoint

_log = logging.getLogger(__name__)

_IDENTITY = "identity.json"
_TRASH = "trash"
TEMPORARY = ".tmp-"
"""Prefix of the names of directories that are being written or removed."""


class LocalArtifacts(ArtifactStore):
    """All artifacts in one directory."""

    def __init__(self, root: Path, *, min_free_bytes: int = 0) -> None:
        """Use a directory. `create` leaves at least `min_free_bytes` of its disk free."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._min_free_bytes = min_free_bytes
        self._verified = VerificationCache()
        self._identity_written_ns: int | None = None

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._root)

    def create(
        self,
        write: Callable[[Path], None],
        metadata: Mapping[str, str] | None = None,
        artifact_id: ArtifactId | None = None,
    ) -> Artifact:
        """Write the files into a temporary directory, then rename it."""
        artifact_id = artifact_id or ArtifactId(f"art-{secrets.token_hex(16)}")
        if self.has(artifact_id):
            return self.describe(artifact_id)

        temporary = self._root / f"{TEMPORARY}{artifact_id}"
        path = self._root / artifact_id
        with create_locked(temporary):
            try:
                check_free_space(self._root, self._min_free_bytes)
                write(temporary)
                check_free_space(self._root, self._min_free_bytes)
                manifest = seal(temporary, metadata or {})

                # Rename the directory. Its modification time is the age of the artifact.
                os.utime(temporary)
                failpoint("artifact.rename")
                temporary.rename(path)
                failpoint("artifact.renamed")
                fsync(self._root)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return manifest.make_artifact(artifact_id, path)

    @override
    def has(self, artifact_id: ArtifactId) -> bool:
        return bool(ARTIFACT_ID.fullmatch(artifact_id)) and (self._root / artifact_id).is_dir()

    def open(self, artifact_id: ArtifactId) -> Artifact:
        """Return an artifact's description after checking all hashes."""
        return open_artifact(self._get_path(artifact_id))

    @override
    def describe(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Artifact:
        path = self._get_path(artifact_id, trashed=trashed)
        return read_manifest(path).make_artifact(artifact_id, path)

    def open_verified(self, artifact_id: ArtifactId) -> Artifact:
        """Like `open`, but hashes are computed only once."""
        return self._verified.check(self._get_path(artifact_id))

    def collect(
        self, keep: Collection[ArtifactId], now: float | None = None, *, min_age_s: float = 600.0
    ) -> list[ArtifactId]:
        """Collect garbage. Does nothing while another process holds `pin`."""
        now = time.time() if now is None else now
        collected: list[ArtifactId] = []
        kept = frozenset(keep)
        with self._lock_for_removal() as may_remove:
            for path in sorted(self._root.iterdir()) if may_remove else ():
                if path.name.startswith(TEMPORARY):
                    remove_interrupted(path)
                elif (
                    ARTIFACT_ID.fullmatch(path.name)
                    and path.name not in kept
                    and now - _get_modification_time(path) >= min_age_s
                ):
                    self._trash_or_remove(path)
                    collected.append(ArtifactId(path.name))
        return collected

    def remove(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact. Return False if another process holds `pin`."""
        with self._lock_for_removal() as may_remove:
            if may_remove:
                self._remove(self._get_path(artifact_id))
        return may_remove

    def discard(self, artifact_id: ArtifactId) -> None:
        """Move an artifact to the trash."""
        path = self._get_path(artifact_id)
        (self._root / _TRASH).mkdir(mode=0o700, exist_ok=True)
        os.utime(path)  # in the trash, the modification time is the time of the move
        failpoint("artifact.collect")
        with suppress(ArtifactMissing):  # an earlier artifact with the same id may be in the trash
            self._remove(self._get_path(artifact_id, trashed=True))
        path.rename(self._root / _TRASH / artifact_id)

    @override
    def restore(self, artifact_id: ArtifactId) -> None:
        path = self._get_path(artifact_id, trashed=True)
        os.utime(path)
        path.rename(self._root / artifact_id)

    def empty_trash(self, *, retention_s: float, max_bytes: int) -> list[ArtifactId]:
        """Remove artifacts that have been in the trash for `retention_s`, and return their ids.

        Artifacts are removed earlier, oldest first, while the trash takes more than `max_bytes` or
        more than the free space of the disk beyond `min_free_bytes`.
        """
        removed: list[ArtifactId] = []
        trash = sorted(
            self.list_ids(trashed=True),
            key=lambda artifact_id: _get_modification_time(self._root / _TRASH / artifact_id),
        )
        sizes = {artifact_id: compute_size_bytes(self._root / _TRASH / artifact_id) for artifact_id in trash}

        with self._lock_for_removal() as may_remove:
            for artifact_id in trash if may_remove else ():
                path, total = self._root / _TRASH / artifact_id, sum(sizes.values())
                is_old = time.time() - _get_modification_time(path) >= retention_s
                if not is_old and total <= min(max_bytes, self.get_spare_bytes()):
                    break
                _log.info("removed %s from the trash", _describe_artifact(path))
                self._remove(path)
                del sizes[artifact_id]
                removed.append(artifact_id)
        return removed

    @override
    def get_spare_bytes(self) -> float:
        return max(shutil.disk_usage(self._root).free - self._min_free_bytes, 0)

    @override
    def list_ids(self, *, trashed: bool = False) -> list[ArtifactId]:
        folder = self._root / _TRASH if trashed else self._root
        if not folder.is_dir():
            return []
        return sorted(ArtifactId(path.name) for path in folder.iterdir() if ARTIFACT_ID.fullmatch(path.name))

    @contextmanager
    def pin(self) -> Generator[None]:
        """Prevent any process from removing artifacts while the context is open.

        Waits for a running removal.
        """
        with lock_folder(self._root, fcntl.LOCK_SH):
            yield

    @contextmanager
    def create_temporary(self) -> Generator[Path]:
        """Create a temporary directory in the root. It is removed at the end, or after a crash."""
        with create_temporary(self._root) as folder:
            yield folder

    @override
    def read_identity(self) -> Identity | None:
        try:
            return IDENTITY_DECODER.decode((self._root / _IDENTITY).read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_identity(self, identity: Identity) -> float:
        """Record the identity atomically.

        Return the time of the write by the clock of the file system.
        """
        temporary = self._root / f"{_IDENTITY}.new"
        temporary.write_bytes(encode(identity))
        fsync(temporary)
        os.utime(temporary)  # same clock as the ages of artifacts, which are compared with this time
        temporary.rename(self._root / _IDENTITY)
        fsync(self._root)
        self._identity_written_ns = self._root.stat().st_mtime_ns
        return (self._root / _IDENTITY).stat().st_mtime

    def touch_identity(self) -> float | None:
        """Return the time by the clock of the file system.

        Returns None if the root has changed since `write_identity`, because artifacts may have
        changed.
        """
        if self._root.stat().st_mtime_ns != self._identity_written_ns:
            return None
        os.utime(self._root / _IDENTITY)
        return (self._root / _IDENTITY).stat().st_mtime

    @override
    def forget_identity(self) -> None:
        (self._root / _IDENTITY).unlink(missing_ok=True)

    @contextmanager
    def _lock_for_removal(self) -> Generator[bool]:
        """Exclude `pin` while the context is open. Yield False if a process holds `pin`."""
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _trash_or_remove(self, path: Path) -> None:
        if not _is_missed(path):
            _log.debug("removed unreferenced artifact %s", path.name)
            self._remove(path)
            return
        label = _describe_artifact(path)
        self.discard(ArtifactId(path.name))
        _log.info("moved %s to the trash: nothing refers to it", label)

    def _remove(self, path: Path) -> None:
        # Rename the directory first, so that no reader sees a partially removed artifact.
        renamed = path.rename(self._root / f"{TEMPORARY}{path.name}")
        failpoint("artifact.collect")
        shutil.rmtree(renamed)

    def _get_path(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Path:
        path = (self._root / _TRASH if trashed else self._root) / artifact_id
        if not ARTIFACT_ID.fullmatch(artifact_id) or path.is_symlink() or not path.is_dir():
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        return path


def _is_missed(path: Path) -> bool:
    try:
        return read_manifest(path).is_missed
    except ArtifactCorrupt:
        return True


def _describe_artifact(path: Path) -> str:
    """Return the id and the title of an artifact, for log lines."""
    try:
        return f"artifact {path.name} ({read_manifest(path).make_artifact(ArtifactId(path.name), path).title})"
    except ArtifactCorrupt:
        return f"artifact {path.name}"


def _get_modification_time(path: Path) -> float:
    return path.stat().st_mtime


@contextmanager
def lock_folder(folder: Path, how: int) -> Generator[int]:
    """Lock a directory, and yield its descriptor.

    `how` is passed to `flock`. With LOCK_NB, raises BlockingIOError if the directory is locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def create_locked(folder: Path) -> Generator[None]:
    """Create and lock a directory.

    The lock shows garbage collection that the creation was not interrupted.
    """
    while True:
        folder.mkdir(mode=0o700)
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(folder, fcntl.LOCK_EX))
            except FileNotFoundError:  # garbage collection removed it before it was opened
                continue
            if folder.is_dir():  # it was not removed before the lock was taken
                yield
                return


@contextmanager
def create_temporary(root: Path) -> Generator[Path]:
    """Create a locked directory with a random name. It is removed at the end, or after a crash."""
    folder = root / f"{TEMPORARY}{secrets.token_hex(16)}"
    try:
        with create_locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_interrupted(folder: Path) -> None:
    """Remove a directory that no process has locked, unless its creation has finished."""
    with suppress(FileNotFoundError, BlockingIOError), lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        shutil.rmtree(folder, ignore_errors=True)
