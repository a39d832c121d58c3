"""The files of an artifact, their manifest, and their encryption.

`seal` hashes the files and writes the manifest. `verify` compares the files with the manifest.
`encrypt_files` encrypts the files for age recipients (age-encryption.org/v1) before they are sealed.
"""

import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyrage

from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.process.failpoints import failpoint

ARTIFACT_ID = re.compile(r"art-[0-9a-f]{32}")
MANIFEST = "manifest.json"
_ENCRYPTED_SUFFIX = ".age"
_SUFFIXES = frozenset({".safetensors", ".json", _ENCRYPTED_SUFFIX})
_age: Any = pyrage  # the extension is untyped
Stamp = Mapping[str, tuple[int, int, int]]
"""Inode, size and modification time of each file. If they are unchanged, so is the file."""


class ArtifactMissing(Exception):
    """No artifact has this id."""


class ArtifactCorrupt(Exception):
    """An artifact's files differ from its manifest."""


class ArtifactsUnreachable(OSError):
    """A request to the object store failed after all retries. A later request may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EREMOTEIO, message)

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The description of a complete artifact.

    `files` maps relative paths to sizes in bytes. The manifest is not included.
    """

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
        """The checkpoint or snapshot that the artifact was written for, for log lines and lists.

        For example `tinker://…/weights/final`. Parts that the manifest does not have are shown as
        `?`.
        """
        model_id = self.metadata.get("model_id", "an unknown run")
        if "effect_order" in self.metadata:
            return f"snapshot {self.metadata['effect_order']} of {model_id}"
        return f"tinker://{model_id}/{self.metadata.get('kind', '?')}/{self.metadata.get('name', '?')}"


class FileHash(msgspec.Struct, frozen=True):
    """Size and hash of one file."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `manifest.json`."""

    version: int
    metadata: dict[str, str]
    files: dict[str, FileHash]
    upload: str = ""
    """In an object store, the folder of the files.

    Each attempt to create the artifact has its own folder.
    """

    @property
    def is_missed(self) -> bool:
        """Whether a user may miss the artifact.

        Ephemeral samplers are replaced often, so users do not miss them. The manifest of a
        checkpoint contains the base model, the manifest of a snapshot its log sequence number.
        """
        return not self.metadata.keys().isdisjoint(("base_model", "effect_order"))

    def make_artifact(self, artifact_id: ArtifactId, path: Path) -> Artifact:
        """Return the description of an artifact with this manifest."""
        files = {name: file.size_bytes for name, file in self.files.items()}
        return Artifact(artifact_id=artifact_id, path=path, files=files, metadata=self.metadata)


MANIFEST_DECODER = msgspec.json.Decoder(Manifest)
"""Made once, because two threads cannot safely make decoders of a class; see `contract.codec`."""


def check_free_space(folder: Path, reserved: int) -> None:
    """Raise CapacityError if less than `reserved` bytes are free on the disk of a folder."""
    free = shutil.disk_usage(folder).free
    if free < reserved:
        raise CapacityError(
            f"the server's disk has {free / 2**20:,.0f} MiB left, but {reserved / 2**20:,.0f} MiB must stay free: "
            "delete checkpoints and try again in a few minutes, or ask the operator for more space"
        )


def seal(folder: Path, metadata: Mapping[str, str], upload: str = "") -> Manifest:
    """Hash the files in a folder, write their manifest, and flush everything to disk.

    Raises ValueError for links and for files with other suffixes.
    """
    files = {name: _flush_and_hash(folder / name) for name in sorted(_list_names(folder))}
    failpoint("artifact.files")
    manifest = Manifest(1, dict(metadata), files, upload)
    (folder / MANIFEST).write_bytes(encode(manifest))
    fsync(folder / MANIFEST)
    for directory in [parent for parent, _, _ in os.walk(folder, topdown=False)]:
        fsync(Path(directory))
    return manifest


