"""What is on the device: models and samplers, the least recently used making room for others.

A model leaves as a recovery snapshot and comes back as after a crash, so there is one way back and it is always used.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract import codec
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, ServerError, UserError
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.engine.answers import Answers
from skyrl_tx.engine.jobs import Jobs
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.engine.unnamed import WriteBehind
from skyrl_tx.failpoints import reach
from skyrl_tx.store import models
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LiveModel:
    """A model as the engine knows it; `effect_order` counts effects answered, or being written."""

    model_id: ModelId
    session_id: SessionId
    spec: ModelSpec
    effect_order: int
    poisoned_by: str | None
    is_resident: bool = False
    snapshot_order: int = 0
    """Effects contained in the newest snapshot, on disk or being written."""
    snapshot_at: float = field(default_factory=time.monotonic)
    snapshot_took_s: float = 0.0
    """From the beginning of the newest until it was on disk; for ever if it failed, so that the interval goes by."""
    last_used: float = 0.0

    def next_effect(self) -> int:
        """Number one more effect."""
        self.effect_order += 1
        return self.effect_order


class Models:
    """Models in training, on the device or not."""

    def __init__(
        self,
        backend: AbstractBackend,
        capabilities: Capabilities,
        store: Store,
        answers: Answers,
        jobs: Jobs,
        recovery: Recovery,
        behind: WriteBehind,
    ) -> None:
        self._backend = backend
        self._behind = behind
        self._max_models = capabilities.max_models
        self._store = store
        self._answers = answers
        self._jobs = jobs
        self._recovery = recovery
        self._models: dict[ModelId, LiveModel] = {}
        self.busy: set[ModelId] = set()
        """Those that passes are under way on, or about to be: once on the device they stay."""

    def get(self, model_id: ModelId, *, creating: bool = False) -> LiveModel:
        """Look a model up. Raises UserError if it cannot be used."""
        if model_id not in self._models:
            self._models[model_id] = self._read(model_id, creating)
        return self._models[model_id]

    def _read(self, model_id: ModelId, creating: bool) -> LiveModel:
        self._answers.settle(wait=True)
        row = self._store.read(lambda tx: models.get(tx, model_id))
        if row is None:
            raise UserError(f"model_id {model_id!r} does not exist")
        if row.status != ("creating" if creating else "ready"):
            states = {
                "ready": "exists already",
                "creating": "was never created",
                "failed": "could not be created",
                "unloaded": "was unloaded",
                "left": "was left behind by a start with --fresh; its saved weights can be loaded",
                "expired": "is gone: its session was silent too long; its saved weights can be loaded",
            }
            raise UserError(f"model_id {model_id!r} {states[row.status]}")
        spec = codec.decode(row.spec)
        assert isinstance(spec, ModelSpec)
        return LiveModel(
            model_id=model_id,
            session_id=row.session_id,
            spec=spec,
            effect_order=row.effect_order,
            poisoned_by=row.poisoned_by,
        )

    def ensure(self, model_ids: Collection[ModelId]) -> None:
        """Have all of these on the device, which has room for them."""
        for model_id in model_ids:
            model = self.get(model_id)
            if not model.is_resident:
                self.make_room(model_ids)
                self._answers.settle(wait=True)  # what is still being written would be missed
                model.snapshot_order = self._recovery.bring_back(model_id, model.spec, self._behind.add)
                model.is_resident = True
            self.use(model)

    def use(self, model: LiveModel) -> None:
        """Note that a model is in use."""
        model.last_used = time.monotonic()

    def make_room(self, keep: Collection[ModelId] = ()) -> None:
        """Have a slot free, by letting the least recently used model go that is neither busy nor in `keep`."""
        resident = self.resident()
        if len(resident) < self._max_models:
            return
        candidates = [model for model in resident if model.model_id not in self.busy and model.model_id not in keep]
        if not candidates:
            raise ServerError(f"all {self._max_models} model slots are in use")
        self.evict(min(candidates, key=lambda model: model.last_used))

    def evict(self, model: LiveModel) -> None:
        """Take a model off the device; it comes back when next asked for."""
        self.keep_now(model)
        self._backend.delete_model(model.model_id)
        model.is_resident = False
        _log.info("model %s left the device", model.model_id)

    def forget(self, model_id: ModelId) -> None:
        """Drop what is known of a model; of no effect when nothing is."""
        self._models.pop(model_id, None)
        self._backend.delete_model(model_id)

    def resident(self) -> list[LiveModel]:
        """Models on the device."""
        return [model for model in self._models.values() if model.is_resident]

    def keep_due(self, *, interval_s: float, num_effects: int, max_share: float) -> None:
        """Begin snapshots of the models whose last one is old, or far behind where that costs no more than a share."""
        now = time.monotonic()
        for model in self.resident():
            behind, age_s = model.effect_order - model.snapshot_order, now - model.snapshot_at
            is_far_behind = behind >= num_effects and age_s * max_share >= model.snapshot_took_s
            if is_far_behind or (behind and age_s >= interval_s):
                self._keep(model)

    def keep_now(self, model: LiveModel) -> None:
        """Have a model's present state in a snapshot on disk."""
        if model.effect_order != model.snapshot_order:
            self._keep(model)
        self._jobs.finish(wait=True)

    def _keep(self, model: LiveModel) -> None:
        model_id, effect_order = model.model_id, model.effect_order
        began = time.monotonic()
        before, model.snapshot_order, model.snapshot_at = model.snapshot_order, effect_order, began

        def failed(error: Exception) -> None:  # the log still has every effect since the snapshot before
            _log.error("snapshot of model %s at effect %d failed", model_id, effect_order, exc_info=error)
            model.snapshot_order = min(before, model.snapshot_order)
            model.snapshot_took_s = math.inf

        try:
            snapshot = self._backend.capture(model_id, ALL_PARTS)
        except BackendLost:
            raise
        except Exception as error:
            failed(error)
            return
        reach("snapshot.capture")

        def record(written: Future[Artifact]) -> None:
            if model_id not in self._models:  # unloaded meanwhile
                return
            model.snapshot_took_s = time.monotonic() - began
            try:
                artifact_id = written.result().artifact_id
                reach("snapshot.written")
            except Exception as error:
                failed(error)
                return
            if self._behind.owes(model_id, effect_order):  # only the log could make those samplers again
                model.snapshot_order = min(before, model.snapshot_order)
                return
            self._answers.settle(wait=True)
            replaced = self._recovery.record(model_id, artifact_id, effect_order)
            if replaced is not None:
                self._drop(replaced)

        extra = {"model_id": model_id, "effect_order": str(effect_order)}
        self._jobs.start(lambda: self._recovery.write(snapshot.write, extra), record)

    def _drop(self, replaced: ArtifactId) -> None:
        """Begin to remove a snapshot's files: no other row ever points at them."""

        def dropped(removed: Future[None]) -> None:
            if (error := removed.exception()) is not None:  # collected in time, as after a crash just before
                _log.warning("snapshot %s, which is replaced, could not be removed: %s", replaced, error)

        self._jobs.start(lambda: self._recovery.drop(replaced), dropped)


