"""Work beside the engine's thread: writing files."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_tx.contract.ids import ModelId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    then: Callable[[Future[Any]], None]
    hold: ModelId | None


class Jobs:
    """One background thread; what follows a job runs on the engine's own."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="artifact-writer")
        self._wake = wake
        self._jobs: list[_Job] = []

    def start(self, work: Callable[[], T], then: Callable[[Future[T]], None], *, hold: ModelId | None = None) -> None:
        """Run `work` beside, then `then`. No request of the model `hold` is taken up until then."""
        future = self._thread.submit(work)
        self._jobs.append(_Job(future, then, hold))
        future.add_done_callback(lambda _: self._wake())

    @property
    def held(self) -> frozenset[ModelId]:
        """Models whose next request has to wait for a job."""
        return frozenset(job.hold for job in self._jobs if job.hold is not None)

    def finish(self, *, wait: bool = False) -> bool:
        """Run what follows the jobs that are done, in order; `wait` for all. Whether there was any."""
        num_before = len(self._jobs)
        while self._jobs and (wait or self._jobs[0].future.done()):
            job = self._jobs.pop(0)
            job.then(job.future)
        return len(self._jobs) != num_before

    def close(self) -> None:
        """End the thread; what runs is finished, what follows it is not run."""
        self._thread.shutdown(cancel_futures=True)
