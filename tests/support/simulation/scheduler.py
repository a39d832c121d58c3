"""Runs the threads of simulated processes one at a time, on a virtual clock, in an order drawn from one generator.

A `Fiber` is a thread of a simulated process. Each has a thread of the operating system, because product code blocks in
the middle of ordinary calls, but only the fiber that holds the turn runs. It passes the turn on when it blocks. The
operating system therefore decides nothing.
"""

import heapq
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

_WALL_START = 1_750_000_000.0
_MONOTONIC_START = 10_000.0


class Killed(BaseException):
    """Raised in every fiber of a process that was killed, so that its thread ends."""


class Process:
    """A simulated process of the operating system: fibers that are killed together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.fibers: dict[Fiber, None] = {}
        self.on_death: list[Callable[[], None]] = []


class _Carrier:
    """A thread of the operating system that runs one fiber after another."""

    idle: ClassVar[list["_Carrier"]] = []

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.run: Callable[[], None] = lambda: None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.turn.acquire()
            self.run()

    @classmethod
    def take(cls) -> "_Carrier":
        return cls.idle.pop() if cls.idle else cls()


class Fiber:
    """One thread of a simulated process."""

    __slots__ = (
        *("carrier", "is_done", "is_parked", "joining", "name", "number"),
        *("parked_on", "process", "thread", "ticket", "turn", "was_woken"),
    )

    def __init__(self, name: str, number: int, process: Process, turn: threading.Lock) -> None:
        self.name = name
        self.number = number
        self.process = process
        self.turn = turn
        self.carrier: _Carrier | None = None
        self.thread: Thread | None = None
        self.is_done = self.is_parked = self.was_woken = False
        self.parked_on: object = None
        self.ticket = 0
        self.joining: list[Fiber] = []


class Deadlock(Exception):
    """No fiber can run, and no timer will wake one."""


class Scheduler:
    """The fibers of one history, its clock and its random numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.monotonic = _MONOTONIC_START
        self.wall_offset = _WALL_START - _MONOTONIC_START
        self._ready: list[Fiber] = []
        self._timers: list[tuple[float, int, Fiber, int]] = []
        self._count = 0
        self.world = Process("world")
        self.current = Fiber("main", 0, self.world, threading.Lock())
        self.current.turn.acquire()
        self.world.fibers[self.current] = None
        self.num_switches = 0

    @property
    def wall(self) -> float:
        """The wall clock, in seconds since the epoch."""
        return self.monotonic + self.wall_offset

    def spawn(self, target: Callable[[], object], *, process: Process, name: str) -> Fiber:
        """Start a fiber."""
        carrier = _Carrier.take()
        self._count += 1
        fiber = Fiber(name, self._count, process, carrier.turn)
        fiber.carrier = carrier
        carrier.run = lambda: self._run(fiber, target)
        process.fibers[fiber] = None
        self._ready.append(fiber)
        return fiber

    def _run(self, fiber: Fiber, target: Callable[[], object]) -> None:
        try:
            if not fiber.process.is_dead:
                target()
        except Killed:
            pass
        fiber.is_done = True
        fiber.process.fibers.pop(fiber, None)
        for waiter in fiber.joining:
            self.wake(waiter, on=fiber)
        following = self._next()
        assert fiber.carrier is not None
        _Carrier.idle.append(fiber.carrier)
        self.current = following
        following.turn.release()

    def park(self, timeout_s: float | None = None, *, on: object = None) -> bool:
        """Block the current fiber until `wake` with the same `on`; return False after the timeout."""
        me = self.current
        self._check_alive(me)
        me.ticket += 1
        me.is_parked, me.parked_on, me.was_woken = True, on, False
        if timeout_s is not None:
            self._count += 1
            heapq.heappush(self._timers, (self.monotonic + max(timeout_s, 0.0), self._count, me, me.ticket))
        self._switch(me)
        return me.was_woken

    def pause(self) -> None:
        """Let other fibers run."""
        me = self.current
        self._check_alive(me)
        if self._ready or (self._timers and self._timers[0][0] <= self.monotonic):
            self._ready.append(me)
            self._switch(me)

    def sleep(self, seconds: float) -> None:
        """Block the current fiber for a time."""
        self.park(seconds)

    def wake(self, fiber: Fiber, *, on: object) -> None:
        """End the fiber's `park`; no effect if it does not block, or on something else."""
        if fiber.is_parked and (fiber.parked_on is on or fiber.process.is_dead):
            fiber.is_parked, fiber.was_woken = False, True
            self._ready.append(fiber)

    def join(self, fiber: Fiber, timeout_s: float | None = None) -> None:
        """Wait for the end of a fiber."""
        end = None if timeout_s is None else self.monotonic + timeout_s
        while not fiber.is_done:
            fiber.joining.append(self.current)
            if not self.park(None if end is None else end - self.monotonic, on=fiber):
                return

    def kill(self, process: Process) -> None:
        """Kill a process. If the current fiber is part of it, raise Killed."""
        self.end(process)
        self._check_alive(self.current)

    def end(self, process: Process) -> None:
        """Mark a process as killed. Its fibers end when they have the turn."""
        if not process.is_dead:
            process.is_dead = True
            for fiber in list(process.fibers):
                self.wake(fiber, on=None)
            for notify in process.on_death:
                notify()

    def bury(self, process: Process) -> None:
        """Wait until the fibers of a killed process have ended."""
        while process.fibers:
            self.join(next(iter(process.fibers)))

    def _check_alive(self, fiber: Fiber) -> None:
        if fiber.process.is_dead:
            raise Killed(fiber.process.name)

    def _switch(self, me: Fiber) -> None:
        following = self._next()
        if following is not me:
            self.num_switches += 1
            self.current = following
            following.turn.release()
            me.turn.acquire()
        self._check_alive(me)

    def _next(self) -> Fiber:
        while True:
            while self._timers and self._timers[0][0] <= self.monotonic:
                *_, fiber, ticket = heapq.heappop(self._timers)
                if fiber.is_parked and fiber.ticket == ticket:
                    fiber.is_parked = False
                    self._ready.append(fiber)
            ready = self._ready
            if ready:
                index = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
                ready[index], ready[-1] = ready[-1], ready[index]
                return ready.pop()
            if not self._timers:
                raise Deadlock
            self.monotonic = self._timers[0][0]