def encode(content: msgspec.Struct) -> bytes:
    """Return a record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content))


def open_artifact(path: Path) -> Artifact:
    """Check all hashes of an artifact directory and return its description.

    Raises ArtifactCorrupt.
    """
    manifest = read_manifest(path)
    verify(path, manifest)
    return manifest.make_artifact(ArtifactId(path.name), path)


def read_file_hashes(path: Path) -> dict[str, FileHash]:
    """Return the hashes of an artifact's files from its manifest, and the hash of the manifest.

    Raises ArtifactCorrupt.
    """
    return {**read_manifest(path).files, MANIFEST: hash_file(path / MANIFEST)}


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of an artifact. Raises ArtifactCorrupt."""
    try:
        return MANIFEST_DECODER.decode((path / MANIFEST).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # clients must not see the path
        raise ArtifactCorrupt(f"artifact {path.name}: {MANIFEST} cannot be read ({reason})") from error


def verify(path: Path, manifest: Manifest) -> None:
    """Compare the files of an artifact with its manifest.

    Raises ArtifactCorrupt for the first bad file.
    """
    try:
        names = set(_list_names(path))
    except ValueError as error:
        raise ArtifactCorrupt(f"artifact {path.name}: {error}") from error
    for name in sorted(names ^ {*manifest.files, MANIFEST}):
        raise ArtifactCorrupt(f"artifact {path.name}: file {name} is {'unknown' if name in names else 'missing'}")
    for name, written in manifest.files.items():
        if hash_file(path / name) != written:
            raise ArtifactCorrupt(f"artifact {path.name}: file {name} does not match the manifest")


class VerificationCache:
    """Remembers the artifacts that this process has checked, until a modification time changes."""

    def __init__(self) -> None:
        self._stamps: dict[ArtifactId, Stamp] = {}
        self._locks: dict[ArtifactId, threading.Lock] = {}

    def check(self, path: Path) -> Artifact:
        """Like `open_artifact`, but hashes are computed only once, and by one thread at a time."""
        artifact_id, manifest = ArtifactId(path.name), read_manifest(path)
        with self._locks.setdefault(artifact_id, threading.Lock()):
            stamp = _read_stamp(path, (*manifest.files, MANIFEST))
            if stamp is None or self._stamps.get(artifact_id) != stamp:
                verify(path, manifest)
            if stamp is not None:
                self._stamps[artifact_id] = stamp
        return manifest.make_artifact(artifact_id, path)


def hash_file(path: Path) -> FileHash:
    """Return the size and the hash of a file."""
    with path.open("rb") as file:
        return FileHash(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_size_bytes(path: Path) -> int:
    """Return the total size of all files under a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _list_names(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files under a folder.

    Raises ValueError for links and special files.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"artifact file {path.relative_to(folder)} is a link or a special file")
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in files)


def _flush_and_hash(path: Path) -> FileHash:
    """Flush a file to disk and return its size and hash."""
    if path.suffix not in _SUFFIXES or path.name == MANIFEST:
        raise ValueError(
            f"artifact file {path.name} must end in {', '.join(sorted(_SUFFIXES))} and must not be named {MANIFEST}"
        )
    fsync(path)
    return hash_file(path)


def _read_stamp(path: Path, names: Collection[str]) -> Stamp | None:
    """Return inode, size and modification time of each file, or None if a file is missing."""
    try:
        statuses = {name: (path / name).stat() for name in names}
    except OSError:
        return None
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses.items()}


def encrypt_files(directory: Path, recipients: Collection[str]) -> None:
    """Replace each file in a directory by an encrypted file with the additional suffix `.age`."""
    keys = parse_recipients(recipients)
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        _age.encrypt_file(str(path), f"{path}{_ENCRYPTED_SUFFIX}", keys)
        path.unlink()


def parse_recipients(recipients: Collection[str]) -> list[Any]:
    """Parse age or SSH public keys. Raises UserError for anything else."""
    keys: list[Any] = []
    for text in recipients:
        if text.upper().startswith("AGE-SECRET-KEY-"):  # the error must not quote it, because errors are stored
            raise UserError(
                "age_encryption_recipients: contains a secret key; pass the public key (age1…) instead, which "
                "`age-keygen -y` prints"
            )
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            keys.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise UserError(
                f"age_encryption_recipients {text[:100]!r}: neither an age1… nor an SSH public key ({error})"
            ) from error
    return keys
