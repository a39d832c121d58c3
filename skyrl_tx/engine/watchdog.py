"""Time limits of the loop's activities, checked on a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Literal

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.engine.activity import Activity, LoopActivity
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.process.threads import ServiceThread

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
