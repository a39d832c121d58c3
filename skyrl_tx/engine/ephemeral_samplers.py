"""Ephemeral samplers: usable as soon as their save has a result, written to disk in the background.

Until its files exist, such a sampler is in memory only. Its save is a log record of the model, so that replay creates
it again, and no snapshot that contains the save is recorded before the files are on disk.
"""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from skyrl_tx.artifacts import Artifact, ArtifactStore, ArtifactsUnreachable, make_artifact_id
from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ArtifactId, ModelId, RequestId, SamplerId, SamplingSessionId
from skyrl_tx.engine.background_writer import BackgroundWriter
from skyrl_tx.store import sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreUnreachable

_log = logging.getLogger(__name__)


def make_sampler_id(request_id: RequestId) -> SamplerId:
    """Return the id of the sampler that an ephemeral save creates: the same whenever the save is replayed."""
    return SamplerId(make_artifact_id(request_id))


@dataclass(slots=True, kw_only=True)
class _UnwrittenSampler:
    """A sampler without files. `error` is why the last write failed; None while it is being written."""

    model_id: ModelId
    effect_order: int
    snapshot: Snapshot
    error: Exception | None = None


@dataclass(slots=True)
class EphemeralSamplers:
    """Writes ephemeral samplers to disk, and holds those that are not written yet."""

    background_writer: BackgroundWriter
    store: Store
    artifacts: ArtifactStore
    metadata: Mapping[str, str]
    """Added to each artifact."""
    max_pending: int
    """A model whose save exceeds this number of unwritten samplers waits for its write."""
    _unwritten: dict[SamplerId, _UnwrittenSampler] = field(default_factory=dict[SamplerId, _UnwrittenSampler])
    _lost: dict[SamplerId, str] = field(default_factory=dict[SamplerId, str])

    def check_capacity(self) -> None:
        """Raise ServerError while as many writes have failed as may be pending."""
        errors = [each.error for each in self._unwritten.values() if each.error is not None]
        if len(errors) >= self.max_pending:
            raise ServerError(f"{len(errors)} ephemeral samplers wait to be written to the disk: {errors[-1]}")

    def add(self, sampler: SamplerId, model_id: ModelId, effect_order: int, snapshot: Snapshot) -> None:
        """Start to write a sampler that the log record `effect_order` created. No effect if it is pending already."""
        if sampler in self._unwritten:
            return
        self._lost.pop(sampler, None)
        self._unwritten[sampler] = _UnwrittenSampler(model_id=model_id, effect_order=effect_order, snapshot=snapshot)
        self._write(sampler, blocks=len(self._unwritten) > self.max_pending)

    def is_missing(self, name: SamplingSessionId, sampler: SamplerId) -> bool:
        """Whether a sampling session uses the sampler that was created for it, and its files were never written."""
        row = self.store.read(lambda tx: sampling_sessions.get(tx, name))
        return row is not None and row.sampler_id is not None and not self._has_files(sampler)

    def find_lost(self) -> dict[ModelId, dict[RequestId, SamplerId]]:
        """Return the samplers whose files a crash prevented, by model and by the save that created them."""
        lost: dict[ModelId, dict[RequestId, SamplerId]] = {}
        ephemeral = self.store.read(lambda tx: sampling_sessions.list_ephemeral(tx, self.store.engine_number))
        present = set(self.artifacts.list_ids()) if ephemeral else set[ArtifactId]()
        for each in ephemeral:
            if make_sampler_id(each.request_id) == each.sampler_id and each.sampler_id not in present:
                lost.setdefault(each.model_id, {})[each.request_id] = each.sampler_id
        return lost

    def find_lost_model(self, sampler: SamplerId) -> ModelId | None:
        """Return the model of a sampler whose files an ended engine did not write; None if there is none.

        An engine that is alone has looked for such samplers at its start.
        """
        if not self.store.is_shared or self._has_files(sampler):
            return None
        return self.store.read(lambda tx: sampling_sessions.find_model(tx, sampler))

    def mark_lost(self, lost: Iterable[SamplerId], reason: str) -> None:
        """Record why samplers cannot be used. Restoring their model clears it."""
        self._lost.update(dict.fromkeys(lost, reason))

    def get_pending_snapshot(self, sampler: SamplerId) -> Snapshot | None:
        """Return the weights of a sampler that is not written yet. Raises ServerError for a lost one."""
        if sampler in self._lost:
            raise ServerError(self._lost[sampler])
        unwritten = self._unwritten.get(sampler)
        return None if unwritten is None else unwritten.snapshot

    def is_written(self, sampler: SamplerId) -> bool:
        """Whether a sampler does not depend on the memory of this engine."""
        return sampler not in self._unwritten and sampler not in self._lost

    def has_unwritten(self, model_id: ModelId, up_to: int | None = None) -> bool:
        """Whether a sampler of this model has no files yet, of a log record up to `up_to` if that is given."""
        of_model = [each for each in self._unwritten.values() if each.model_id == model_id]
        return any(up_to is None or each.effect_order <= up_to for each in of_model)

    def retry_failed_writes(self) -> None:
        """Start the failed writes again."""
        for sampler, unwritten in self._unwritten.items():
            if unwritten.error is not None:
                unwritten.error = None
                self._write(sampler)

    def _has_files(self, sampler: SamplerId) -> bool:
        try:
            return self.artifacts.has(ArtifactId(sampler))
        except ArtifactsUnreachable as error:
            raise StoreUnreachable(str(error)) from error

    def _write(self, sampler: SamplerId, *, blocks: bool = False) -> None:
        unwritten = self._unwritten[sampler]
        metadata = {**self.metadata, "model_id": unwritten.model_id, "kind": "sampler_weights"}

        def on_written(future: Future[Artifact]) -> None:
            try:
                artifact = future.result()
            except Exception as error:  # the sampler stays in memory, and housekeeping tries again
                about = {"model_id": unwritten.model_id}
                _log.exception(
                    "cannot write ephemeral sampler %s of model %s", sampler, unwritten.model_id, extra=about
                )
                unwritten.error = error
                return
            del self._unwritten[sampler]
            self.store.write_soon(
                lambda tx: sampling_sessions.set_size(tx, unwritten.model_id, sampler, artifact.size_bytes)
            )

        self.background_writer.submit(
            lambda: self.artifacts.create(unwritten.snapshot.write, metadata, ArtifactId(sampler)),
            on_written,
            model_id=unwritten.model_id,
            blocks=blocks,
        )
