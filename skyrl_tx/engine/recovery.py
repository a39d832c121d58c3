"""Bringing a model back: its newest snapshot, then its answered effects again, in their order.

The requests on disk are the log; an effect is repeated exactly because a backend's arithmetic depends on a model's own
requests alone (the contract's canonical rule). Named saves and forward passes had no effect and are not repeated.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from skyrl_tx.artifacts import Artifact, ArtifactCorrupt, ArtifactMissing, ArtifactStore, artifact_id_for
from skyrl_tx.contract import requests
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot, StatePart
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, ServerError, UserError
from skyrl_tx.contract.ids import ArtifactId, ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.engine import prepare
from skyrl_tx.engine.work import Work, work_of
from skyrl_tx.failpoints import reach
from skyrl_tx.store import futures, models, samplers, snapshots
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SnapshotRow

_log = logging.getLogger(__name__)
_FINGERPRINT = "fingerprint."
_BASE = "base_model_hash"


KeepSampler = Callable[[SamplerId, ModelId, int, Snapshot], None]
"""Takes an unnamed sampler, its model, the effect that its save was, and its weights."""


class Recovery:
    """Snapshots and what follows them."""

    def __init__(
        self, backend: AbstractBackend, capabilities: Capabilities, store: Store, artifacts: ArtifactStore
    ) -> None:
        self._backend = backend
        self._capabilities = capabilities
        self._store = store
        self._artifacts = artifacts
        fingerprint = {_FINGERPRINT + name: value for name, value in capabilities.fingerprint.items()}
        self._origin = {**fingerprint, _BASE: capabilities.base_model_hash}

    def check_base(self, base_model: str) -> None:
        """Raise UserError if models wait here that were trained on other weights than those that are served."""
        here = self._capabilities.base_model_hash
        others = self._store.read(lambda tx: models.on_other_base(tx, here)) if here else []
        if others:
            raise UserError(
                f"{len(others)} models in this data directory, the first {others[0].model_id}, are trained on other "
                f"weights than those of {base_model}: theirs have the hash {_short(others[0].base_model_hash)}, these "
                f"{_short(here)}; serve the model that they are trained on, or add --fresh to leave them behind"
            )

    def write(self, write: Callable[[Path], None], extra: Mapping[str, str]) -> Artifact:
        """Make an artifact of what a snapshot writes; any thread."""
        return self._artifacts.create(write, {**self._origin, **extra})

    def write_sampler(self, sampler: SamplerId, model_id: ModelId, snapshot: Snapshot) -> Artifact:
        """Make the artifact of an unnamed sampler, unless it is there; any thread."""
        metadata = {**self._origin, "model_id": model_id, "kind": "sampler_weights"}
        return self._artifacts.create(snapshot.write, metadata, ArtifactId(sampler))

    def has_sampler(self, sampler: SamplerId) -> bool:
        """Whether the files of a sampler are on disk."""
        return self._artifacts.has(ArtifactId(sampler))

    def record(self, model_id: ModelId, artifact_id: ArtifactId, effect_order: int) -> ArtifactId | None:
        """Make an artifact the one that a model is brought back from; returns the one that it replaces."""
        return self._store.write(lambda tx: snapshots.put(tx, model_id, artifact_id, effect_order, time.time()))

    def drop(self, artifact_id: ArtifactId) -> None:
        """Remove the files of a snapshot that no model is brought back from any more; any thread."""
        self._artifacts.remove(artifact_id)

    def bring_back(self, model_id: ModelId, spec: ModelSpec, keep_sampler: KeepSampler) -> int:
        """Put a model into the backend as its last answered request left it.

        Unnamed samplers whose files are not there are made again, and given to `keep_sampler`. Returns the effect
        that the model's snapshot contains. Raises ServerError where that cannot be done.
        """
        started = time.monotonic()
        row = self._store.read(lambda tx: snapshots.get(tx, model_id))
        snapshot, contained = (None, 0) if row is None else self._opened(row)
        effects = self._store.read(lambda tx: futures.effects_since(tx, model_id, contained))
        try:
            if snapshot is not None:
                self._backend.restore(model_id, spec, snapshot, ALL_PARTS)
                reach("replay.restored")
            for effect in effects:
                work = work_of(effect)
                self._replay(model_id, work, failed=effect.failed)
                reach("replay.effect")
                if (sampler := self._lost_sampler(work)) is not None:
                    snapshot = self._backend.capture(model_id, {StatePart.WEIGHTS})
                    keep_sampler(sampler, model_id, effect.effect_order or 0, snapshot)
        except BackendLost:
            raise
        except Exception:
            self._backend.delete_model(model_id)  # half a model is none
            raise
        if row is not None or effects:
            elapsed = time.monotonic() - started
            _log.info("brought back model %s: %d effects after its snapshot, %.2f s", model_id, len(effects), elapsed)
        return contained

    def _opened(self, row: SnapshotRow) -> tuple[Snapshot | None, int]:
        """A model's snapshot and its number of effects; if its files are bad none, to replay from the beginning.

        Raises ServerError, saying what is lost, where the log no longer has the beginning.
        """
        try:
            return self.open(row.artifact_id), row.effect_order
        except ServerError as error:
            effects = self._store.read(lambda tx: futures.effects_since(tx, row.model_id, 0))
            kept = [effect.effect_order for effect in effects if effect.body]
            if kept[: row.effect_order] != list(range(1, row.effect_order + 1)):
                raise ServerError(
                    f"model {row.model_id} is lost: its snapshot at effect {row.effect_order}, of "
                    f"{_when(row.created_at)}, is bad ({error.message}), and the requests before it are no longer "
                    "kept; what was saved by name can still be loaded"
                ) from error
            _log.error("model %s: %s; replaying it from its beginning instead", row.model_id, error.message)
            return None, 0

    def open(self, artifact_id: ArtifactId) -> Snapshot:
        """Read weights; raises ServerError if the files are gone or damaged, UserError if they do not fit."""
        try:
            directory = self._artifacts.open(artifact_id)
            metadata = self._artifacts.describe(artifact_id).metadata
        except (ArtifactMissing, ArtifactCorrupt, OSError) as error:
            raise ServerError(f"weights cannot be read: {error}") from error
        here = self._capabilities.base_model_hash
        if here and (theirs := metadata.get(_BASE)) and theirs != here:
            raise UserError(
                f"these weights belong to another base model than the one that is served: theirs has the hash "
                f"{_short(theirs)}, this one {_short(here)}"
            )
        snapshot = self._backend.open_snapshot(directory)
        for name, value in self._capabilities.fingerprint.items():
            if (before := metadata.get(_FINGERPRINT + name, value)) != value:
                _log.warning(
                    "artifact %s was made with %s %s, now it is %s: numbers go on, but not bit-equal",
                    artifact_id,
                    name,
                    before,
                    value,
                )
        return snapshot

    def load(self, model_id: ModelId, request: requests.LoadWeights, spec: ModelSpec) -> None:
        """Put a training checkpoint into a model; raises UserError naming its path when it does not fit."""
        parts = {StatePart.WEIGHTS, StatePart.OPTIMIZER} if request.optimizer else {StatePart.WEIGHTS}
        source = self.open(request.artifact_id)
        try:
            self._backend.restore(model_id, spec, source, parts)
        except UserError as error:
            raise UserError(f"path {request.path!r}: {error.message}") from error

    def _replay(self, model_id: ModelId, work: Work, *, failed: bool) -> None:
        match work.request:
            case requests.CreateModel(spec=spec):
                self._backend.create_model(model_id, spec)
            case requests.LoadWeights() as request:
                self.load(model_id, request, request.spec)
            case requests.ModelPass() as request:
                examples = prepare.pass_examples(work.request_id, model_id, request, self._capabilities)
                self._backend.forward_backward(prepare.pass_batch([tuple(examples)]))
            case requests.SaveWeights(name=None):
                pass  # the model stays as it is; see `_lost_sampler`
            case requests.OptimStep() if failed:
                self._backend.clear_gradient(model_id)
            case requests.OptimStep(params=params):
                self._backend.optim_step(model_id, params)
            case requests.Rejected(message=message):
                raise ServerError(f"cannot repeat request {work.request_id}: {message}")
            case _:
                raise ServerError(f"cannot repeat the {work.kind} request {work.request_id}")

    def _lost_sampler(self, work: Work) -> SamplerId | None:
        """The unnamed sampler that a request made, if it is still wanted and an engine's end forestalled its files."""
        request = work.request
        if not isinstance(request, requests.SaveWeights) or (name := request.sampling_session_id) is None:
            return None
        row = self._store.read(lambda tx: samplers.get(tx, name))
        sampler = sampler_of(work.request_id)
        return None if row is None or row.sampler_id is None or self.has_sampler(sampler) else sampler


def _short(base_model_hash: str | None) -> str:
    return (base_model_hash or "")[:12]


def _when(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timestamp))


def sampler_of(request_id: RequestId) -> SamplerId:
    """The sampler that an unnamed save makes, the same whenever it is made again."""
    return SamplerId(artifact_id_for(request_id))
