"""The interface of every place of artifacts: engine, API and commands know nothing else of it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from skyrl_tx.artifacts.files import Artifact
from skyrl_tx.contract.ids import ArtifactId


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The database of the artifacts, see `store.identity`."""

    store_id: str
    epoch: int
    unclaimed: tuple[ArtifactId, ...] = ()
    """Artifacts that another or a later database may refer to; garbage collection keeps them."""


IDENTITY_DECODER = msgspec.json.Decoder(Identity)
"""Made once, because two threads cannot safely make decoders of a class; see `contract.codec`."""


def make_artifact_id(name: str) -> ArtifactId:
    """Return the artifact id for a name: always the same, so that a repeated request creates the same artifact."""
    return ArtifactId(f"art-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}")


class ArtifactStore(ABC):
    """All artifacts of one place. Any process may open and create artifacts; one process collects garbage.

    A place that does not respond raises OSError.
    """

    is_remote = False
    """Whether other machines reach the place, so that it may hold the artifacts of an empty data directory."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The name of the place for people, without credentials."""

    @abstractmethod
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

    @abstractmethod
    def has(self, artifact_id: ArtifactId) -> bool:
        """Return whether an artifact with this id exists."""

    @abstractmethod
    def open(self, artifact_id: ArtifactId) -> Artifact:
        """Return an artifact's description after checking all hashes.

        Raises ArtifactMissing, or ArtifactCorrupt with the name of the first bad file.
        """

    @abstractmethod
    def open_verified(self, artifact_id: ArtifactId) -> Artifact:
        """Return what `open` returns, and raise like it.

        Hashes are computed once per process, and again if a file's modification time changes.
        """

    @abstractmethod
    def describe(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Artifact:
        """Return the description of an artifact, or of one in the trash, from its manifest. Raises like `open`."""

    @contextmanager
    def keep_local(self, artifact_id: ArtifactId) -> Generator[None]:
        """Keep the files of an artifact on this machine until the end. Raises ArtifactMissing.

        In a local directory they stay without this, as long as a row refers to the artifact.
        """
        yield

    @abstractmethod
    def list_ids(self, *, trashed: bool = False) -> list[ArtifactId]:
        """Return the ids of all artifacts, or of those in the trash."""

    @abstractmethod
    def collect(
        self, keep: Collection[ArtifactId], looked_at: float | None = None, *, min_age_s: float = 600.0
    ) -> list[ArtifactId]:
        """Take away all artifacts except `keep`, and what interrupted creations left; return their ids.

        What a user may miss is moved to the trash: checkpoints and the last snapshots of runs. Other artifacts are
        removed. Artifacts younger than `min_age_s` at the time `looked_at` stay, because the row that refers to them
        may have been committed after `keep` was read. The default for `looked_at` is now.
        """

    @abstractmethod
    def remove(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact; return False if nothing may be removed now. Raises ArtifactMissing."""

    @abstractmethod
    def discard(self, artifact_id: ArtifactId) -> None:
        """Move an artifact to the trash. Raises ArtifactMissing."""

    @abstractmethod
    def restore(self, artifact_id: ArtifactId) -> None:
        """Move an artifact out of the trash. Raises ArtifactMissing. Record it within ten minutes, see `collect`."""

    @abstractmethod
    def empty_trash(self, *, retention_s: float, max_bytes: int) -> list[ArtifactId]:
        """Remove artifacts that were in the trash for `retention_s`; return their ids.

        The oldest others are removed while the trash takes more than `max_bytes`.
        """

    @abstractmethod
    def read_identity(self) -> Identity | None:
        """Return the recorded database; None if there is none or it cannot be read."""

    @abstractmethod
    def write_identity(self, identity: Identity) -> float:
        """Record the database atomically; return the time of the write by the clock of the place."""

    @abstractmethod
    def touch_identity(self) -> float | None:
        """Return the time by the clock of the place; None if artifacts have changed since `write_identity`."""

    @abstractmethod
    def forget_identity(self) -> None:
        """Forget the database, so that all artifacts that the next one does not refer to are unclaimed."""

    def sign_url(
        self, artifact_id: ArtifactId, file: str, ttl_s: float, method: Literal["GET", "HEAD"] = "GET"
    ) -> str | None:
        """Return a signed URL of a file that needs no credentials; None if the place has none."""
        return None
