"""Divides the time of the backend's calls among the work that the device did in it.

A backend may return before the device has done the work. A call that waits for its own result then also waits for the
work of others that was dispatched before. Time is therefore divided when a call has completed all work until then.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

_GROWTH = 1.1


@dataclass(slots=True)
class DeviceTime:
    """The time at which work first reached the device, and the seconds of the device that it has taken.

    Work of one `kind` takes about equally long each time that it is dispatched.
    """

    kind: str
    started_at: float = field(default_factory=time.time)
    device_s: float = 0.0


class DeviceClock:
    """The time of calls since the device had last done all that was dispatched.

    What each kind of work takes is known from times without another kind. It is the least time seen of late, so that
    compilation does not count: each longer time raises it by a tenth at most.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._elapsed_s = 0.0
        self._dispatched: list[DeviceTime] = []
        self._typical_s: dict[str, float] = {}

    @contextmanager
    def dispatching(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that dispatches work and may return before it is done."""
        self._dispatched.append(work)
        began = self._now()
        try:
            yield
        finally:
            self._elapsed_s += self._now() - began

    @contextmanager
    def completing(self, work: DeviceTime) -> Generator[None]:
        """Measure a call that returns results of work, and divide the time since the last one."""
        began = self._now()
        try:
            yield
        finally:
            elapsed_s = self._now() - began
            if self._dispatched:
                self._elapsed_s += elapsed_s
                self._divide()
            else:
                work.device_s += elapsed_s

    def _divide(self) -> None:
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
