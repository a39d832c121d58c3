"""Writes files on a background thread, and runs the callbacks on the engine's thread."""

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
    """One background thread. Jobs and callbacks run in order, except that `wait_for` moves a model's jobs forward."""

    def __init__(self, wake: Callable[[], None], activity: LoopActivity) -> None:
        """`wake` is called on the background thread after each job, so that the engine runs the callback."""
        self._activity = activity
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="artifact-writer")
        self._wake = wake
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []  # those that have started first

    def submit(
        self,
        job: Callable[[], T],
        callback: Callable[[Future[T]], None],
        *,
        model_id: ModelId | None = None,
        blocks: bool = False,
    ) -> None:
        """Run `job` in the background, then `callback` on the engine's thread.

        `model_id` is the model whose state is written. `blocks`: until the callback the engine starts no request of it.
        """
        with self._lock:
            self._jobs.append(_Job(job, callback, model_id, blocks))
        self._thread.submit(self._run_next)

    @property
    def blocked_models(self) -> frozenset[ModelId]:
        """Models whose next request waits for a job."""
        return frozenset(job.model_id for job in self._jobs if job.blocks and job.model_id is not None)

    def run_callbacks(self) -> bool:
        """Run the callbacks of finished jobs, in order. Returns whether there was any."""
        num_before = len(self._jobs)
        while self._jobs and self._jobs[0].future.done():
            self._run_callback()
        return len(self._jobs) != num_before

    def wait_for(self, model_id: ModelId) -> None:
        """Run a model's jobs and their callbacks, ahead of other models' jobs that have not started."""
        with self._lock:
            self._jobs.sort(key=lambda job: not job.is_started and job.model_id != model_id)
        while any(job.model_id == model_id for job in self._jobs):
            self._run_callback()

    def drain(self) -> None:
        """Wait for all jobs and run their callbacks."""
        while self._jobs:
            self._run_callback()

    def close(self) -> None:
        """End the thread: the running job ends, queued jobs and all callbacks are dropped."""
        with self._activity.track(_WAITING, is_limited=True):  # a lost device may never finish the running job
            self._thread.shutdown(cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            job = next(job for job in self._jobs if not job.is_started)
            job.is_started = True
        try:
            job.future.set_result(job.run())
        except BaseException as error:  # any error belongs to the callback
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
