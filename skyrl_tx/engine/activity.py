"""Track the engine's loop, measure the device's time, and detect calls that are stuck.

`monitor_backend` wraps the backend, so every backend call is recorded in `LoopActivity`. The
watchdog thread compares the current activity with its time limit. `DeviceClock` divides the
device's time among requests.
"""

import logging
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

_log = logging.getLogger(__name__)

HOST_WORK = "scheduling and storing requests"
_MAX_SUBJECTS = 3
_GROWTH = 1.1
_LONG_S = 0.1
"""Micro-batches up to this time make samples wait so briefly that one slice after each is enough."""

_PERIOD_S = 1.0
_LOG_EVERY_S = 5.0
_CHECKS_PER_LIMIT = 4
_Phase = Literal["step", "compile"]
_NOTHING_SPENT: dict[_Phase, float] = {"step": 0.0, "compile": 0.0}


@dataclass(slots=True, eq=False)
class Activity:
    """One thing that the loop is doing, for example one backend call."""

    name: str
    """Shown to all clients, so it must not reveal whose request is running."""
    started_at: float
    """Start time by `time.monotonic`."""
    is_limited: bool = False
    """Whether the engine restarts if this takes too long. True for backend calls."""
    arguments: tuple[Any, ...] = ()
    """Arguments of the backend call."""

    def __str__(self) -> str:
        """Return the name with the ids of models, samplers or requests. For the log only."""
        ids = list(dict.fromkeys(subject for argument in self.arguments for subject in _list_subject_ids(argument)))
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
    """The loop's current activity. The loop's thread writes it, any thread may read it."""

    def __init__(self) -> None:
        self.current: Activity | None = None
        """None while the loop waits for requests."""
        self.call_seconds: defaultdict[str, float] = defaultdict(float)
        """Total seconds spent in backend calls, by the name of the call."""

    def start(self, name: str) -> None:
        """Set the current activity, until the next one starts."""
        self.current = Activity(name, time.monotonic())

    def mark_idle(self) -> None:
        """Record that the loop is waiting for requests."""
        self.current = None

    @contextmanager
    def track(self, name: str, *, is_limited: bool = False) -> Generator[None]:
        """Set the current activity inside the context, then resume the activity before it."""
        before = self.current
        self.current = Activity(name, time.monotonic(), is_limited)
        try:
            yield
        finally:
            self.resume(before)

    def resume(self, before: Activity | None) -> None:
        """Resume an earlier activity. Its time starts at zero again."""
        self.current = None if before is None else Activity(before.name, time.monotonic())


def monitor_backend(backend: AbstractBackend, activity: LoopActivity) -> AbstractBackend:
    """Return a proxy of the backend that records each call as the loop's activity.

    After an unexpected error of a call, the proxy calls `check_devices`. If a device is lost, the
    proxy raises BackendLost instead of the error.
    """
    return cast(AbstractBackend, _MonitoredProxy(backend, activity, backend.check_devices))


class _MonitoredProxy:
    """Proxy of a backend, or of one of its passes, that monitors each method call."""

    def __init__(
        self,
        target: object,
        activity: LoopActivity,
        check_devices: Callable[[], None],
        started_by: Activity | None = None,
    ) -> None:
        """`started_by` is the `begin_pass` call that returned the pass.

        Calls of the pass have its name.
        """
        self._target = target
        self._activity = activity
        self._check_devices = check_devices
        self._started_by = started_by

    @property
    def is_waiting(self) -> bool:
        """Whether the pass waits for the compiler. Reading it is no activity."""
        return cast(Pass, self._target).is_waiting

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self._started_by is not None:
                call_name, subjects = self._started_by.name, self._started_by.arguments
            elif name == "begin_pass":
                call_name, subjects = "forward_backward" if named.get("backward") else "forward", arguments
            else:
                call_name, subjects = name, arguments
            activity = Activity(call_name, time.monotonic(), is_limited=True, arguments=subjects)
            return self._call(activity, method, arguments, named)

        # Store the wrapper, so that later calls skip __getattr__. A pass must not refer to itself:
        # then its arrays would stay in memory until the next garbage collection.
        if self._started_by is None:
            setattr(self, name, call)
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
            # A backend that could not read a file at its start has no devices to check.
            if not (call.name == "start" and isinstance(error, OSError)):
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
    """When a request's work first reached the device, and how many seconds of device time it used.

    `kind` groups work that takes about equally long each time, for example `step` for optimizer
    steps.
    """

    kind: str
    started_at: float = field(default_factory=time.time)
    device_s: float = 0.0


