"""Write files on a background thread, and run the callbacks on the engine's thread.

Clients can use ephemeral samplers before they are written to disk. Until then, the weights are in
memory only. After a crash, the sampler is created again by replaying its save, which is a log
record of the model. A model snapshot would drop this record from the log, so a snapshot newer than
the save is recorded only after the sampler's files are on disk.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skyrl_tx.artifacts import Artifact, ArtifactStore, ArtifactsUnreachable, make_artifact_id
from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.ids import ArtifactId, ModelId, RequestId, SamplerId, SamplingSessionId
from skyrl_tx.engine.activity import LoopActivity
from skyrl_tx.store import StoreUnreachable, sampling_sessions
from skyrl_tx.store.database import Store

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WAITING = "waiting for files to be written"


@dataclass(slots=True)
class _Job:
    run: Callable[[], Any]
    callback: Callable[[Future[Any]], None]
    model_id: ModelId | None
    blocks: bool
    is_started: bool = False
    future: Future[Any] = field(default_factory=Future[Any])


class BackgroundWriter:
    """Runs jobs on one background thread, in order, except that `wait_for` moves jobs forward."""

    def __init__(self, wake: Callable[[], None], activity: LoopActivity) -> None:
        """`wake` is called on the background thread after each job.

        It must wake the engine's thread, which then runs the callback of the job.
        """
        self._activity = activity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="artifact-writer")
        self._wake = wake
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []  # jobs that have started come first

    def submit(
        self,
        job: Callable[[], T],
        callback: Callable[[Future[T]], None],
        *,
        model_id: ModelId | None = None,
        blocks: bool = False,
    ) -> None:
        """Run `job` in the background, then `callback` on the engine's thread.

        Args:
            job: Called on the background thread.
            callback: Receives the result or the error of the job as a finished future.
            model_id: The model whose state the job writes.
            blocks: Whether the model's next request must wait for the callback.
        """
        with self._lock:
            self._jobs.append(_Job(job, callback, model_id, blocks))
        self._thread.submit(self._run_next)

    @property
    def blocked_models(self) -> frozenset[ModelId]:
        """Models whose next request must wait for a job."""
        return frozenset(job.model_id for job in self._jobs if job.blocks and job.model_id is not None)

    def run_callbacks(self) -> bool:
        """Run the callbacks of finished jobs, in order. Returns True if there was at least one."""
        num_before = len(self._jobs)
        while self._jobs and self._jobs[0].future.done():
            self._run_callback()
        return len(self._jobs) != num_before

    def wait_for(self, model_id: ModelId) -> None:
        """Wait for the jobs of a model and run their callbacks.

        The jobs of this model overtake waiting jobs of other models.
        """
        with self._lock:
            self._jobs.sort(key=lambda job: not job.is_started and job.model_id != model_id)
        while any(job.model_id == model_id for job in self._jobs):
            self._run_callback()

    def drain(self) -> None:
        """Wait for all jobs and run their callbacks."""
        while self._jobs:
            self._run_callback()

    def close(self) -> None:
        """Wait for the running job and end the thread.

        Waiting jobs and all callbacks are dropped.
        """
        with self._activity.track(_WAITING, is_limited=True):  # on a lost device the job may never finish
            self._thread.shutdown(cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            job = next(job for job in self._jobs if not job.is_started)
            job.is_started = True
        try:
            job.future.set_result(job.run())
        except BaseException as error:  # the callback handles the error
            job.future.set_exception(error)
        self._wake()

    def _run_callback(self) -> None:
        job = self._jobs[0]
        if not job.future.done():
            with self._activity.track(_WAITING):
                job.future.exception()
        with self._lock:
            self._jobs.remove(job)
        job.callback(job.future)


def make_sampler_id(request_id: RequestId) -> SamplerId:
    """Return the id of the sampler that an ephemeral save creates.

    Replaying the save creates the sampler with the same id.
    """
    return SamplerId(make_artifact_id(request_id))


@dataclass(slots=True, kw_only=True)
class _UnwrittenSampler:
    """A sampler without files."""

    model_id: ModelId
    effect_order: int
    """Number of the model's log record that saved the sampler."""
    snapshot: Snapshot
    """The weights of the sampler."""
    error: Exception | None = None
    """The error of the last write, or None while the sampler is being written."""


