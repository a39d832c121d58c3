"""Writes files on a background thread, and runs the callbacks on the engine's thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_tx.contract.ids import ModelId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    callback: Callable[[Future[Any]], None]
    blocks: ModelId | None


class BackgroundWriter:
    """One background thread; jobs run in order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the background thread after each job, so that the engine runs the callback."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="artifact-writer")
        self._wake = wake
        self._jobs: list[_Job] = []

    def submit(
        self, job: Callable[[], T], callback: Callable[[Future[T]], None], *, blocks: ModelId | None = None
    ) -> None:
        """Run `job` in the background, then `callback` on the engine's thread.

        Until then the engine starts no request of the model `blocks`.
        """
        future = self._thread.submit(job)
        self._jobs.append(_Job(future, callback, blocks))
        future.add_done_callback(lambda _: self._wake())

    @property
    def blocked_models(self) -> frozenset[ModelId]:
        """Models whose next request waits for a job."""
        return frozenset(job.blocks for job in self._jobs if job.blocks is not None)

    def run_callbacks(self) -> bool:
        """Run the callbacks of finished jobs, in order. Returns whether there was any."""
        num_before = len(self._jobs)
        while self._jobs and self._jobs[0].future.done():
            self._run_callback()
        return len(self._jobs) != num_before

    def drain(self) -> None:
        """Wait for all jobs and run their callbacks."""
        while self._jobs:
            self._run_callback()

    def close(self) -> None:
        """End the thread: the running job ends, queued jobs and all callbacks are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _run_callback(self) -> None:
        job = self._jobs.pop(0)
        job.callback(job.future)
