"""Unnamed samplers: usable at once, their files written behind the answer.

Until its files are there such a sampler is in memory alone. Its save has a place among the model's effects, so that a
replay makes it again, and no snapshot that contains it is recorded before its files are on disk.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ModelId, SamplerId
from skyrl_tx.engine.jobs import Jobs
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.store import samplers
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Owed:
    """A sampler without files. `error` is why they could not be written; None: they are being written."""

    model_id: ModelId
    effect_order: int
    snapshot: Snapshot
    error: Exception | None = None


class WriteBehind:
    """The files that are owed to the disk."""

    def __init__(self, jobs: Jobs, recovery: Recovery, store: Store, max_unwritten: int) -> None:
        self._jobs = jobs
        self._recovery = recovery
        self._store = store
        self._max_unwritten = max_unwritten
        self._owed: dict[SamplerId, _Owed] = {}
        self._given_up: dict[SamplerId, str] = {}

    def check_room(self) -> None:
        """Raise ServerError while the disk takes none of what is owed to it."""
        errors = [owed.error for owed in self._owed.values() if owed.error is not None]
        if len(errors) >= self._max_unwritten:
            raise ServerError(f"{len(errors)} unnamed samplers wait to be written to the disk: {errors[-1]}")

    def add(self, sampler: SamplerId, model_id: ModelId, effect_order: int, snapshot: Snapshot) -> None:
        """Begin to write a sampler, once. When many are being written, its model waits for this one."""
        if sampler in self._owed:
            return
        self._given_up.pop(sampler, None)
        self._owed[sampler] = _Owed(model_id=model_id, effect_order=effect_order, snapshot=snapshot)
        self._begin(sampler, hold=model_id if len(self._owed) > self._max_unwritten else None)

    def retry(self) -> None:
        """Begin anew to write those that failed."""
        for sampler, owed in self._owed.items():
            if owed.error is not None:
                owed.error = None
                self._begin(sampler)

    def give_up(self, lost: Iterable[SamplerId], reason: str) -> None:
        """Note why samplers are not there; until their model is brought back after all."""
        self._given_up.update(dict.fromkeys(lost, reason))

    def source(self, sampler: SamplerId) -> Snapshot | None:
        """The weights of a sampler whose files are not there yet; raises ServerError for one that was given up."""
        if sampler in self._given_up:
            raise ServerError(self._given_up[sampler])
        owed = self._owed.get(sampler)
        return None if owed is None else owed.snapshot

    def owes(self, model_id: ModelId, up_to_effect: int) -> bool:
        """Whether any sampler that a model made up to an effect has no files yet."""
        return any(owed.model_id == model_id and owed.effect_order <= up_to_effect for owed in self._owed.values())

    def _begin(self, sampler: SamplerId, hold: ModelId | None = None) -> None:
        owed = self._owed[sampler]

        def written(future: Future[Artifact]) -> None:
            try:
                artifact = future.result()
            except Exception as error:  # it stays in memory, and is tried again
                _log.exception("unnamed sampler %s of model %s could not be written", sampler, owed.model_id)
                owed.error = error
                return
            del self._owed[sampler]
            self._store.write_soon(lambda tx: samplers.set_size(tx, owed.model_id, sampler, artifact.size_bytes))

        def write() -> Artifact:
            return self._recovery.write_sampler(sampler, owed.model_id, owed.snapshot)

        self._jobs.start(write, written, hold=hold)
