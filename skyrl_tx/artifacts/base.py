"""The interface of an artifact store, which is either a local directory or an object store.

The engine, the API process and the commands use only this interface.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from skyrl_tx.artifacts.files import Artifact
from skyrl_tx.contract.ids import ArtifactId


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The database that the artifacts belong to, see `store.identity`."""

    store_id: str
    """Random id of the database."""
    epoch: int
    """Counter that grows with each claim. A database with a smaller epoch is an older copy."""
    unclaimed: tuple[ArtifactId, ...] = ()
    """Artifacts that a different or newer database may refer to. Garbage collection keeps them."""


IDENTITY_DECODER = msgspec.json.Decoder(Identity)
"""Created once, because two threads cannot safely create decoders, see `contract.codec`."""


def make_artifact_id(name: str) -> ArtifactId:
    """Return the artifact id for a name.

    The same name always has the same id, so that a repeated request creates the same artifact.
    """
    return ArtifactId(f"art-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}")


class ArtifactStore(ABC):
    """All artifacts at one location.

    Any process may create and open artifacts. One process collects garbage. All methods raise
    OSError if the location does not respond.
    """

    is_remote = False
    """Whether the artifacts are in an object store, not in the data directory."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Directory or URL of the artifacts for messages, without credentials."""

    @abstractmethod
    def create(
        self,
        write: Callable[[Path], None],
        metadata: Mapping[str, str] | None = None,
        artifact_id: ArtifactId | None = None,
    ) -> Artifact:
        """Create an artifact from files.

        The artifact appears atomically and is flushed to disk.

        Args:
            write: Writes .safetensors, .json and .age files into an empty directory.
            metadata: Stored in the manifest.
            artifact_id: Id of the artifact; random by default. If the artifact exists, it is returned
                unchanged.

        Raises:
            ValueError: `write` wrote a link or a file with another suffix.
            CapacityError: The disk has less free space than the minimum before or after `write`.
        """

    @abstractmethod
    def has(self, artifact_id: ArtifactId) -> bool:
        """Return whether an artifact with this id exists."""

    @abstractmethod
    def open(self, artifact_id: ArtifactId) -> Artifact:
        """Check all hashes of an artifact and return its description.

        Raises ArtifactMissing, or ArtifactCorrupt with the name of the first bad file.
        """

    @abstractmethod
    def open_verified(self, artifact_id: ArtifactId) -> Artifact:
        """Like `open`, but compute the hashes only once per process.

        They are computed again if the modification time of a file changes.
        """

    @abstractmethod
    def describe(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Artifact:
        """Return the description of an artifact from its manifest, without checking hashes.

        Raises like `open`. `trashed` selects an artifact in the trash.
        """

    @contextmanager
    def keep_local(self, artifact_id: ArtifactId) -> Generator[None]:
        """Keep the files of an artifact on this machine while the context is open.

        Raises ArtifactMissing. The default does nothing, because files in a local directory stay as
        long as a row refers to the artifact.
        """
        yield

    @abstractmethod
    def list_ids(self, *, trashed: bool = False) -> list[ArtifactId]:
        """Return the ids of all artifacts outside the trash, or in the trash if `trashed`."""

    @abstractmethod
    def collect(
        self, keep: Collection[ArtifactId], now: float | None = None, *, min_age_s: float = 600.0
    ) -> list[ArtifactId]:
        """Collect garbage: trash or remove all artifacts except `keep`. Returns the removed ids.

        Checkpoints and snapshots are moved to the trash, because a user may miss them. Other
        artifacts are removed. The files of interrupted creations are removed as well.

        Artifacts that were younger than `min_age_s` at the time `now` are kept, because the
        row that refers to them may have been committed after the caller read `keep`. The
        default of `now` is the current time.
        """

    @abstractmethod
    def remove(self, artifact_id: ArtifactId) -> bool:
        """Remove an artifact.

        Return False if removal is not possible now. Raises ArtifactMissing.
        """

    @abstractmethod
    def discard(self, artifact_id: ArtifactId) -> None:
        """Move an artifact to the trash. Raises ArtifactMissing."""

    @abstractmethod
    def restore(self, artifact_id: ArtifactId) -> None:
        """Move an artifact out of the trash.

        Raises ArtifactMissing. The caller must store a row that refers to it within ten minutes,
        see `min_age_s` of `collect`.
        """

    @abstractmethod
    def empty_trash(self, *, retention_s: float, max_bytes: int) -> list[ArtifactId]:
        """Remove artifacts that have been in the trash for `retention_s`, and return their ids.

        While the trash takes more than `max_bytes`, the oldest artifacts are removed earlier.
        """

    def get_spare_bytes(self) -> float:
        """Return the free space beyond the minimum that stays free. Infinite in an object store."""
        return math.inf

    @abstractmethod
    def read_identity(self) -> Identity | None:
        """Return the recorded identity, or None if there is none or its file is damaged."""

    @abstractmethod
    def write_identity(self, identity: Identity) -> float:
        """Record the identity atomically.

        Return the time of the write by the clock of the location.
        """

    @abstractmethod
    def touch_identity(self) -> float | None:
        """Return the time by the clock of the location.

        Returns None if artifacts were added or removed since `write_identity`.
        """

    @abstractmethod
    def forget_identity(self) -> None:
        """Delete the identity.

        Artifacts that the next database does not refer to are then unclaimed.
        """

    def sign_url(
        self, artifact_id: ArtifactId, file: str, ttl_s: float, method: Literal["GET", "HEAD"] = "GET"
    ) -> str | None:
        """Return a signed URL of a file, which clients can open without credentials.

        The default returns None, because a local directory has no URLs.
        """
        return None
