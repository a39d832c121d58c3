"""An asyncio event loop of a simulated process, on one fiber."""

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from tests.support.simulation.scheduler import Fiber, Process, Scheduler

T = TypeVar("T")


class EventLoop(asyncio.AbstractEventLoop):
    """Runs callbacks and timers; blocking work runs on the loop."""

    def __init__(self, scheduler: Scheduler, process: Process, on_error: Callable[[str, BaseException], None]) -> None:
        """Start the loop's fiber."""
        self._scheduler = scheduler
        self._on_error = on_error
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._is_closed = False
        self._fiber: Fiber = scheduler.spawn(self._run, process=process, name=f"{process.name}/loop")

    def _run(self) -> None:
        events._set_running_loop(self)

        try:
            while not self._is_closed:
                now = self.time()
                due = [timer for timer in self._timers if timer.when() <= now or timer.cancelled()]
                if due:
                    self._timers = [timer for timer in self._timers if timer not in due]
                    self._ready.extend(sorted(due, key=asyncio.TimerHandle.when))
                while self._ready:
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
                self._timers = [timer for timer in self._timers if not timer.cancelled()]
                next_at = min((timer.when() for timer in self._timers), default=None)
                if next_at is None or next_at > self.time():
                    self._scheduler.park(None if next_at is None else next_at - self.time(), on=self)
        finally:
            events._set_running_loop(None)

    def time(self) -> float:
        return self._scheduler.monotonic

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._scheduler.current is not self._fiber:
            self._scheduler.wake(self._fiber, on=self)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers.append(timer)
        if self._scheduler.current is not self._fiber:
            self._scheduler.wake(self._fiber, on=self)
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> "asyncio.Task[T]":
        return asyncio.Task(coro, loop=self)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._is_closed

    def stop(self) -> None:
        self._is_closed = True
        self._scheduler.wake(self._fiber, on=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self._fiber.process.is_dead:
            self._on_error(self._fiber.name, error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._scheduler.wake(self._fiber, on=self)
