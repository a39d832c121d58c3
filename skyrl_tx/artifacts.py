"""Artifacts: immutable, hashed directories of weight files, created atomically under one root.

Files may be encrypted to age recipients (age-encryption.org/v1).
"""

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
from typing import Any

import msgspec
import pyrage

from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.failpoints import failpoint

_ID = re.compile(r"art-[0-9a-f]{32}")
_TEMPORARY = ".tmp-"
_MANIFEST = "manifest.json"
ENCRYPTED_SUFFIX = ".age"
_SUFFIXES = frozenset({".safetensors", ".json", ENCRYPTED_SUFFIX})
_age: Any = pyrage  # the extension is untyped
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


class _File(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    metadata: dict[str, str]
    files: dict[str, _File]


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
        path = self._path(artifact_id)
        manifest = _read_manifest(path)
        _verify(path, manifest)
        return _artifact(path, manifest)

    def describe(self, artifact_id: ArtifactId) -> Artifact:
        """Return an artifact's description from its manifest. Raises like `open`."""
        path = self._path(artifact_id)
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

    def collect(self, keep: Collection[ArtifactId], *, min_age_s: float = 600.0) -> list[ArtifactId]:
        """Remove all artifacts except `keep`, and the directories of interrupted creations. Returns the removed ids.

        Artifacts younger than `min_age_s` stay, because the row that refers to them may not be committed yet.
        """
        removed: list[ArtifactId] = []
        kept = frozenset(keep)
        for path in sorted(self._root.iterdir()):
            if path.name.startswith(_TEMPORARY):
                _remove_interrupted(path)
            elif _ID.fullmatch(path.name) and path.name not in kept and time.time() - path.stat().st_mtime >= min_age_s:
                self.remove(ArtifactId(path.name))
                removed.append(ArtifactId(path.name))
        return removed

    def remove(self, artifact_id: ArtifactId) -> None:
        """Remove an artifact. Raises ArtifactMissing."""
        # Renamed first, so that no reader sees it partially removed.
        renamed = self._path(artifact_id).rename(self._root / f"{_TEMPORARY}{artifact_id}")
        failpoint("artifact.collect")
        shutil.rmtree(renamed)

    def _path(self, artifact_id: ArtifactId) -> Path:
        path = self._root / artifact_id
        if not _ID.fullmatch(artifact_id) or path.is_symlink() or not path.is_dir():
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        return path


@contextmanager
def _in_progress(folder: Path) -> Generator[None]:
    """Create and lock a directory, so that garbage collection does not take it for an interrupted creation."""
    while True:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY)
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


def _finish(path: Path) -> _File:
    """Flush a file to disk and return its size and hash."""
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


def encrypt_files(directory: Path, recipients: Collection[str]) -> None:
    """Encrypt each file of a directory in place; the encrypted file has the suffix `.age`."""
    keys = parse_recipients(recipients, "age_encryption_recipients")
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        _age.encrypt_file(str(path), f"{path}{ENCRYPTED_SUFFIX}", keys)
        path.unlink()


def parse_recipients(recipients: Collection[str], field: str) -> list[Any]:
    """Return age or SSH public keys. Raises UserError, naming the field, for other texts."""
    keys: list[Any] = []
    for text in recipients:
        if text.upper().startswith("AGE-SECRET-KEY-"):  # not quoted in the error, because errors are stored
            raise UserError(
                f"{field}: contains a secret key; recipients are public keys (age1…), as `age-keygen -y` prints"
            )
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            keys.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise UserError(f"{field} {text[:100]!r}: neither an age1… nor an SSH public key ({error})") from error
    return keys
