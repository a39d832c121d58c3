"""Write files on a background thread, and run the callbacks on the engine's thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.engine.activity import LoopActivity

T = TypeVar("T")
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
