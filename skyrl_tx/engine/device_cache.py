"""Caches of the models and samplers on the device.

If the device is full, the least recently used model or sampler is evicted. An evicted model has a
snapshot on disk. It is restored in the same way as after a crash.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract import codec
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot
from skyrl_tx.contract.errors import BackendLost, ServerError, UserError
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.engine.background_writer import BackgroundWriter, EphemeralSamplers
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.engine.request_log import RequestLog
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.store import manifests, models
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_UNUSABLE = {
    "ready": "exists already",
    "creating": "was never created",
    "failed": "could not be created",
    "unloaded": "was unloaded",
    "left": "was left behind by a start with --fresh; its saved weights can be loaded",
    "expired": "was removed because its session sent no heartbeats; its saved weights can be loaded",
}
_DELETED = "was deleted"


class SlotsBusy(ServerError):
    """All models on the device are in use, so no other model can be restored now."""


@dataclass(slots=True, kw_only=True)
class LiveModel:
    """A model that the engine knows, on the device or evicted."""

    model_id: ModelId
    session_id: SessionId
    owner: str
    base_model: str
    spec: ModelSpec
    effect_order: int
    """Its last log sequence number, committed or being committed."""
    gradient_error: str | None
    """Why the gradient is incomplete, or None if it is complete."""
    num_steps: int = 0
    """Optimizer steps since the start of the run, committed or being committed."""
    is_resident: bool = False
    snapshot_order: int = 0
    """Log sequence number of the newest snapshot, on disk or being written."""
    snapshot_at: float = field(default_factory=lambda: time.monotonic())
    snapshot_took_s: float = 0.0
    """Seconds that the newest snapshot took.

    Infinite if it failed, so that the next one starts by age only.
    """
    last_used: float = 0.0

    def make_metadata(self, base_model: str) -> dict[str, str]:
        """Return the metadata of an artifact with the current state of the model.

        `base_model` is the name of the base model to write into it.
        """
        return manifests.make_run_metadata(
            model_id=self.model_id,
            owner=self.owner,
            base_model=base_model,
            spec=self.spec,
            now=time.time(),
            step=self.num_steps,
        )

    def assign_effect_order(self) -> int:
        """Assign the next log sequence number."""
        self.effect_order += 1
        return self.effect_order


@dataclass(slots=True)
class ModelCache:
    """The models in training: a cache of the models on the device."""

    backend: AbstractBackend
    max_models: int
    store: Store
    request_log: RequestLog
    background_writer: BackgroundWriter
    recovery: Recovery
    ephemeral_samplers: EphemeralSamplers
    busy: set[ModelId] = field(default_factory=set[ModelId])
    """Models with running passes, which must not be evicted."""
    _models: dict[ModelId, LiveModel] = field(default_factory=dict[ModelId, LiveModel])

    def get(self, model_id: ModelId, *, creating: bool = False) -> LiveModel:
        """Return a model. Raises UserError if it cannot be used."""
        if model_id not in self._models:
            self._models[model_id] = self._read_model(model_id, creating)
        return self._models[model_id]

    def ensure_resident(self, model_ids: Collection[ModelId]) -> None:
        """Restore models that are not on the device, and mark all of them as used.

        There must not be more models than fit on the device.
        """
        for model_id in model_ids:
            model = self.get(model_id)
            if not model.is_resident:
                self.free_slot(keep=model_ids)
                self.request_log.wait_for_commits()  # the replay reads the log
                model.snapshot_order = self.recovery.restore(model_id, model.spec)
                model.is_resident = True
                self.request_log.meters.restores.inc()
            self.mark_used(model)

    def mark_used(self, model: LiveModel) -> None:
        """Make a model the most recently used one."""
        model.last_used = time.monotonic()

    def free_slot(self, keep: Collection[ModelId] = ()) -> None:
        """If all adapter slots are taken, evict the least recently used model.

        Raises SlotsBusy if all models are busy or in `keep`.
        """
        resident = self.list_resident()
        if len(resident) < self.max_models:
            return
        candidates = [model for model in resident if model.model_id not in self.busy and model.model_id not in keep]
        if not candidates:
            raise SlotsBusy(f"all {self.max_models} model slots are in use")
        self.evict(min(candidates, key=lambda model: model.last_used))

    def evict(self, model: LiveModel) -> None:
        """Remove a model from the device. Its next request restores it."""
        self.snapshot_and_wait(model)
        self.backend.delete_model(model.model_id)
        model.is_resident = False
        _log.info("evicted model %s", model.model_id, extra={"model_id": model.model_id, "owner": model.owner})

    def discard(self, model_id: ModelId) -> None:
        """Delete a model from memory and from the device. Unknown models are ignored."""
        self._models.pop(model_id, None)
        self.backend.delete_model(model_id)

    def forget_evicted(self, is_needed: Callable[[ModelId], bool]) -> None:
        """Forget evicted models that are not needed. Their next request reads their rows again."""
        for model in list(self._models.values()):
            if not model.is_resident and not is_needed(model.model_id):
                del self._models[model.model_id]

    def list_resident(self) -> list[LiveModel]:
        """Return the models on the device."""
        return [model for model in self._models.values() if model.is_resident]

    def start_due_snapshots(self, settings: EngineSettings) -> None:
        """Start snapshots of models whose snapshot is too old, or too many requests behind."""
        now = time.monotonic()
        for model in self.list_resident():
            num_behind, age_s = model.effect_order - model.snapshot_order, now - model.snapshot_at
            may_start = age_s * settings.snapshot_max_share >= model.snapshot_took_s
            is_far_behind = num_behind >= settings.snapshot_interval_requests and may_start
            if is_far_behind or (num_behind and age_s >= settings.snapshot_interval_s):
                self._start_snapshot(model)

    def snapshot_and_wait(self, model: LiveModel) -> None:
        """Write a snapshot of the model's current state, unless there is one, and wait for it."""
        if model.effect_order != model.snapshot_order:
            self._start_snapshot(model)
        self.background_writer.wait_for(model.model_id)

    def _read_model(self, model_id: ModelId, creating: bool) -> LiveModel:
        self.request_log.wait_for_commits()
        row = self.store.read(lambda tx: models.get(tx, model_id))
        if row is None:
            raise UserError(f"model_id {model_id!r} does not exist")
        if row.status != ("creating" if creating else "ready"):
            why = _DELETED if row.deleted_at is not None else _UNUSABLE[row.status]
            raise UserError(f"model_id {model_id!r} {why}")

        spec = codec.decode(row.spec)
        assert isinstance(spec, ModelSpec)
        return LiveModel(
            model_id=model_id,
            session_id=row.session_id,
            owner=self.store.read(lambda tx: models.get_owner(tx, model_id)) or "",
            base_model=row.base_model,
            spec=spec,
            effect_order=row.effect_order,
            gradient_error=row.poisoned_by,
            num_steps=row.num_steps,
        )

    def _start_snapshot(self, model: LiveModel) -> None:
        """Copy the state from the device, and write it in the background.

        If this fails, the previous snapshot stays, and the log still has all requests after it.
        """
        model_id, effect_order = model.model_id, model.effect_order
        started = time.monotonic()
        before, model.snapshot_order, model.snapshot_at = model.snapshot_order, effect_order, started

        def on_failure(error: Exception) -> None:
            extra = {"model_id": model_id, "owner": model.owner}
            _log.error(
                "snapshot of model %s after request %d failed", model_id, effect_order, exc_info=error, extra=extra
            )
            self.request_log.meters.count_snapshot(failed=True)
            model.snapshot_order = min(before, model.snapshot_order)
            model.snapshot_took_s = math.inf

        # Copy the state from the device.
        try:
            snapshot = self.backend.capture(model_id, ALL_PARTS)
        except BackendLost:
            raise
        except Exception as error:
            on_failure(error)
            return
        failpoint("snapshot.capture")

        def on_written(written: Future[Artifact]) -> None:
            if model_id not in self._models:  # it has been unloaded
                return
            model.snapshot_took_s = time.monotonic() - started
            try:
                artifact_id = written.result().artifact_id
                failpoint("snapshot.written")
            except Exception as error:
                on_failure(error)
                return

            # Do not use the snapshot if an earlier ephemeral sampler is not on disk: only a replay
            # from the previous snapshot could create the sampler again.
            if self.ephemeral_samplers.has_unwritten(model_id, effect_order):
                model.snapshot_order = min(before, model.snapshot_order)
                return

            # Record the snapshot after the requests that it contains.
            self.request_log.wait_for_commits()
            replaced = self.store.write(
                lambda tx: models.put_snapshot(tx, model_id, artifact_id, effect_order, time.time())
            )
            self.request_log.meters.count_snapshot(failed=False)
            if replaced is not None:
                self._start_removal(replaced)

        # Write it.
        extra = {**model.make_metadata(model.base_model), "effect_order": str(effect_order)}
        self.background_writer.submit(self.recovery.make_writer(snapshot.write, extra), on_written, model_id=model_id)

    def _start_removal(self, replaced: ArtifactId) -> None:
        def on_removed(removed: Future[bool]) -> None:
            if (error := removed.exception()) is not None:  # garbage collection removes it later
                _log.warning("cannot remove the replaced snapshot %s: %s", replaced, error)

        self.background_writer.submit(lambda: self.recovery.artifacts.remove(replaced), on_removed)