@dataclass(slots=True)
class _SamplerPlace:
    """`wanted_by`: the client sessions that had the weights loaded, or sampled from them."""

    is_loaded: bool = False
    wanted_by: set[SessionId] = field(default_factory=set[SessionId])


class Samplers:
    """Frozen weights on the device: a cache of artifacts, those in use pinned."""

    def __init__(
        self, backend: AbstractBackend, capabilities: Capabilities, recovery: Recovery, behind: WriteBehind
    ) -> None:
        self._backend = backend
        self._behind = behind
        self._max_samplers = capabilities.max_samplers
        self._recovery = recovery
        self._places: dict[SamplerId, _SamplerPlace] = {}  # the least recently used first
        self._uses: Counter[SamplerId] = Counter()

    def acquire(self, sampler: SamplerId, session_id: SessionId) -> bool:
        """Pin a slot for a sampler that a client session wants; False while all are pinned by others."""
        if sampler not in self._places and not self._make_room():
            return False
        self._places[sampler] = place = self._places.pop(sampler, None) or _SamplerPlace()
        place.wanted_by.add(session_id)
        self._uses[sampler] += 1
        return True

    def load(self, sampler: SamplerId) -> None:
        """Have the weights of an acquired sampler on the device; raises what keeps them from there."""
        if not self._places[sampler].is_loaded:
            self._backend.load_sampler(
                sampler, self._behind.source(sampler) or self._recovery.open(ArtifactId(sampler))
            )
            self._places[sampler].is_loaded = True

    def release(self, sampler: SamplerId) -> None:
        """Undo one `acquire`."""
        self._uses[sampler] -= 1
        if not self._uses[sampler]:
            del self._uses[sampler]
            if not self._places[sampler].is_loaded:
                del self._places[sampler]

    def offer(self, sampler: SamplerId, snapshot: Snapshot, session_id: SessionId) -> None:
        """Load weights that a client session is likely to ask for soon, if there is room."""
        if sampler in self._places or not self._make_room():
            return
        try:
            self._backend.load_sampler(sampler, snapshot)
        except BackendLost:
            raise
        except Exception as error:  # whoever asks for it is told what is wrong
            _log.warning("sampler %s could not be loaded ahead of its use", sampler, exc_info=error)
        else:
            self._places[sampler] = _SamplerPlace(is_loaded=True, wanted_by={session_id})

    def idle(self) -> dict[SamplerId, set[SessionId]]:
        """Loaded samplers that nothing runs on, and the client sessions that wanted them."""
        return {sampler: place.wanted_by for sampler, place in self._places.items() if sampler not in self._uses}

    def drop(self, sampler: SamplerId) -> None:
        """Take one that is idle off the device, with what the backend knows of its prompts."""
        assert sampler not in self._uses
        self._backend.drop_sampler(sampler)
        del self._places[sampler]

    def _make_room(self) -> bool:
        if len(self._places) < self._max_samplers:
            return True
        idle = next(iter(self.idle()), None)
        if idle is None:
            return False
        self.drop(idle)
        return True