@dataclass(slots=True)
class EphemeralSamplers:
    """Writes ephemeral samplers to disk, and keeps their weights in memory until then."""

    background_writer: BackgroundWriter
    store: Store
    artifacts: ArtifactStore
    metadata: Mapping[str, str]
    """Metadata of each artifact."""
    max_pending: int
    """If more samplers are unwritten, requests of the model that adds one wait until it is written."""
    _unwritten: dict[SamplerId, _UnwrittenSampler] = field(default_factory=dict[SamplerId, _UnwrittenSampler])
    _lost: dict[SamplerId, str] = field(default_factory=dict[SamplerId, str])

    def check_capacity(self) -> None:
        """Raise ServerError if `max_pending` writes have failed."""
        errors = [unwritten.error for unwritten in self._unwritten.values() if unwritten.error is not None]
        if len(errors) >= self.max_pending:
            raise ServerError(
                f"{len(errors)} ephemeral samplers could not be written to disk, so no more are accepted until they "
                f"are: {errors[-1]}"
            )

    def add(self, sampler: SamplerId, model_id: ModelId, effect_order: int, snapshot: Snapshot) -> None:
        """Start to write a sampler, unless it is being written already.

        `effect_order` is the number of the model's log record that saved the sampler.
        """
        if sampler in self._unwritten:
            return
        self._lost.pop(sampler, None)
        self._unwritten[sampler] = _UnwrittenSampler(model_id=model_id, effect_order=effect_order, snapshot=snapshot)
        self._write(sampler, blocks=len(self._unwritten) > self.max_pending)

    def is_missing(self, session_id: SamplingSessionId, sampler: SamplerId) -> bool:
        """Whether a sampling session uses a sampler, and the files of `sampler` are missing."""
        row = self.store.read(lambda tx: sampling_sessions.get(tx, session_id))
        return row is not None and row.sampler_id is not None and not self._has_files(sampler)

    def find_lost(self) -> dict[ModelId, dict[RequestId, SamplerId]]:
        """Return samplers without files after a crash, by model and by the save that made them."""
        lost: dict[ModelId, dict[RequestId, SamplerId]] = {}
        ephemeral = self.store.read(lambda tx: sampling_sessions.list_ephemeral(tx, self.store.engine_number))
        present = set(self.artifacts.list_ids()) if ephemeral else set[ArtifactId]()
        for row in ephemeral:
            if make_sampler_id(row.request_id) == row.sampler_id and row.sampler_id not in present:
                lost.setdefault(row.model_id, {})[row.request_id] = row.sampler_id
        return lost

    def find_lost_model(self, sampler: SamplerId) -> ModelId | None:
        """Return the model of a sampler that another engine lost.

        That engine ended before the files of the sampler were written. Returns None for other
        samplers, and for an engine that does not share its database. Such an engine finds lost
        samplers at its start (`find_lost`).
        """
        if not self.store.is_shared or self._has_files(sampler):
            return None
        return self.store.read(lambda tx: sampling_sessions.find_model(tx, sampler))

    def mark_lost(self, lost: Iterable[SamplerId], reason: str) -> None:
        """Record why samplers cannot be used.

        If their model is restored later, the samplers can be used again.
        """
        self._lost.update(dict.fromkeys(lost, reason))

    def get_pending_snapshot(self, sampler: SamplerId) -> Snapshot | None:
        """Return the weights of a sampler that is not written yet, else None.

        Raises ServerError if the sampler is lost.
        """
        if sampler in self._lost:
            raise ServerError(self._lost[sampler])
        unwritten = self._unwritten.get(sampler)
        return None if unwritten is None else unwritten.snapshot

    def is_written(self, sampler: SamplerId) -> bool:
        """Whether the sampler is on disk, and not only in the memory of this engine."""
        return sampler not in self._unwritten and sampler not in self._lost

    def has_unwritten(self, model_id: ModelId, up_to: int | None = None) -> bool:
        """Whether a sampler of this model is not written yet.

        With `up_to`, only samplers of log records up to this number count.
        """
        by_model = [unwritten for unwritten in self._unwritten.values() if unwritten.model_id == model_id]
        return any(up_to is None or unwritten.effect_order <= up_to for unwritten in by_model)

    def retry_failed_writes(self) -> None:
        """Retry failed writes."""
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
            except Exception as error:  # the weights stay in memory, and housekeeping retries the write
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
