"""Bringing a model back: its newest snapshot, then its answered effects again, in their order.

The requests on disk are the log; an effect is repeated exactly because a backend's arithmetic depends on a model's own
requests alone (the contract's canonical rule). Named saves and forward passes had no effect and are not repeated.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from skyrl_tx.artifacts import Artifact, ArtifactCorrupt, ArtifactMissing, ArtifactStore, artifact_id_for
from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot, StatePart
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ArtifactId, ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.engine import prepare
from skyrl_tx.engine.work import Work, work_of
from skyrl_tx.failpoints import reach
from skyrl_tx.store import futures, samplers, snapshots
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_FINGERPRINT = "fingerprint."


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

    def write(self, write: Callable[[Path], None], extra: Mapping[str, str]) -> Artifact:
        """Make an artifact of what a snapshot writes; any thread."""
        fingerprint = {_FINGERPRINT + name: value for name, value in self._capabilities.fingerprint.items()}
        return self._artifacts.create(write, {**fingerprint, **extra})

    def write_sampler(self, sampler: SamplerId, model_id: ModelId, snapshot: Snapshot) -> Artifact:
        """Make the artifact of an unnamed sampler, unless it is there; any thread."""
        fingerprint = {_FINGERPRINT + name: value for name, value in self._capabilities.fingerprint.items()}
        metadata = {**fingerprint, "model_id": model_id, "kind": "sampler_weights"}
        return self._artifacts.create(snapshot.write, metadata, ArtifactId(sampler))

    def has_sampler(self, sampler: SamplerId) -> bool:
        """Whether the files of a sampler are on disk."""
        return self._artifacts.has(ArtifactId(sampler))

    def record(self, model_id: ModelId, artifact_id: ArtifactId, effect_order: int) -> None:
        """Make an artifact the one that a model is brought back from."""
        self._store.write(lambda tx: snapshots.put(tx, model_id, artifact_id, effect_order, time.time()))

    def bring_back(self, model_id: ModelId, spec: ModelSpec, keep_sampler: KeepSampler) -> int:
        """Put a model into the backend as its last answered request left it.

        Unnamed samplers whose files are not there are made again, and given to `keep_sampler`. Returns the effect
        that the model's snapshot contains. Raises ServerError where that cannot be done.
        """
        started = time.monotonic()
        row = self._store.read(lambda tx: snapshots.get(tx, model_id))
        contained = 0 if row is None else row.effect_order
        effects = self._store.read(lambda tx: futures.effects_since(tx, model_id, contained))
        try:
            if row is not None:
                self._backend.restore(model_id, spec, self.open(row.artifact_id), ALL_PARTS)
                reach("replay.restored")
            for effect in effects:
                work = work_of(effect)
                self._replay(model_id, work, failed=effect.failed)
                reach("replay.effect")
                if (sampler := self._lost_sampler(work)) is not None:
                    snapshot = self._backend.capture(model_id, {StatePart.WEIGHTS})
                    keep_sampler(sampler, model_id, effect.effect_order or 0, snapshot)
        except ServerError:
            self._backend.delete_model(model_id)
            raise
        if row is not None or effects:
            elapsed = time.monotonic() - started
            _log.info("brought back model %s: %d effects after its snapshot, %.2f s", model_id, len(effects), elapsed)
        return contained

    def open(self, artifact_id: ArtifactId) -> Snapshot:
        """Read weights; raises ServerError if the files are gone or damaged, UserError if they do not fit."""
        try:
            snapshot = self._backend.open_snapshot(self._artifacts.open(artifact_id))
            metadata = self._artifacts.describe(artifact_id).metadata
        except (ArtifactMissing, ArtifactCorrupt) as error:
            raise ServerError(f"weights cannot be read: {error}") from error
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
        """Put a training checkpoint into a model."""
        parts = {StatePart.WEIGHTS, StatePart.OPTIMIZER} if request.optimizer else {StatePart.WEIGHTS}
        self._backend.restore(model_id, spec, self.open(request.artifact_id), parts)

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
            case _:
                raise ServerError(f"cannot repeat the {codec.kind_of(work.request)} request {work.request_id}")

    def _lost_sampler(self, work: Work) -> SamplerId | None:
        """The unnamed sampler that a request made, if it is still wanted and an engine's end forestalled its files."""
        request = work.request
        if not isinstance(request, requests.SaveWeights) or (name := request.sampling_session_id) is None:
            return None
        row = self._store.read(lambda tx: samplers.get(tx, name))
        sampler = sampler_of(work.request_id)
        return None if row is None or row.sampler_id is None or self.has_sampler(sampler) else sampler


def sampler_of(request_id: RequestId) -> SamplerId:
    """The sampler that an unnamed save makes, the same whenever it is made again."""
    return SamplerId(artifact_id_for(request_id))
