"""Artifacts in an object store, with copies on this machine.

An artifact consists of these objects, which are never changed:

    art-…/<upload>/<file>   the files; each attempt to create the artifact has its own folder
    art-…/manifest.json     created last and only once; from then on the artifact exists
    art-…/trash             marks the artifact as trash, since the object was written
    art-…/restored          records when the artifact was restored from the trash
    art-…/removing          marks the removal: the artifact no longer exists

The object `identity.json` identifies the database, see `store.identity`. The object `clock` is
written to read the time of the object store. All ages are relative to this clock.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
from typing_extensions import override

from skyrl_tx.artifacts.base import IDENTITY_DECODER, ArtifactStore, Identity
from skyrl_tx.artifacts.bucket import Bucket, StoredObject
from skyrl_tx.artifacts.cache import ArtifactCache
from skyrl_tx.artifacts.files import (
    ARTIFACT_ID,
    MANIFEST,
    MANIFEST_DECODER,
    Artifact,
    ArtifactCorrupt,
    ArtifactMissing,
    Manifest,
    VerificationCache,
    encode,
    open_artifact,
    seal,
    verify,
)
from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.process.failpoints import failpoint

_log = logging.getLogger(__name__)

_IDENTITY = "identity.json"
_CLOCK = "clock"
_TRASH, _RESTORED, _REMOVING = "trash", "restored", "removing"
_UPLOAD_S = 86_400.0
"""Files without a manifest that are older than this belong to an interrupted creation."""


@dataclass(frozen=True, slots=True)
class _Objects:
    """The objects of one artifact, by their path in the folder of the artifact."""

    by_name: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])

    @property
    def exists(self) -> bool:
        return MANIFEST in self.by_name and _REMOVING not in self.by_name

    @property
    def is_trashed(self) -> bool:
        return self.exists and _TRASH in self.by_name

    @property
    def is_live(self) -> bool:
        return self.exists and _TRASH not in self.by_name

    @property
    def modified_at(self) -> float:
        """When the artifact was created or restored last."""
        return max(self.by_name[name].modified_at for name in (MANIFEST, _RESTORED) if name in self.by_name)

    @property
    def size_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self.by_name.values())

    def list_uploads(self) -> set[str]:
        """Return the folders of all attempts to create the artifact."""
        return {name.partition("/")[0] for name in self.by_name if "/" in name}


class ObjectArtifacts(ArtifactStore):
    """All artifacts under one URL of an object store."""

    is_remote = True

    def __init__(self, bucket: Bucket, cache: ArtifactCache, *, interactive: Bucket | None = None) -> None:
        """Use a bucket and a cache for copies on this machine.

        `interactive` is the same bucket with a short time limit, for calls on which a client waits:
        all calls except uploads, downloads and garbage collection.
        """
        self._bucket = bucket
        self._interactive = interactive or bucket
        self._cache = cache
        self._verified = VerificationCache()
        self._known: frozenset[ArtifactId] | None = None  # the artifacts at the last `write_identity`

    @property
    def location(self) -> str:
        """The URL of the object store."""
        return self._bucket.name

    def create(
        self,
        write: Callable[[Path], None],
        metadata: Mapping[str, str] | None = None,
        artifact_id: ArtifactId | None = None,
    ) -> Artifact:
        """Write the files into the cache, upload them, and create the manifest."""
        artifact_id = artifact_id or ArtifactId(f"art-{secrets.token_hex(16)}")
        if (existing := self._find_existing(artifact_id)) is not None:
            return existing

        upload = secrets.token_hex(8)
        with self._cache.create_folder() as folder:
            write(folder)
            self._cache.check_free_space()
            manifest = seal(folder, metadata or {}, upload)

            # Upload the files, then the manifest, unless another process was faster.
            for name in manifest.files:
                self._bucket.put(f"{artifact_id}/{upload}/{name}", folder / name)
                failpoint("artifact.uploading")
            failpoint("artifact.uploaded")
            if not self._commit(artifact_id, manifest):
                self._bucket.delete([f"{artifact_id}/{upload}/{name}" for name in manifest.files])
                return self.describe(artifact_id)
            failpoint("artifact.committed")
            self._cache.add(folder, artifact_id)
        return manifest.make_artifact(artifact_id, self._cache.get_path(artifact_id))

    @override
    def has(self, artifact_id: ArtifactId) -> bool:
        return bool(ARTIFACT_ID.fullmatch(artifact_id)) and self._list_objects(artifact_id).is_live

    def open(self, artifact_id: ArtifactId) -> Artifact:
        """Check all hashes of the copy on this machine and return the artifact's description."""
        return self._check_copy(artifact_id, open_artifact)

    def open_verified(self, artifact_id: ArtifactId) -> Artifact:
        """Like `open`, but the hashes of a copy are computed only once."""
        return self._check_copy(artifact_id, self._verified.check)

    def describe(self, artifact_id: ArtifactId, *, trashed: bool = False) -> Artifact:
        """Return the description of an artifact from its manifest.

        Checks the sizes of its objects.
        """
        objects = self._find_objects(artifact_id, trashed=trashed)
        manifest = self._read_manifest(artifact_id)
        for name, written in manifest.files.items():
            stored = objects.by_name.get(f"{manifest.upload}/{name}")
            if stored is None:
                raise ArtifactCorrupt(f"artifact {artifact_id}: file {name} is missing")
            if stored.size_bytes != written.size_bytes:
                raise ArtifactCorrupt(f"artifact {artifact_id}: file {name} does not match the manifest")
        return manifest.make_artifact(artifact_id, self._cache.get_path(artifact_id))

    @contextmanager
    def keep_local(self, artifact_id: ArtifactId) -> Generator[None]:
        """Copy an artifact to this machine if necessary, and keep it while the context is open."""
        self._find_objects(artifact_id)
        with ExitStack() as stack:
            while not stack.enter_context(self._cache.keep_local(artifact_id)):
                stack.pop_all().close()
                self._fetch(artifact_id)
            yield

    @override
    def list_ids(self, *, trashed: bool = False) -> list[ArtifactId]:
        return sorted(
            artifact_id
            for artifact_id, objects in self._list_all().items()
            if (objects.is_trashed if trashed else objects.is_live)
        )

    def collect(
        self, keep: Collection[ArtifactId], now: float | None = None, *, min_age_s: float = 600.0
    ) -> list[ArtifactId]:
        """Collect garbage, including the objects of creations that were interrupted a day ago."""
        now = self._read_clock() if now is None else now
        kept = frozenset(keep)
        collected: list[ArtifactId] = []
        self._cache.clean()
        for artifact_id, objects in sorted(self._list_all().items()):
            if _REMOVING in objects.by_name:
                self._erase(artifact_id, objects)
                continue
            self._remove_interrupted(artifact_id, objects, now)
            if objects.is_live and artifact_id not in kept and now - objects.modified_at >= min_age_s:
                self._trash_or_remove(artifact_id, objects)
                collected.append(artifact_id)
        return collected

    @override
    def remove(self, artifact_id: ArtifactId) -> bool:
        self._remove(artifact_id, self._find_objects(artifact_id))
        return True

    def discard(self, artifact_id: ArtifactId) -> None:
        """Mark an artifact as trash."""
        self._find_objects(artifact_id)
        failpoint("artifact.collect")
        self._bucket.put(f"{artifact_id}/{_TRASH}", b"")

    def restore(self, artifact_id: ArtifactId) -> None:
        """Move an artifact out of the trash.

        This method deletes `trash` and then looks for `removing`. A removal creates `removing` and
        then looks for `trash`. So at least one of the two processes notices the other. Raises
        ArtifactMissing also if another process is removing the artifact.
        """
        self._find_objects(artifact_id, trashed=True)
        self._bucket.put(f"{artifact_id}/{_RESTORED}", b"")
        self._bucket.delete([f"{artifact_id}/{_TRASH}"])
        self._find_objects(artifact_id)

    @override
    def empty_trash(self, *, retention_s: float, max_bytes: int) -> list[ArtifactId]:
        removed: list[ArtifactId] = []
        now = self._read_clock()
        trash = {artifact_id: objects for artifact_id, objects in self._list_all().items() if objects.is_trashed}
        total = sum(objects.size_bytes for objects in trash.values())

        for artifact_id, objects in sorted(trash.items(), key=lambda item: item[1].by_name[_TRASH].modified_at):
            if now - objects.by_name[_TRASH].modified_at < retention_s and total <= max_bytes:
                break
            if self._remove(artifact_id, objects, trashed=True):
                _log.info("removed artifact %s from the trash", artifact_id)
                removed.append(artifact_id)
            total -= objects.size_bytes
        return removed

    @override
    def read_identity(self) -> Identity | None:
        content = self._bucket.get(_IDENTITY)
        try:
            return None if content is None else IDENTITY_DECODER.decode(content)
        except msgspec.DecodeError:
            return None

    def write_identity(self, identity: Identity) -> float:
        """Record the identity. Return the time of the write by the clock of the object store."""
        known = frozenset(self.list_ids())
        self._bucket.put(_IDENTITY, encode(identity))
        self._known = known
        return self._bucket.get_modification_time(_IDENTITY)

    def touch_identity(self) -> float | None:
        """Return the time of the object store; None if artifacts changed since `write_identity`."""
        if self._known != frozenset(self.list_ids()):
            return None
        return self._read_clock()

    @override
    def forget_identity(self) -> None:
        self._bucket.delete([_IDENTITY])

    def sign_url(
        self, artifact_id: ArtifactId, file: str, ttl_s: float, method: Literal["GET", "HEAD"] = "GET"
    ) -> str | None:
        """Return a signed URL of a file. Raises ArtifactMissing for an unknown artifact or file."""
        self._find_objects(artifact_id)
        manifest = self._read_manifest(artifact_id)
        if file not in manifest.files:
            raise ArtifactMissing(f"artifact {artifact_id} has no file {file[:80]!r}")
        return self._interactive.sign_url(f"{artifact_id}/{manifest.upload}/{file}", ttl_s, method)

    def _read_clock(self) -> float:
        """Return the time by the clock of the object store, with a precision of one second."""
        self._bucket.put(_CLOCK, b"")
        return self._bucket.get_modification_time(_CLOCK)

    def _list_all(self) -> dict[ArtifactId, _Objects]:
        artifacts: dict[ArtifactId, _Objects] = {}
        for stored in self._bucket.list():
            folder, _, name = stored.path.partition("/")
            if name and ARTIFACT_ID.fullmatch(folder):
                artifacts.setdefault(ArtifactId(folder), _Objects()).by_name[name] = stored
        return artifacts

    def _list_objects(self, artifact_id: ArtifactId) -> _Objects:
        start = len(artifact_id) + 1
        return _Objects({stored.path[start:]: stored for stored in self._interactive.list(artifact_id)})

    def _find_objects(self, artifact_id: ArtifactId, *, trashed: bool = False) -> _Objects:
        objects = self._list_objects(artifact_id) if ARTIFACT_ID.fullmatch(artifact_id) else _Objects()
        if not (objects.is_trashed if trashed else objects.is_live):
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        return objects

    def _read_manifest(self, artifact_id: ArtifactId) -> Manifest:
        content = self._interactive.get(f"{artifact_id}/{MANIFEST}")
        if content is None:
            raise ArtifactMissing(f"no artifact {artifact_id[:80]!r}")
        try:
            manifest = MANIFEST_DECODER.decode(content)
        except msgspec.DecodeError as error:
            raise ArtifactCorrupt(f"artifact {artifact_id}: {MANIFEST} cannot be read ({error})") from error
        for name in (manifest.upload, *manifest.files):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ArtifactCorrupt(f"artifact {artifact_id}: {MANIFEST} names a file outside the artifact")
        return manifest

    def _find_existing(self, artifact_id: ArtifactId) -> Artifact | None:
        """Return the artifact if it exists, or None.

        Restores an artifact that is in the trash, and completes a removal that was interrupted.
        """
        objects = self._list_objects(artifact_id)
        if _REMOVING in objects.by_name:
            self._erase(artifact_id, objects)
            return None
        if objects.is_trashed:
            self.restore(artifact_id)
        return self.describe(artifact_id) if objects.exists else None

    def _commit(self, artifact_id: ArtifactId, manifest: Manifest) -> bool:
        """Create the manifest. Return False if another upload has created one already."""
        if self._bucket.create(f"{artifact_id}/{MANIFEST}", encode(manifest)):
            return True
        return self._read_manifest(artifact_id).upload == manifest.upload

    def _check_copy(self, artifact_id: ArtifactId, check: Callable[[Path], Artifact]) -> Artifact:
        """Return the result of `check` for the copy on this machine.

        A damaged copy is fetched again once.
        """
        for is_last in (False, True):
            with self.keep_local(artifact_id):
                try:
                    return check(self._cache.get_path(artifact_id))
                except ArtifactCorrupt:
                    if is_last:
                        raise
            _log.warning("the copy of artifact %s on this machine is damaged; fetching it again", artifact_id)
            self._cache.drop(artifact_id)
        raise AssertionError

    def _fetch(self, artifact_id: ArtifactId) -> None:
        """Copy an artifact to this machine.

        Raises ArtifactMissing, or ArtifactCorrupt if the artifact is damaged in the object store.
        """
        manifest = self._read_manifest(artifact_id)
        size = sum(file.size_bytes for file in manifest.files.values())
        with self._cache.create_folder(size) as folder:
            copy = folder / artifact_id
            copy.mkdir()
            for name, written in manifest.files.items():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                path = f"{artifact_id}/{manifest.upload}/{name}"
                if not self._bucket.download(path, copy / name, written.size_bytes):
                    raise ArtifactCorrupt(f"artifact {artifact_id}: file {name} is missing")
            (copy / MANIFEST).write_bytes(encode(manifest))
            verify(copy, manifest)
            self._cache.add(copy, artifact_id)

    def _trash_or_remove(self, artifact_id: ArtifactId, objects: _Objects) -> None:
        try:
            manifest = self._read_manifest(artifact_id)
        except ArtifactCorrupt:
            is_missed, title = True, "damaged"
        else:
            is_missed = manifest.is_missed
            title = manifest.make_artifact(artifact_id, self._cache.get_path(artifact_id)).title
        if not is_missed:
            _log.debug("removed unreferenced artifact %s", artifact_id)
            self._remove(artifact_id, objects)
            return
        failpoint("artifact.collect")
        self._bucket.put(f"{artifact_id}/{_TRASH}", b"")
        _log.info("moved artifact %s (%s) to the trash: nothing refers to it", artifact_id, title)

    def _remove(self, artifact_id: ArtifactId, objects: _Objects, *, trashed: bool = False) -> bool:
        """Mark an artifact as being removed, then remove its objects.

        With `trashed`, returns False and removes nothing if the artifact was restored meanwhile.
        """
        self._bucket.put(f"{artifact_id}/{_REMOVING}", b"")
        failpoint("artifact.collect")
        if trashed and self._bucket.get(f"{artifact_id}/{_TRASH}") is None:
            self._bucket.delete([f"{artifact_id}/{_REMOVING}"])
            return False
        self._erase(artifact_id, objects)
        return True

    def _erase(self, artifact_id: ArtifactId, objects: _Objects) -> None:
        """Remove the objects of an artifact that is marked as being removed.

        The mark is removed last.
        """
        self._bucket.delete([f"{artifact_id}/{name}" for name in sorted(objects.by_name) if name != _REMOVING])
        self._bucket.delete([f"{artifact_id}/{_REMOVING}"])
        self._cache.drop(artifact_id)

    def _remove_interrupted(self, artifact_id: ArtifactId, objects: _Objects, now: float) -> None:
        """Remove the files of interrupted uploads, which no manifest names, after `_UPLOAD_S`."""
        kept: set[str] = set()
        if objects.exists:
            if len(objects.list_uploads()) == 1:
                return
            kept = {self._read_manifest(artifact_id).upload, MANIFEST, _TRASH, _RESTORED}
        old = [name for name, stored in objects.by_name.items() if now - stored.modified_at >= _UPLOAD_S]
        self._bucket.delete([f"{artifact_id}/{name}" for name in old if name.partition("/")[0] not in kept])