class Event:
    """`threading.Event` of fibers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Fiber] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            self._scheduler.wake(fiber, on=self)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            me = self._scheduler.current
            self._waiting.append(me)
            if not self._scheduler.park(timeout, on=self) and me in self._waiting:
                self._waiting.remove(me)
        return self._is_set


class Lock:
    """`threading.Lock` of fibers, and with `is_reentrant` an RLock."""

    def __init__(self, scheduler: Scheduler, *, is_reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._is_reentrant = is_reentrant
        self._owner: Fiber | None = None
        self._depth = 0
        self._waiting: list[Fiber] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._scheduler.current
        if self._owner is me and self._is_reentrant:
            self._depth += 1
            return True
        end = None if timeout < 0 else self._scheduler.monotonic + timeout
        while self._owner is not None:
            if not blocking or (end is not None and self._scheduler.monotonic >= end):
                return False
            self._waiting.append(me)
            self._scheduler.park(None if end is None else end - self._scheduler.monotonic, on=self)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            waiting, self._waiting = self._waiting, []
            for fiber in waiting:
                self._scheduler.wake(fiber, on=self)

    def locked(self) -> bool:
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """`threading.Thread` as a fiber of the process that starts it. An error that ends it is recorded."""

    def __init__(
        self,
        scheduler: Scheduler,
        on_error: Callable[[str, BaseException], None],
        *,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._on_error = on_error
        self._target = target
        self._arguments = args, kwargs or {}
        self._fiber: Fiber | None = None
        self.name = name or "thread"
        self.daemon = daemon

    def start(self) -> None:
        process = self._scheduler.current.process
        self._fiber = self._scheduler.spawn(self._run, process=process, name=f"{process.name}/{self.name}")
        self._fiber.thread = self

    def run(self) -> None:
        args, kwargs = self._arguments
        if self._target is not None:
            self._target(*args, **kwargs)

    def _run(self) -> None:
        try:
            self.run()
        except Exception as error:
            assert self._fiber is not None
            self._on_error(self._fiber.name, error)

    def join(self, timeout: float | None = None) -> None:
        assert self._fiber is not None, "not started"
        self._scheduler.join(self._fiber, timeout)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.is_done
