"""Replaces clocks, threads, random numbers and blocking calls in the modules of the product.

Modules are changed, not the standard library: every name of a `skyrl_tx` module that refers to the real thing refers
to the simulated one inside `substituted`, and so does every default of a parameter that is a clock. Names that are
imported later refer to the real thing.
"""

import concurrent.futures
import contextlib
import queue
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import anyio.to_thread
from fastapi import concurrency

from skyrl_tx.process import signals
from tests.support.simulation import scheduler as fibers
from tests.support.simulation.scheduler import Scheduler

T = TypeVar("T")


class Standing:
    """Replaces some names of a module. All other names come from the original module."""

    def __init__(self, module: object, **names: object) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


Future = concurrent.futures.Future


def _make_waiter(scheduler: Scheduler, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Future.result` or `Future.exception` for fibers. The class is changed, because fields refer to it."""

    def wait(self: Future[Any], timeout: float | None = None) -> Any:
        if not self.done():
            me = scheduler.current
            self.add_done_callback(lambda _: scheduler.wake(me, on=self))
            while not self.done() and scheduler.park(timeout, on=self):
                pass
        return method(self, 0)

    return wait


class SimpleQueue:
    """`queue.SimpleQueue` of fibers."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._make_waiter: list[fibers.Fiber] = []

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._make_waiter:
            self.scheduler.wake(self._make_waiter.pop(), on=self)

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        while not self._items:
            if not block:
                raise queue.Empty
            self._make_waiter.append(self.scheduler.current)
            if not self.scheduler.park(timeout, on=self):
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class ThreadPoolExecutor:
    """A pool of one fiber."""

    scheduler: Scheduler

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool") -> None:
        assert max_workers == 1, "the product's pools have one thread each"
        self._jobs = SimpleQueue()
        process = self.scheduler.current.process
        self._fiber = self.scheduler.spawn(self._serve, process=process, name=f"{process.name}/{thread_name_prefix}")

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = Future[T]()
        self._jobs.put((future, lambda: work(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            while not self._jobs.empty():
                job = cast(tuple[Future[Any], Callable[[], Any]], self._jobs.get())
                job[0].cancel()
        self._jobs.put(None)
        if wait:
            self.scheduler.join(self._fiber)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = cast(tuple[Future[Any], Callable[[], Any]], job)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)


class _Random(random.Random):
    """Random numbers of the history, however they are seeded."""


async def run_here(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run blocking work on the event loop: reads of the database take no time here."""
    kwargs.pop("limiter", None)
    return work(*args, **kwargs)


@contextlib.contextmanager
def install_substitutes(
    scheduler: Scheduler,
    *,
    on_error: Callable[[str, BaseException], None],
    own: Sequence[tuple[object, object]],
    names: Mapping[tuple[str, str], object],
) -> Generator[None]:
    """Substitute inside the context.

    `own` are further pairs of a real object and its substitute; `names` are values of names by module.
    """
    SimpleQueue.scheduler = ThreadPoolExecutor.scheduler = scheduler

    def current_thread() -> object:
        return scheduler.current.thread

    def rng() -> random.Random:
        return _Random(scheduler.random.getrandbits(64))

    def token_bytes(count: int = 32) -> bytes:
        return scheduler.random.randbytes(count)

    def token_hex(count: int = 32) -> str:
        return token_bytes(count).hex()

    class AnyThread(fibers.Thread):
        def __init__(self, group: None = None, **options: Any) -> None:
            super().__init__(scheduler, on_error, **options)

    class AnyServiceThread(AnyThread):
        def __init__(self, name: str, work: Callable[[], object]) -> None:
            super().__init__(target=work, name=name)

    clock = Standing(
        time,
        time=lambda: scheduler.wall,
        monotonic=lambda: scheduler.monotonic,
        perf_counter=lambda: scheduler.monotonic,
        sleep=scheduler.sleep,
    )
    stand_ins: dict[int, object] = {
        id(signals.ServiceThread): AnyServiceThread,
        id(time): clock,
        id(threading): Standing(
            threading,
            Thread=AnyThread,
            Event=lambda: fibers.Event(scheduler),
            Lock=lambda: fibers.Lock(scheduler),
            RLock=lambda: fibers.Lock(scheduler, is_reentrant=True),
            current_thread=current_thread,
        ),
        id(secrets): Standing(secrets, token_bytes=token_bytes, token_hex=token_hex, token_urlsafe=token_hex),
        id(random): Standing(
            random, Random=rng, **{name: getattr(scheduler.random, name) for name in ("random", "uniform")}
        ),
        id(concurrent.futures.ThreadPoolExecutor): ThreadPoolExecutor,
        id(queue.SimpleQueue): SimpleQueue,
        id(concurrency.run_in_threadpool): run_here,
        id(anyio.to_thread): Standing(anyio.to_thread, run_sync=run_here),
        **{id(real): substitute for real, substitute in own},
    }
    changed: list[tuple[dict[str, object], str, object]] = []

    def change(module: dict[str, object], name: str, value: object) -> None:
        changed.append((module, name, module[name]))
        module[name] = value

    for module, name, real in _product_names(frozenset(stand_ins)):
        change(module, name, stand_ins[id(real)])
    for (path, name), value in names.items():
        change(vars(sys.modules[path]), name, value)
    clocks = {id(getattr(time, name)): getattr(clock, name) for name in _CLOCKS}
    defaults = [(function, function.__defaults__) for function in _with_clock_defaults(frozenset(clocks))]
    for function, real in defaults:
        function.__defaults__ = tuple(clocks.get(id(value), value) for value in real or ())
    methods = {name: getattr(Future, name) for name in ("result", "exception")}
    for name, method in methods.items():
        setattr(Future, name, _make_waiter(scheduler, method))

    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Future, name, method)
        for function, real in defaults:
            function.__defaults__ = real
        for module, name, value in reversed(changed):
            module[name] = value


_CLOCKS = ("time", "monotonic", "perf_counter", "sleep")
_functions: dict[int, list[FunctionType]] = {}


def _with_clock_defaults(wanted: frozenset[int]) -> list[FunctionType]:
    """Return the functions and methods of the product with a default that is one of these objects."""
    key = len(sys.modules)
    if key not in _functions:
        modules = [module for name, module in sys.modules.items() if name.startswith("skyrl_tx.")]
        named = [value for module in modules for value in list(vars(module).values())]
        methods = [value for one in named if isinstance(one, type) for value in list(vars(one).values())]
        functions = {id(value): value for value in (*named, *methods) if isinstance(value, FunctionType)}
        _functions[key] = [
            function
            for function in functions.values()
            if (function.__module__ or "").startswith("skyrl_tx.")
            and any(id(value) in wanted for value in function.__defaults__ or ())
        ]
    return _functions[key]


_found: dict[tuple[int, frozenset[int]], list[tuple[dict[str, object], str, object]]] = {}


def _product_names(wanted: frozenset[int]) -> list[tuple[dict[str, object], str, object]]:
    """Return the names of the product's modules that refer to objects with these ids."""
    key = len(sys.modules), wanted
    if key not in _found:
        modules = [module for name, module in sys.modules.items() if name.startswith("skyrl_tx.")]
        _found[key] = [
            (vars(module), name, value)
            for module in modules
            for name, value in list(vars(module).items())
            if id(value) in wanted
        ]
    return _found[key]
