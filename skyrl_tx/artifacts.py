"""Artifacts: immutable, hashed directories of weight files, created atomically under one root.

Files may be encrypted, see `skyrl_tx.age`.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from skyrl_tx.age import ENCRYPTED_SUFFIX
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.failpoints import failpoint

_log = logging.getLogger(__name__)

_ID = re.compile(r"art-[0-9a-f]{32}")
_TEMPORARY = ".tmp-"
_MANIFEST = "manifest.json"
_IDENTITY = "identity.json"
_TRASH = "trash"
_SUFFIXES = frozenset({".safetensors", ".json", ENCRYPTED_SUFFIX})
_Stamp = Mapping[str, tuple[int, int, int]]


class ArtifactMissing(Exception):
    """No artifact has this id."""


class ArtifactCorrupt(Exception):
    """An artifact's files differ from its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A complete artifact. `files` maps relative paths to sizes in bytes, without the manifest."""

    artifact_id: ArtifactId
    path: Path
    files: Mapping[str, int]
    metadata: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(self.files.values())

    @property
    def title(self) -> str:
        """The checkpoint or snapshot that it was written for, as far as the manifest says; for logs and lists."""
        model_id = self.metadata.get("model_id", "an unknown run")
        if "effect_order" in self.metadata:
            return f"snapshot {self.metadata['effect_order']} of {model_id}"
        return f"tinker://{model_id}/{self.metadata.get('kind', '?')}/{self.metadata.get('name', '?')}"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The database of the artifacts, see `store.identity`."""

    store_id: str
    epoch: int
    unclaimed: tuple[ArtifactId, ...] = ()
    """Artifacts that another or a later database may refer to; garbage collection keeps them."""


class FileHash(msgspec.Struct, frozen=True):
    """The content of one file."""

    size_bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    metadata: dict[str, str]
    files: dict[str, FileHash]


def artifact_id_for(name: str) -> ArtifactId:
    """Return the artifact id for a name: always the same, so that a repeated request creates the same artifact."""
    return ArtifactId(f"art-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}")


class ArtifactStore:
    """All artifacts under one root. Any process may open and create artifacts; one process collects garbage."""

    def __init__(self, root: Path, *, min_free_bytes: int = 0) -> None:
        """Use a directory; `create` leaves at least `min_free_bytes` of its disk free."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._min_free_bytes = min_free_bytes
        self._verified: dict[ArtifactId, _Stamp] = {}
        self._identity_written_ns: int | None = None

    def create(
        self,
        write: Callable[[Path], None],
        metadata: Mapping[str, str] | None = None,
        artifact_id: ArtifactId | None = None,
    ) -> Artifact:
        """Create an artifact from the files that `write` writes into a directory. Atomic and durable.

        Args:
            write: Writes .safetensors, .json and .age files into an empty directory.
            metadata: Stored in the manifest.
            artifact_id: Id of the artifact; random by default. An existing artifact is returned unchanged.

        Raises:
            ValueError: `write` wrote other files, or links.
            CapacityError: Less than the minimum of the disk is free, or would be.
        """
        artifact_id = artifact_id or ArtifactId(f"art-{secrets.token_hex(16)}")
        if self.has(artifact_id):
            return self.describe(artifact_id)
        temporary = self._root / f"{_TEMPORARY}{artifact_id}"
        path = self._root / artifact_id
        with _in_progress(temporary):
            try:
                self._check_free_space()
                write(temporary)
                self._check_free_space()
                files = {name: _finish(temporary / name) for name in sorted(_names(temporary))}
                failpoint("artifact.files")
                manifest = _Manifest(1, dict(metadata or {}), files)
                (temporary / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
                _fsync(temporary / _MANIFEST)
                for folder in [folder for folder, _, _ in os.walk(temporary, topdown=False)]:
                    _fsync(Path(folder))
                os.utime(temporary)
                failpoint("artifact.rename")
                temporary.rename(path)
                failpoint("artifact.renamed")
                _fsync(self._root)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return _artifact(path, manifest)

    def _check_free_space(self) -> None:
        free, reserved = shutil.disk_usage(self._root).free, self._min_free_bytes
        if free < reserved:
            raise CapacityError(
                f"the server's disk has {free / 2**20:,.0f} MiB left, and the last {reserved / 2**20:,.0f} MiB are not "
                "for weights: delete checkpoints, or ask the operator for space"
            )

    def has(self, artifact_id: ArtifactId) -> bool:
        """Return whether an artifact with this id exists."""
        return bool(_ID.fullmatch(artifact_id)) and (self._root / artifact_id).is_dir()

    def open(self, artifact_id: ArtifactId) -> Artifact:
        """Return an artifact's description after checking all hashes.

        Raises ArtifactMissing, or ArtifactCorrupt with the name of the first bad file.
        """
        return open_artifact(self._path(artifact_id))

    def describe(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Artifact:
        """Return the description of an artifact, or of one in the trash, from its manifest. Raises like `open`."""
        path = self._path(artifact_id, trashed=trashed)
        return _artifact(path, _read_manifest(path))

    def verified(self, artifact_id: ArtifactId) -> Artifact:
        """Return what `open` returns, and raise like it.

        Hashes are computed once per process, and again if a file's modification time changes.
        """
        path = self._path(artifact_id)
        manifest = _read_manifest(path)
        stamp = _stamp(path, (*manifest.files, _MANIFEST))
        if stamp is None or self._verified.get(artifact_id) != stamp:
            _verify(path, manifest)
        if stamp is not None:
            self._verified[artifact_id] = stamp
        return _artifact(path, manifest)

    def collect(
        self, keep: Collection[ArtifactId], looked_at: float | None = None, *, min_age_s: float = 600.0
    ) -> list[ArtifactId]:
        """Take away all artifacts except `keep`, and the directories of interrupted creations; return their ids.

        What a user may miss is moved to the trash: checkpoints and the last snapshots of runs. Other artifacts are
        removed. Artifacts younger than `min_age_s` at the time `looked_at` stay, because the row that refers to them
        may have been committed after `keep` was read. The default for `looked_at` is now. While `pinned` by another
        process, all artifacts stay.
        """
        looked_at = time.time() if looked_at is None else looked_at
        taken: list[ArtifactId] = []
        kept = frozenset(keep)
        with self._may_remove() as may_remove:
            for path in sorted(self._root.iterdir()) if may_remove else ():
                if path.name.startswith(_TEMPORARY):
                    _remove_interrupted(path)
                elif _ID.fullmatch(path.name) and path.name not in kept and looked_at - _modified_at(path) >= min_age_s:
                    self._take_away(path)
                    taken.append(ArtifactId(path.name))
        return taken

    def remove(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact; return False if artifacts are `pinned`. Raises ArtifactMissing."""
        with self._may_remove() as may_remove:
            if may_remove:
                self._remove(self._path(artifact_id))
        return may_remove

    def discard(self, artifact_id: ArtifactId) -> None:
        """Move an artifact to the trash. Raises ArtifactMissing."""
        path = self._path(artifact_id)
        (self._root / _TRASH).mkdir(mode=0o700, exist_ok=True)
        os.utime(path)  # first: an artifact in the trash is as old as its time there
        failpoint("artifact.collect")
        with suppress(ArtifactMissing):  # an earlier one of the same id
            self._remove(self._path(artifact_id, trashed=True))
        path.rename(self._root / _TRASH / artifact_id)

    def restore(self, artifact_id: ArtifactId) -> None:
        """Move an artifact out of the trash. Raises ArtifactMissing. Record it within ten minutes, see `collect`."""
        path = self._path(artifact_id, trashed=True)
        os.utime(path)
        path.rename(self._root / artifact_id)

    def empty_trash(self, *, retention_s: float, max_bytes: int) -> list[ArtifactId]:
        """Remove artifacts that were in the trash for `retention_s`; return their ids.

        The oldest others are removed while the trash takes more than `max_bytes`, or more than is free of the disk
        beyond `min_free_bytes`.
        """
        removed: list[ArtifactId] = []
        trash = sorted(self.ids(trashed=True), key=lambda each: _modified_at(self._root / _TRASH / each))
        sizes = {artifact_id: _size_bytes(self._root / _TRASH / artifact_id) for artifact_id in trash}
        with self._may_remove() as may_remove:
            for artifact_id in trash if may_remove else ():
                path, total = self._root / _TRASH / artifact_id, sum(sizes.values())
                is_old = time.time() - _modified_at(path) >= retention_s
                free = shutil.disk_usage(self._root).free - self._min_free_bytes
                if not is_old and total <= min(max_bytes, max(free, 0)):
                    break
                _log.info("removed %s from the trash", _label(path))
                self._remove(path)
                del sizes[artifact_id]
                removed.append(artifact_id)
        return removed

    def ids(self, *, trashed: bool = False) -> list[ArtifactId]:
        """Return the ids of all artifacts, or of those in the trash."""
        folder = self._root / _TRASH if trashed else self._root
        if not folder.is_dir():
            return []
        return sorted(ArtifactId(path.name) for path in folder.iterdir() if _ID.fullmatch(path.name))

    @contextmanager
    def pinned(self) -> Generator[None]:
        """Prevent the removal of artifacts, by any process; waits for a running removal."""
        with _locked(self._root, fcntl.LOCK_SH):
            yield

    @contextmanager
    def temporary(self) -> Generator[Path]:
        """Create a directory in the root, and remove it at the end, or after a crash."""
        folder = self._root / f"{_TEMPORARY}{secrets.token_hex(16)}"
        try:
            with _in_progress(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def identity(self) -> Identity | None:
        """Return the recorded database; None if there is none or it cannot be read."""
        try:
            return msgspec.json.decode((self._root / _IDENTITY).read_bytes(), type=Identity)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_identity(self, identity: Identity) -> float:
        """Record the database atomically; return the time of the write by the clock of the file system."""
        temporary = self._root / f"{_IDENTITY}.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(identity)))
        _fsync(temporary)
        os.utime(temporary)  # as for artifacts, whose ages are compared with it
        temporary.rename(self._root / _IDENTITY)
        _fsync(self._root)
        self._identity_written_ns = self._root.stat().st_mtime_ns
        return (self._root / _IDENTITY).stat().st_mtime

    def touch_identity(self) -> float | None:
        """Return the time by the clock of the file system; None if the root has changed since `write_identity`."""
        if self._root.stat().st_mtime_ns != self._identity_written_ns:
            return None
        os.utime(self._root / _IDENTITY)
        return (self._root / _IDENTITY).stat().st_mtime

    def forget_identity(self) -> None:
        """Forget the database, so that all artifacts that the next one does not refer to are unclaimed."""
        (self._root / _IDENTITY).unlink(missing_ok=True)

    @contextmanager
    def _may_remove(self) -> Generator[bool]:
        """Exclude `pinned`, and yield whether that is possible now."""
        with ExitStack() as stack:
            try:
                stack.enter_context(_locked(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _take_away(self, path: Path) -> None:
        if not _is_missed(path):
            _log.debug("removed unreferenced artifact %s", path.name)
            self._remove(path)
            return
        label = _label(path)
        self.discard(ArtifactId(path.name))
        _log.info("moved %s to the trash: nothing refers to it", label)

    def _remove(self, path: Path) -> None:
        # Renamed first, so that no reader sees it partially removed.
        renamed = path.rename(self._root / f"{_TEMPORARY}{path.name}")
        failpoint("artifact.collect")
        shutil.rmtree(renamed)

    def _path(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Path:
        path = (self._root / _TRASH if trashed else self._root) / artifact_id
        if not _ID.fullmatch(artifact_id) or path.is_symlink() or not path.is_dir():
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        return path


def open_artifact(path: Path) -> Artifact:
    """Return the description of an artifact in any place after checking all hashes. Raises ArtifactCorrupt."""
    manifest = _read_manifest(path)
    _verify(path, manifest)
    return _artifact(path, manifest)


def recorded_files(path: Path) -> dict[str, FileHash]:
    """Return the files of an artifact as its manifest records them, and the manifest itself. Raises ArtifactCorrupt."""
    return {**_read_manifest(path).files, _MANIFEST: hash_file(path / _MANIFEST)}


@contextmanager
def _locked(folder: Path, how: int) -> Generator[None]:
    """Lock a directory. Raises BlockingIOError if `how` says not to wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _in_progress(folder: Path) -> Generator[None]:
    """Create and lock a directory, so that garbage collection does not take it for an interrupted creation."""
    while True:
        folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # garbage collection removed it before it was opened
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.is_dir():  # not removed before the lock was taken
                yield
                return
        finally:
            os.close(descriptor)


def _remove_interrupted(folder: Path) -> None:
    """Remove a directory that no process has locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # its creation has finished
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_missed(path: Path) -> bool:
    """Whether a user may miss an artifact: all but ephemeral samplers, which their runs replace all the time.

    The manifests of checkpoints name the base model, those of snapshots their log sequence number.
    """
    try:
        metadata = _read_manifest(path).metadata
    except ArtifactCorrupt:
        return True
    return not metadata.keys().isdisjoint(("base_model", "effect_order"))


def _label(path: Path) -> str:
    """Return the id of an artifact and what it was, for logs."""
    try:
        return f"artifact {path.name} ({_artifact(path, _read_manifest(path)).title})"
    except ArtifactCorrupt:
        return f"artifact {path.name}"


def _modified_at(path: Path) -> float:
    return path.stat().st_mtime


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _artifact(path: Path, manifest: _Manifest) -> Artifact:
    files = {name: file.size_bytes for name, file in manifest.files.items()}
    return Artifact(artifact_id=ArtifactId(path.name), path=path, files=files, metadata=manifest.metadata)


def _names(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files under a folder. Raises ValueError for links and special files."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"artifact file {path.relative_to(folder)} is a link or no plain file")
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in files)


def _finish(path: Path) -> FileHash:
    """Flush a file to disk and return its size and hash."""
    if path.suffix not in _SUFFIXES or path.name == _MANIFEST:
        raise ValueError(f"artifact file {path.name} is not among {', '.join(sorted(_SUFFIXES))}, or named {_MANIFEST}")
    _fsync(path)
    return hash_file(path)


def hash_file(path: Path) -> FileHash:
    """Read a file and return its size and hash."""
    with path.open("rb") as file:
        return FileHash(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _read_manifest(path: Path) -> _Manifest:
    try:
        return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # without the path: clients read this
        raise ArtifactCorrupt(f"artifact {path.name}: {_MANIFEST} cannot be read ({reason})") from error


def _verify(path: Path, manifest: _Manifest) -> None:
    try:
        names = set(_names(path))
    except ValueError as error:
        raise ArtifactCorrupt(f"artifact {path.name}: {error}") from error
    for name in sorted(names ^ {*manifest.files, _MANIFEST}):
        raise ArtifactCorrupt(f"artifact {path.name}: file {name} is {'unknown' if name in names else 'missing'}")
    for name, written in manifest.files.items():
        if hash_file(path / name) != written:
            raise ArtifactCorrupt(f"artifact {path.name}: file {name} is not as it was written")


def _stamp(path: Path, names: Collection[str]) -> _Stamp | None:
    """Return inode, size and modification time of each file; None if one is missing."""
    try:
        found = {name: (path / name).stat() for name in names}
    except OSError:
        return None
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