class DeviceClock:
    """Divides the device's time among the requests that use it at the same time.

    A backend call may return before the device has done its work. A later call that waits for its
    own result then also waits for the earlier work of other requests. So the clock adds up the time
    of all calls until one of them has waited for everything dispatched before it, and then divides
    the sum.

    The division uses the typical time of each kind of work, which is measured when no other kind
    is running. A typical time grows by at most 10 % per measurement, so that a single compilation
    hardly changes it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._elapsed_s = 0.0
        self._dispatched: list[DeviceTime] = []
        self._typical_s: dict[str, float] = {}

    @contextmanager
    def measure_dispatch(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that dispatches work, and may return before the device has done it."""
        self._dispatched.append(work)
        began = self._now()
        try:
            yield
        finally:
            self._elapsed_s += self._now() - began

    @contextmanager
    def measure_completion(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that waits for results. Then divide the time since the last completion."""
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

    @contextmanager
    def measure_call(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that dispatches work and waits for it."""
        self._dispatched.append(work)
        with self.measure_completion(work):
            yield

    def count_slices_per_micro_batch(self) -> int:
        """Return how many decode slices take about as long as one micro-batch of a pass.

        The result is 1 for short micro-batches, and until both have run alone.
        """
        pass_s, slice_s = self._typical_s.get("pass", 0.0), self._typical_s.get("slice", 0.0)
        return max(1, round(pass_s / slice_s)) if pass_s > _LONG_S and slice_s else 1

    def _divide_elapsed(self) -> None:
        counts = Counter(work.kind for work in self._dispatched)
        mean_s = self._elapsed_s / counts.total()

        # If only one kind was running, measure its typical time.
        if len(counts) == 1:
            (kind,) = counts
            self._typical_s[kind] = min(mean_s, _GROWTH * self._typical_s.get(kind, mean_s))

        # Divide the time by the typical time of each kind.
        weights = {kind: self._typical_s.get(kind, mean_s) for kind in counts}
        unit = self._elapsed_s / (sum(weights[kind] * count for kind, count in counts.items()) or 1.0)
        for work in self._dispatched:
            work.device_s += unit * weights[work.kind]
        self._elapsed_s = 0.0
        self._dispatched.clear()


class Watchdog:
    """Reports an activity that exceeds its time limit, and calls `on_stuck` to end the engine.

    The limits are `--step-timeout-s` and, while the backend starts or compiles,
    `--compile-timeout-s`. Time during which this process did not run does not count, for example
    while the machine was suspended.
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
        """A message for clients about an activity that exceeds its limit.

        Empty if there is none.
        """
        return self._overdue if self._activity.current is self._watched else ""

    def describe_activity(self) -> tuple[str, float] | None:
        """Return the name of the current activity and its age in seconds.

        None while the loop is idle.
        """
        current = self._activity.current
        if current is None:
            return None
        is_compiling = current.is_limited and self._backend.is_compiling()
        return current.name + " (compiling)" * is_compiling, time.monotonic() - current.started_at

    def check(self, elapsed_s: float) -> None:
        """Add the time since the last check to the current activity, and check its limit."""
        current = self._activity.current
        if current is not self._watched:
            self._watched, self._spent_s, self._overdue = current, _NOTHING_SPENT, ""
        if current is None:
            return

        # Add the time to the phase. The start of the backend counts as compilation, because it
        # loads weights and compiles most programs.
        is_long = current.is_limited and (current.name == "start" or self._backend.is_compiling())
        phase: _Phase = "compile" if is_long else "step"
        before_s = self._spent_s[phase]
        spent_s = before_s + min(elapsed_s, time.monotonic() - current.started_at)
        self._spent_s = {**self._spent_s, phase: spent_s}

        # Say why nothing else seems to happen. The backend itself logs the progress of its start.
        if phase == "compile" and current.name != "start" and before_s // _LOG_EVERY_S < spent_s // _LOG_EVERY_S:
            _log.info("%s has been compiling for %.0f s, because its shapes are new", current, spent_s)

        # Report an activity above its limit.
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
