"""Restore models after a crash or an eviction.

A model is restored from its newest snapshot. Then the requests after the snapshot are replayed in
order. The `futures` table is the log: it stores all requests with their log sequence numbers.
Replay gives the same bits, because backends are batch-invariant: the results of a model depend only
on its own requests. Named saves and forward passes change no model, so they are not replayed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyrl_tx.artifacts import Artifact, ArtifactCorrupt, ArtifactMissing, ArtifactStore, ArtifactsUnreachable
from skyrl_tx.contract import requests
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot, StatePart
from skyrl_tx.contract.capabilities import Capabilities, plain_text, split_hash
from skyrl_tx.contract.errors import BackendLost, ServerError, UserError
from skyrl_tx.contract.ids import ArtifactId, ModelId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.engine.background_writer import EphemeralSamplers
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.process.failpoints import failpoint
from skyrl_tx.store import StoreUnreachable, futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SnapshotRow

_log = logging.getLogger(__name__)
_FINGERPRINT = "fingerprint."
_BASE_MODEL_HASH = "base_model_hash"


def make_artifact_metadata(capabilities: Capabilities) -> Mapping[str, str]:
    """Return the metadata of all artifacts: the base model, the software and the hardware."""
    return {**_make_fingerprint_metadata(capabilities.fingerprint), _BASE_MODEL_HASH: capabilities.base_model_hash}


def warn_of_changes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log which parts of the fingerprint have changed since the last start of the engine."""
    changes = [f"{name} from {before[name]} to {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if changes:
        _log.warning(
            "changed since the last start: %s. Programs are compiled again, and results are not bit-equal to earlier "
            "ones. To avoid that, start the server with the earlier versions, devices and settings",
            ", ".join(changes),
        )


def _make_fingerprint_metadata(fingerprint: Mapping[str, str]) -> dict[str, str]:
    return {_FINGERPRINT + name: value for name, value in plain_text(fingerprint).items()}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request that changed its model (or whose failure did), with its log sequence number."""

    queued: QueuedRequest
    model_id: ModelId
    effect_order: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """Restores models from snapshots and the log."""

    backend: AbstractBackend
    capabilities: Capabilities
    store: Store
    artifacts: ArtifactStore
    metadata: Mapping[str, str]
    ephemeral_samplers: EphemeralSamplers
    replay: Callable[["Recovery", LoggedRequest], None]
    """Repeats the effect of a request on the restored model. Commits no result."""

    def check_base_model(self, base_model: str) -> None:
        """Raise UserError if the database has models that this server cannot continue.

        Their base weights differ, or a setting of their adapters, for example `expert-lora`.
        """
        here = self.capabilities.base_model_hash
        incompatible = self.store.read(lambda tx: models.list_on_other_base(tx, here)) if here else []
        if not incompatible:
            return

        # The base weights or the adapters differ: say which, and what to do.
        subject = f"{len(incompatible)} models in this data directory, for example {incompatible[0].model_id}, "
        theirs = incompatible[0].base_model_hash or ""
        if forms := _compare_adapter_forms(theirs, here):
            raise UserError(
                f"{subject}have adapters of {forms[0]}, but this server makes adapters of {forms[1]}; start it with "
                f"{_format_flag(forms[0])}, or add --fresh to leave these models behind"
            )
        raise UserError(
            f"{subject}were trained on other weights than {base_model}: their base model has the hash "
            f"{_shorten_hash(theirs)}, {base_model} has {_shorten_hash(here)}; serve the base model that they were "
            "trained on, or add --fresh to leave these models behind"
        )

    def make_writer(self, write: Callable[[Path], None], extra: Mapping[str, str]) -> Callable[[], Artifact]:
        """Return a function that creates an artifact with the files that `write` writes.

        The returned function runs on the background thread. The metadata is collected now, because
        only the loop's thread may call the backend.
        """
        metadata = {**self.metadata, **_make_fingerprint_metadata(self.backend.fingerprint_changes()), **extra}
        return lambda: self.artifacts.create(write, metadata)

    def restore(self, model_id: ModelId, spec: ModelSpec) -> int:
        """Load a model into the backend, in its state after the last committed request.

        Returns the log sequence number of the snapshot that was used, or 0. Raises ServerError if
        the state is lost.
        """
        with ExitStack() as files:
            return self._restore(model_id, spec, files)

    def _restore(self, model_id: ModelId, spec: ModelSpec, files: ExitStack) -> int:
        started = time.monotonic()
        row = self.store.read(lambda tx: models.get_snapshot(tx, model_id))
        snapshot, contained = (None, 0) if row is None else self._open_newest(row, files)

        # Load the snapshot, then replay the log after it.
        num_replayed = 0
        try:
            if snapshot is not None:
                self.backend.restore(model_id, spec, snapshot, ALL_PARTS)
                failpoint("replay.restored")
            for record in self._iterate_log(model_id, contained):
                queued = QueuedRequest.from_row(record)
                self.replay(self, LoggedRequest(queued, model_id, record.effect_order or 0, record.failed))
                failpoint("replay.effect")
                num_replayed += 1
        except BackendLost:
            raise
        except Exception:
            self.backend.delete_model(model_id)  # discard the partially restored model
            raise

        if row is not None or num_replayed:
            elapsed = time.monotonic() - started
            restored = "restored model %s: replayed %d requests, %.2f s"
            _log.info(restored, model_id, num_replayed, elapsed, extra={"model_id": model_id})
        return contained

    def _iterate_log(self, model_id: ModelId, effect_order: int) -> Iterator[futures.PendingRequest]:
        """Yield the log records of a model after a log sequence number.

        Records are read one at a time, because all of them together may not fit in memory, for
        example after days without a snapshot.
        """
        after = effect_order
        while page := self.store.read(partial(futures.read_log, model_id=model_id, effect_order=after, limit=1)):
            yield page[0]
            after = page[0].effect_order or 0

    def _open_newest(self, row: SnapshotRow, files: ExitStack) -> tuple[Snapshot | None, int]:
        """Open a snapshot.

        Returns it with its log sequence number, or (None, 0) to replay from the beginning.

        Raises ServerError if the files are damaged and the first records of the log are gone.
        """
        try:
            return self.open_weights(row.artifact_id, files), row.effect_order
        except ServerError as error:
            kept = [record.effect_order for record in self._iterate_log(row.model_id, 0) if record.body]
            if kept[: row.effect_order] != list(range(1, row.effect_order + 1)):
                written_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(row.created_at))
                raise ServerError(
                    f"model {row.model_id} is lost: its snapshot after request {row.effect_order}, written at "
                    f"{written_at}, is damaged ({error.message}), and the requests before it have been removed; "
                    "checkpoints that were saved by name can still be loaded"
                ) from error
            damaged = "model %s: %s; replaying all of its requests instead"
            _log.error(damaged, row.model_id, error.message, extra={"model_id": row.model_id})
            return None, 0

    def open_weights(self, artifact_id: ArtifactId, files: ExitStack) -> Snapshot:
        """Open the weights of an artifact. Its files stay on disk until `files` is closed.

        Raises:
            ServerError: Files are missing or damaged.
            UserError: The weights belong to another base model, or have other adapters.
            StoreUnreachable: The object store does not respond. It ends the engine, because the
                weights are not lost.
        """
        # Fetch the files.
        try:
            files.enter_context(self.artifacts.keep_local(artifact_id))
            artifact = self.artifacts.open(artifact_id)
        except ArtifactsUnreachable as error:
            raise StoreUnreachable(str(error)) from error
        except (ArtifactMissing, ArtifactCorrupt, OSError) as error:
            _log.error("cannot read artifact %s: %s", artifact_id, error)
            reason = error.strerror if isinstance(error, OSError) else error  # clients must not see the path
            raise ServerError(f"weights cannot be read: {reason}") from error

        # Compare the base model and the adapters.
        here = self.capabilities.base_model_hash
        if here and (theirs := artifact.metadata.get(_BASE_MODEL_HASH)) and theirs != here:
            if forms := _compare_adapter_forms(theirs, here):
                raise UserError(
                    f"these weights have adapters of {forms[0]}, but this server has adapters of {forms[1]}; "
                    f"load them on a server with {_format_flag(forms[0])}"
                )
            raise UserError(
                f"these weights belong to another base model, with the hash {_shorten_hash(theirs)}: this server's has "
                f"{_shorten_hash(here)}; load them on a server of their base model"
            )

        # Warn about other software or hardware.
        snapshot = self.backend.open_snapshot(artifact.path)
        for name, value in {**self.capabilities.fingerprint, **self.backend.fingerprint_changes()}.items():
            if (before := artifact.metadata.get(_FINGERPRINT + name, value)) != value:
                mismatch = f"artifact {artifact_id} was written with {name} {before}, but this engine has {value}"
                _log.warning("%s: results are not bit-equal to earlier ones", mismatch)
        return snapshot

    def load(self, model_id: ModelId, request: requests.LoadWeights, spec: ModelSpec) -> None:
        """Load a training checkpoint into a model.

        Raises UserError with the path if it does not fit.
        """
        parts = {StatePart.WEIGHTS, StatePart.OPTIMIZER} if request.optimizer else {StatePart.WEIGHTS}
        with ExitStack() as files:
            source = self.open_weights(request.artifact_id, files)
            try:
                self.backend.restore(model_id, spec, source, parts)
            except UserError as error:
                raise UserError(f"path {request.path!r}: {error.message}") from error


def _compare_adapter_forms(theirs: str, here: str) -> tuple[str, str] | None:
    """Return the adapter settings of both hashes if the base weights are equal, else None."""
    (their_weights, their_form), (weights, form) = split_hash(theirs), split_hash(here)
    return (their_form, form) if their_weights == weights else None


def _format_flag(form: str) -> str:
    name, _, value = form.partition("=")
    return f"--backend-config.{name.replace('_', '-')} {value}"


def _shorten_hash(base_model_hash: str) -> str:
    return base_model_hash[:12]
