"""Weight files: immutable directories under random ids, made atomically, hashed, confined to one root."""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.failpoints import reach

_ID = re.compile(r"art-[0-9a-f]{32}")
_TEMPORARY = ".tmp-"
_MANIFEST = "manifest.json"
_SUFFIXES = frozenset({".safetensors", ".json", ".age"})
_Stamp = Mapping[str, tuple[int, int, int]]


class ArtifactMissing(Exception):
    """There is no artifact of that id."""


class ArtifactCorrupt(Exception):
    """An artifact's files are not those that were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A finished artifact. `files` has the size of each file, by its path within; the manifest is none of them."""

    artifact_id: ArtifactId
    path: Path
    files: Mapping[str, int]
    metadata: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


class _File(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    metadata: dict[str, str]
    files: dict[str, _File]


def artifact_id_for(name: str) -> ArtifactId:
    """The id of what a request of this name makes, the same whenever it is made again."""
    return ArtifactId(f"art-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}")


class ArtifactStore:
    """All artifacts under one root. Many processes may open and create at once; one alone collects."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._verified: dict[ArtifactId, _Stamp] = {}

    def create(
        self,
        write: Callable[[Path], None],
        metadata: Mapping[str, str] | None = None,
        artifact_id: ArtifactId | None = None,
    ) -> Artifact:
        """Let `write` fill a directory, then make it an artifact: wholly and on disk, or not at all.

        One that exists under the id is returned as it is; by default the id is new and random.
        Raises ValueError if anything but plain .safetensors, .json and .age files was written.
        """
        artifact_id = artifact_id or ArtifactId(f"art-{secrets.token_hex(16)}")
        if self.has(artifact_id):
            return self.describe(artifact_id)
        temporary = self._root / f"{_TEMPORARY}{artifact_id}"
        path = self._root / artifact_id
        with _in_progress(temporary):
            try:
                write(temporary)
                files = {name: _finish(temporary / name) for name in sorted(_names(temporary))}
                reach("artifact.files")
                manifest = _Manifest(1, dict(metadata or {}), files)
                (temporary / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
                _fsync(temporary / _MANIFEST)
                for folder in [folder for folder, _, _ in os.walk(temporary, topdown=False)]:
                    _fsync(Path(folder))
                os.utime(temporary)
                reach("artifact.rename")
                temporary.rename(path)
                reach("artifact.renamed")
                _fsync(self._root)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return _artifact(path, manifest)

    def has(self, artifact_id: ArtifactId) -> bool:
        """Whether there is an artifact of that id."""
        return bool(_ID.fullmatch(artifact_id)) and (self._root / artifact_id).is_dir()

    def open(self, artifact_id: ArtifactId, *, verify: bool = True) -> Path:
        """The directory of an artifact. `verify` reads every file.

        Raises ArtifactMissing, or ArtifactCorrupt naming the first file that is not as written.
        """
        path = self._path(artifact_id)
        if verify:
            _verify(path, _read_manifest(path))
        return path

    def describe(self, artifact_id: ArtifactId) -> Artifact:
        """What is known of an artifact without reading it. Raises as `open`."""
        path = self._path(artifact_id)
        return _artifact(path, _read_manifest(path))

    def verified(self, artifact_id: ArtifactId) -> Artifact:
        """As `describe`, of files that are as they were written; raises as `open`.

        They are read once in this process, and again when one was touched since.
        """
        path = self._path(artifact_id)
        manifest = _read_manifest(path)
        stamp = _stamp(path, (*manifest.files, _MANIFEST))
        if stamp is None or self._verified.get(artifact_id) != stamp:
            _verify(path, manifest)
        if stamp is not None:
            self._verified[artifact_id] = stamp
        return _artifact(path, manifest)

    def collect(self, keep: Collection[ArtifactId], *, min_age_s: float = 600.0) -> list[ArtifactId]:
        """Remove all artifacts but these, and what creations that never ended left; returns those removed.

        One younger than `min_age_s` stays: the row that points at it may not be committed yet.
        """
        removed: list[ArtifactId] = []
        kept = frozenset(keep)
        for path in sorted(self._root.iterdir()):
            if path.name.startswith(_TEMPORARY):
                _sweep(path)
            elif _ID.fullmatch(path.name) and path.name not in kept and time.time() - path.stat().st_mtime >= min_age_s:
                self.remove(ArtifactId(path.name))
                removed.append(ArtifactId(path.name))
        return removed

    def remove(self, artifact_id: ArtifactId) -> None:
        """Remove an artifact that nothing points at. Raises ArtifactMissing."""
        doomed = self._path(artifact_id).rename(self._root / f"{_TEMPORARY}{artifact_id}")  # never seen in part
        reach("artifact.collect")
        shutil.rmtree(doomed)

    def _path(self, artifact_id: ArtifactId) -> Path:
        path = self._root / artifact_id
        if not _ID.fullmatch(artifact_id) or path.is_symlink() or not path.is_dir():
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        return path


@contextmanager
def _in_progress(folder: Path) -> Generator[None]:
    """Make a directory and hold it, so that no other process takes it for what a killed one left."""
    while True:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.is_dir():  # not swept up between the two
                yield
                return
        finally:
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove a directory that nobody holds."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # finished meanwhile
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _artifact(path: Path, manifest: _Manifest) -> Artifact:
    files = {name: file.size_bytes for name, file in manifest.files.items()}
    return Artifact(artifact_id=ArtifactId(path.name), path=path, files=files, metadata=manifest.metadata)


def _names(folder: Path) -> Iterator[str]:
    """Paths of all files under a folder, relative to it. Raises ValueError for what is no plain file."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"artifact file {path.relative_to(folder)} is a link or no plain file")
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in files)


def _finish(path: Path) -> _File:
    """Bring a file to the disk, and take its hash."""
    if path.suffix not in _SUFFIXES or path.name == _MANIFEST:
        raise ValueError(f"artifact file {path.name} is not among {', '.join(sorted(_SUFFIXES))}, or named {_MANIFEST}")
    _fsync(path)
    return _hashed(path)


def _hashed(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _read_manifest(path: Path) -> _Manifest:
    try:
        return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactCorrupt(f"artifact {path.name}: {_MANIFEST} cannot be read ({error})") from error


def _verify(path: Path, manifest: _Manifest) -> None:
    try:
        names = set(_names(path))
    except ValueError as error:
        raise ArtifactCorrupt(f"artifact {path.name}: {error}") from error
    for name in sorted(names ^ {*manifest.files, _MANIFEST}):
        raise ArtifactCorrupt(f"artifact {path.name}: file {name} is {'unknown' if name in names else 'missing'}")
    for name, written in manifest.files.items():
        if _hashed(path / name) != written:
            raise ArtifactCorrupt(f"artifact {path.name}: file {name} is not as it was written")


def _stamp(path: Path, names: Collection[str]) -> _Stamp | None:
    """What changes with each write to these files; None if one is not there."""
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
