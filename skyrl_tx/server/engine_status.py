"""The engine's health as the API reports it, and admission control for sample requests."""

import asyncio
import collections
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

from fastapi.concurrency import run_in_threadpool

from skyrl_tx.server.errors import too_many_requests
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import REQUEST_BYTES, Pause, SampleLoad, collect_pauses
from skyrl_tx.store.futures import SubmittedRequest
from skyrl_tx.store.tables import EngineStateRow

_HEALTH_MAX_AGE_S = 0.5
_LOAD_MAX_AGE_S = 0.25
_AFFINITY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The engine's health at one point in time."""

    problem: str | None = None
    """Why the engine executes no requests. None while it is healthy."""
    activity: str | None = None
    """An activity that takes longer than `engine_silence_s`, such as a large training batch.

    The engine counts as healthy meanwhile.
    """
    outage: str | None = None
    """A part of the backend that does not work, such as a sampler on another server.

    The engine itself counts as healthy.
    """
    progress: str | None = None
    """Progress of background work, such as compilation."""
    pauses: tuple[Pause, ...] = ()
    """The quotas that requests are waiting for."""

    @property
    def detail(self) -> str | None:
        """The outage, long activity and progress of a healthy engine.

        None if there is nothing to report.
        """
        return "; ".join(filter(None, (self.outage, self.activity, self.progress))) or None


