"""The activity of the engine's loop, and the time of the device. Every call of the backend passes through here."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from skyrl_tx.contract.backend import AbstractBackend, Pass
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.errors import BackendLost, RequestError
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.process.signals import ServiceThread

HOST_WORK = "scheduling and storing requests"
_MAX_SUBJECTS = 3
_GROWTH = 1.1


@dataclass(slots=True, eq=False)
class Activity:
    """One activity of the loop. Each call of the backend is a new object."""

    name: str
    """Shown to every client, so it does not say whose request it is."""
    started_at: float
    """A value of `time.monotonic`."""
    is_limited: bool = False
    """Whether the engine restarts when this takes too long, as calls of the backend do."""
    arguments: tuple[Any, ...] = ()
    """Arguments of a call of the backend."""

    def __str__(self) -> str:
        """Return the name with the ids of models, samplers or requests; for the log only."""
        ids = list(dict.fromkeys(each for argument in self.arguments for each in _list_subject_ids(argument)))
        more = ", …" if len(ids) > _MAX_SUBJECTS else ""
        return f"{self.name} ({', '.join(ids[:_MAX_SUBJECTS])}{more})" if ids else self.name


def _list_subject_ids(argument: object) -> Iterable[str]:
    match argument:
        case str():
            return (argument,)
        case PreparedModelPassBatch():
            return (str(example.model_id) for example in argument.examples)
        case PreparedSampleBatch():
            return (str(request.request_id) for request in argument.requests)
        case _:
            return ()


class LoopActivity:
    """The activity of the engine's loop. Written by the loop's thread, read by any thread."""

    def __init__(self) -> None:
        self.current: Activity | None = None
        """None while the loop waits for requests."""
        self.call_seconds: defaultdict[str, float] = defaultdict(float)
        """The seconds so far in calls of the backend, by the name of the call."""

    def start(self, name: str) -> None:
        """Make `name` the activity until the next one starts."""
        self.current = Activity(name, time.monotonic())

    def mark_idle(self) -> None:
        """Record that the loop waits for requests."""
        self.current = None

    @contextmanager
    def track(self, name: str, *, is_limited: bool = False) -> Generator[None]:
        """Make `name` the activity inside the context."""
        before = self.current
        self.current = Activity(name, time.monotonic(), is_limited)
        try:
            yield
        finally:
            self.resume(before)

    def resume(self, before: Activity | None) -> None:
        """Continue an earlier activity, which counts from now on."""
        self.current = None if before is None else Activity(before.name, time.monotonic())


def monitor_backend(backend: AbstractBackend, activity: LoopActivity) -> AbstractBackend:
    """Return a backend whose calls are the loop's activity, and that raises BackendLost for a lost device.

    After an unexpected error of any call, `check_devices` decides whether the request failed or the device is lost.
    """
    return cast(AbstractBackend, _MonitoredProxy(backend, activity, backend.check_devices))


class _MonitoredProxy:
    """A backend, or a pass of it, with monitored methods."""

    def __init__(
        self,
        target: object,
        activity: LoopActivity,
        check_devices: Callable[[], None],
        started_by: Activity | None = None,
    ) -> None:
        """`started_by` is the call that returned a pass: all calls of the pass have its name."""
        self._target = target
        self._activity = activity
        self._check_devices = check_devices
        self._started_by = started_by

    @property
    def is_waiting(self) -> bool:
        """See Pass. It takes no time, and is no activity."""
        return cast(Pass, self._target).is_waiting

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self._started_by is not None:
                shown, arguments_shown = self._started_by.name, self._started_by.arguments
            elif name == "begin_pass":
                shown, arguments_shown = "forward_backward" if named.get("backward") else "forward", arguments
            else:
                shown, arguments_shown = name, arguments
            activity = Activity(shown, time.monotonic(), is_limited=True, arguments=arguments_shown)
            return self._call(activity, method, arguments, named)

        if self._started_by is None:  # a pass must not refer to itself: its arrays would wait for garbage collection
            setattr(self, name, call)  # later calls find it at once
        return call

    def _call(
        self, call: Activity, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        activity = self._activity
        before, activity.current = activity.current, call
        try:
            result = method(*arguments, **named)
        except (RequestError, BackendLost):
            raise
        except Exception as error:
            self._check_devices_after(error)
            raise
        finally:
            activity.call_seconds[call.name] += time.monotonic() - call.started_at
            activity.resume(before)
        return _MonitoredProxy(result, activity, self._check_devices, call) if isinstance(result, Pass) else result

    def _check_devices_after(self, error: Exception) -> None:
        try:
            self._check_devices()
        except Exception as lost:
            raise BackendLost(f"{lost}; found after {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class DeviceTime:
    """The time at which work first reached the device, and the seconds of the device that it has taken.

    Work of one `kind` takes about equally long each time that it is dispatched.
    """

    kind: str
    started_at: float = field(default_factory=time.time)
    device_s: float = 0.0


class DeviceClock:
    """The time of calls since the device had last done all that was dispatched, divided among the work of these calls.

    A backend may return before the device has done the work. A call that waits for its own result then also waits for
    the work of others that was dispatched before. Time is therefore divided when a call has completed all work until
    then.

    What each kind of work takes is known from times without another kind. It is the least time seen of late, so that
    compilation does not count: each longer time raises it by a tenth at most.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._elapsed_s = 0.0
        self._dispatched: list[DeviceTime] = []
        self._typical_s: dict[str, float] = {}

    @contextmanager
    def measure_dispatch(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that dispatches work and may return before it is done."""
        self._dispatched.append(work)
        began = self._now()
        try:
            yield
        finally:
            self._elapsed_s += self._now() - began

    @contextmanager
    def measure_completion(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that returns results of work, and divide the time since the last one."""
        began = self._now()
        try:
            yield
        finally:
            elapsed_s = self._now() - began
            if self._dispatched:
                self._elapsed_s += elapsed_s
                self._divide_elapsed()
            else:
                work.device_s += elapsed_s

    def _divide_elapsed(self) -> None:
        counts = Counter(work.kind for work in self._dispatched)
        mean_s = self._elapsed_s / counts.total()
        if len(counts) == 1:
            (kind,) = counts
            self._typical_s[kind] = min(mean_s, _GROWTH * self._typical_s.get(kind, mean_s))
        weights = {kind: self._typical_s.get(kind, mean_s) for kind in counts}
        unit = self._elapsed_s / (sum(weights[kind] * count for kind, count in counts.items()) or 1.0)
        for work in self._dispatched:
            work.device_s += unit * weights[work.kind]
        self._elapsed_s = 0.0
        self._dispatched.clear()


_PERIOD_S = 1.0
_CHECKS_PER_LIMIT = 4
_Phase = Literal["step", "compile"]
_NOTHING_SPENT: dict[_Phase, float] = {"step": 0.0, "compile": 0.0}


class Watchdog:
    """Reports an activity that exceeds its limit, and calls `on_stuck` if the engine must restart then.

    Only time in which this process runs counts: a suspended machine or a stopped process is no stuck call.
    """

    def __init__(
        self,
        activity: LoopActivity,
        backend: AbstractBackend,
        settings: EngineSettings,
        on_stuck: Callable[[str], object],
    ) -> None:
        """`on_stuck` receives the reason, for the log."""
        self._activity = activity
        self._backend = backend
        self._limits: dict[_Phase, float] = {"step": settings.step_timeout_s, "compile": settings.compile_timeout_s}
        self._on_stuck = on_stuck
        shortest_s = min((limit for limit in self._limits.values() if limit), default=_PERIOD_S)
        self._period_s = min(_PERIOD_S, shortest_s / _CHECKS_PER_LIMIT)
        self._watched: Activity | None = None
        self._spent_s: dict[_Phase, float] = _NOTHING_SPENT
        self._overdue = ""
        self._ended = threading.Event()
        self._thread = ServiceThread("watchdog", self._repeat)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    @property
    def overdue(self) -> str:
        """Which activity exceeds its limit, for clients; empty if none does."""
        return self._overdue if self._activity.current is self._watched else ""

    def describe_activity(self) -> tuple[str, float] | None:
        """Return the name of the current activity and its age in seconds, for clients; None while the loop is idle."""
        current = self._activity.current
        if current is None:
            return None
        is_compiling = current.is_limited and self._backend.is_compiling()
        return current.name + " (compiling)" * is_compiling, time.monotonic() - current.started_at

    def check(self, elapsed_s: float) -> None:
        """Count the time since the last check to the current activity, and compare it with its limit."""
        current = self._activity.current
        if current is not self._watched:
            self._watched, self._spent_s, self._overdue = current, _NOTHING_SPENT, ""
        if current is None:
            return
        # The backend's start loads weights and compiles most programs.
        is_long = current.is_limited and (current.name == "start" or self._backend.is_compiling())
        phase: _Phase = "compile" if is_long else "step"
        spent_s = self._spent_s[phase] + min(elapsed_s, time.monotonic() - current.started_at)
        self._spent_s = {**self._spent_s, phase: spent_s}
        limit = self._limits[phase]
        if limit and spent_s > limit:
            exceeds = f"has taken longer than --{phase}-timeout-s, which is {limit:g} s"
            self._overdue = f"{current.name} {exceeds}"
            if current.is_limited:
                self._on_stuck(f"{current} {exceeds}")

    def _repeat(self) -> None:
        checked_at = time.monotonic()
        while not self._ended.wait(self._period_s):
            now = time.monotonic()
            self.check(min(now - checked_at, 2 * self._period_s))
            checked_at = now