@dataclass(slots=True)
class _SamplerSlot:
    """A slot with a sampler.

    `used_by` are the client sessions that loaded it or sampled from it.
    """

    is_loaded: bool = False
    used_by: set[SessionId] = field(default_factory=set[SessionId])


@dataclass(slots=True)
class SamplerCache:
    """A cache of the samplers (frozen weights) on the device. Samplers in use are pinned."""

    backend: AbstractBackend
    max_samplers: int
    recovery: Recovery
    ephemeral_samplers: EphemeralSamplers
    models: ModelCache
    _slots: dict[SamplerId, _SamplerSlot] = field(default_factory=dict[SamplerId, _SamplerSlot])
    """In the order of their last use, least recently used first."""
    _pins: Counter[SamplerId] = field(default_factory=Counter[SamplerId])

    def acquire(self, sampler: SamplerId, session_id: SessionId) -> bool:
        """Pin a slot for a sampler. Returns False if all slots are pinned for other samplers."""
        if sampler not in self._slots and not self._free_slot():
            return False
        self._slots[sampler] = slot = self._slots.pop(sampler, None) or _SamplerSlot()
        slot.used_by.add(session_id)
        self._pins[sampler] += 1
        return True

    def load(self, sampler: SamplerId) -> None:
        """Load the weights of an acquired sampler onto the device, unless they are there."""
        if not self._slots[sampler].is_loaded:
            with ExitStack() as files:
                self.backend.load_sampler(sampler, self._open_weights(sampler, files))
            self._slots[sampler].is_loaded = True
            self.models.request_log.meters.sampler_loads.inc()

    def _open_weights(self, sampler: SamplerId, files: ExitStack) -> Snapshot:
        """Return the weights of a sampler.

        If another engine ended before it wrote them, replay the model to create them again.
        """
        if (pending := self.ephemeral_samplers.get_pending_snapshot(sampler)) is not None:
            return pending
        try:
            return self.recovery.open_weights(ArtifactId(sampler), files)
        except ServerError:
            model_id = self.ephemeral_samplers.find_lost_model(sampler)
            if model_id is None:
                raise
            self.models.ensure_resident([model_id])
            if (recreated := self.ephemeral_samplers.get_pending_snapshot(sampler)) is None:
                raise
            return recreated

    def release(self, sampler: SamplerId) -> None:
        """Undo one `acquire`."""
        self._pins[sampler] -= 1
        if not self._pins[sampler]:
            del self._pins[sampler]
            if not self._slots[sampler].is_loaded:
                del self._slots[sampler]

    def preload(self, sampler: SamplerId, snapshot: Snapshot, session_id: SessionId) -> None:
        """Load weights that were just saved, if a slot is free or can be freed.

        A failure is only logged.
        """
        if sampler in self._slots or not self._free_slot():
            return
        try:
            self.backend.load_sampler(sampler, snapshot)
        except BackendLost:
            raise
        except Exception as error:  # the first sample tries again and reports the error
            _log.warning("cannot preload sampler %s", sampler, exc_info=error)
        else:
            self._slots[sampler] = _SamplerSlot(is_loaded=True, used_by={session_id})
            self.models.request_log.meters.sampler_loads.inc()

    @property
    def num_resident(self) -> int:
        """Number of samplers that are on the device or about to be loaded."""
        return len(self._slots)

    def find_idle(self) -> dict[SamplerId, set[SessionId]]:
        """Return the samplers that are not pinned, with the client sessions that used them."""
        return {sampler: slot.used_by for sampler, slot in self._slots.items() if sampler not in self._pins}

    def evict(self, sampler: SamplerId) -> None:
        """Remove an idle sampler and its prefix cache from the device."""
        assert sampler not in self._pins
        self.backend.drop_sampler(sampler)
        del self._slots[sampler]

    def _free_slot(self) -> bool:
        if len(self._slots) < self.max_samplers:
            return True
        idle = next(iter(self.find_idle()), None)
        if idle is None:
            return False
        self.evict(idle)
        return True