class EngineHealth:
    """Reads the engine's published status. Concurrent polls share one query."""

    def __init__(self, store: Store, silence_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._checked_at = float("-inf")
        self._cached = EngineReport()
        self._lock = asyncio.Lock()

    def read_report(self) -> EngineReport:
        """Read the engine's health from the database."""
        rows, now = self._store.read(lambda tx: (engine_state.list_engines(tx), engine_state.get_shared_time(tx)))
        state = engine_state.choose_main_engine(rows)
        if state is None:
            return EngineReport(problem="the engine has not started yet")

        problem, activity = self._find_problem(state, now), None
        if state.activity_since is not None and (age_s := state.updated_at - state.activity_since) > self._silence_s:
            activity = f"the engine has been busy for {age_s:.0f} s: {state.activity}"
        pauses = collect_pauses(*rows)
        if problem is not None:
            return EngineReport(problem="; ".join(filter(None, (problem, activity))), pauses=pauses)

        return EngineReport(
            activity=activity,
            outage=engine_state.get_backend_text(rows, "outage"),
            progress=engine_state.get_backend_text(rows, "progress"),
            pauses=pauses,
        )

    def _find_problem(self, state: EngineStateRow, now: float) -> str | None:
        silence_s = now - state.updated_at
        if silence_s > self._silence_s:
            silence = f"the engine has published no status for {silence_s:.0f} s"
            return silence if self._store.write_failure is None else f"{silence}; {self._store.write_failure}"
        if state.status != "ready":
            return f"the engine is {state.status}" + (f": {state.detail}" if state.detail else "")
        return f"the engine waits: {state.detail}" if state.detail else None

    async def get_recent_report(self) -> EngineReport:
        """Return a report that is at most half a second old. Called on one event loop."""
        async with self._lock:
            if time.monotonic() - self._checked_at >= _HEALTH_MAX_AGE_S:
                self._cached = await run_in_threadpool(self.read_report)
                self._checked_at = time.monotonic()
            return self._cached

    async def get_report_within(self, timeout_s: float) -> EngineReport:
        """Return a recent report, or the last known one if the database does not respond in time.

        Never raises an error of the database.
        """
        reading = asyncio.create_task(self.get_recent_report())
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # no warning for a late error
        await asyncio.wait({reading}, timeout=timeout_s)
        is_read = reading.done() and not reading.cancelled() and reading.exception() is None
        return reading.result() if is_read else self._cached


class AdmissionControl:
    """Limits the memory of queued sample requests (429), and chooses an engine for each request.

    **Limit.** The queued requests of all engines may take a certain number of bytes. Their size is
    what the engines last published, plus what this process has submitted since then. Every owner
    with queued requests has an equal share of the limit. If the limit is exceeded, an owner below
    its share can still submit, so that no owner can lock out other owners. The owner's requests may
    then take at most what is left of twice the limit. So memory stays bounded, and the next owner
    can always submit something.

    **Engine.** All requests of a sampling session go to the same engine, because their prompts may
    share a prefix. If that engine has more than four requests (`_AFFINITY`) above the least loaded
    engine, the least loaded engine gets the request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._engines: list[int] = []  # the engines that execute requests
        self._loads: dict[int, SampleLoad] = {}
        self._load: SampleLoad | None = None  # of all engines
        self._submitted: dict[int, deque[tuple[int, str, int]]] = {}  # by engine: (position, owner, bytes)
        self._num_bytes: collections.Counter[str] = collections.Counter()

    @contextmanager
    def reserve(self, owner: str, num_bytes: int) -> Generator[None]:
        """Count a request while it is being submitted.

        Raises ApiError 429 if there is no capacity. Without this reservation, requests that arrive
        together would all pass the check. A single request that exceeds the whole limit passes: the
        engine refuses it with an error that names both sizes.
        """
        self._refresh()
        size = num_bytes + REQUEST_BYTES
        with self._lock:
            self._check(owner, size)
            self._num_bytes[owner] += size
        try:
            yield
        finally:
            with self._lock:
                self._num_bytes[owner] -= size

    def _check(self, owner: str, size: int) -> None:
        load = self._load
        if load is None or size > load.max_bytes:
            return
        queued = load.num_bytes + self._num_bytes.total()
        if queued + size <= load.max_bytes:
            return

        own = load.by_owner.get(owner, 0) + self._num_bytes[owner]
        share = load.max_bytes // len({owner, *load.by_owner, *(+self._num_bytes)})
        if own + size > min(share, 2 * load.max_bytes - queued - size):
            detail = f"queued samples take {queued} of {load.max_bytes} bytes, {own} of them yours: send this one later"
            raise too_many_requests(detail, reason="queue_full")

    def choose_engine(self, sampling_session_id: str) -> int:
        """Choose the engine for a request of a sampling session."""
        with self._lock:
            engines = self._engines
            if len(engines) < 2:
                return engines[0] if engines else 1
            loads = {number: self._count_requests(number) for number in engines}
        preferred = max(engines, key=lambda number: crc32(f"{sampling_session_id}/{number}".encode()))
        least_loaded = min(engines, key=lambda number: (loads[number], number))
        return preferred if loads[preferred] - loads[least_loaded] <= _AFFINITY else least_loaded

    def _count_requests(self, number: int) -> int:
        load = self._loads.get(number)
        return (0 if load is None else load.num_requests) + len(self._submitted.get(number, ()))

    def record(self, owner: str, submitted: SubmittedRequest, num_bytes: int) -> None:
        """Count a submitted request until the published load of its engine includes it.

        A duplicate of an earlier request is not counted.
        """
        if submitted.position is None:
            return
        with self._lock:
            size = num_bytes + REQUEST_BYTES
            self._submitted.setdefault(submitted.engine, deque()).append((submitted.position, owner, size))
            self._num_bytes[owner] += size

    def _refresh(self) -> None:
        """Read the published loads, if the cached ones are old.

        Drop the submissions that they include.
        """
        now = time.monotonic()
        if now - self._read_at < _LOAD_MAX_AGE_S:
            return
        self._read_at = now

        rows = self._store.read(engine_state.list_engines)
        newest = max((row.updated_at for row in rows), default=0.0)
        running = [row for row in rows if engine_state.is_running(row, newest)]
        ready = [row.number for row in running if engine_state.is_ready(row, newest)]
        loads = {row.number: load for row in running if (load := engine_state.read_sample_load(row)) is not None}

        with self._lock:
            self._engines = ready or [row.number for row in running]
            self._loads, self._load = loads, _sum_loads(list(loads.values()))

            # Drop submissions that the loads include, and submissions to engines that are gone.
            present = {row.number for row in running}
            for number, submitted in self._submitted.items():
                counted = 0 if number not in loads else loads[number].position
                # Multiple threads record submissions, so they are only roughly sorted by position.
                while submitted and (submitted[0][0] <= counted or (present and number not in present)):
                    _, owner, num_bytes = submitted.popleft()
                    self._num_bytes[owner] -= num_bytes
            self._num_bytes = +self._num_bytes  # drops owners without queued bytes


def _sum_loads(loads: Sequence[SampleLoad]) -> SampleLoad | None:
    if len(loads) < 2:
        return loads[0] if loads else None
    by_owner = collections.Counter[str]()
    for load in loads:
        by_owner.update(load.by_owner)
    return SampleLoad(
        position=0,
        num_bytes=sum(load.num_bytes for load in loads),
        max_bytes=sum(load.max_bytes for load in loads),
        by_owner=by_owner,
    )
