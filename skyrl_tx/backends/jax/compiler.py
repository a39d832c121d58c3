"""Compiles programs on threads of its own, the likeliest first, while the backend starts and requests run.

Which program a request needs follows from the request alone, never from what is compiled, so that its bits do not
depend on it. A request waits for its own programs only, which are compiled before all that are merely likely, whether
by threads of the compiler or by the calls of the request.

The options of XLA's compilers are here too: for GPUs by kind of program, for CPUs by process. Compilers for
other devices know and ignore them. XLA refuses options that it does not know, except options of CPUs, and
drops some over time: these are known to exist up to JAX 0.11.
"""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyrl_tx.backends.jax.devices import CompilationMonitor
from skyrl_tx.process.signals import ServiceThread

Key = TypeVar("Key", bound=Hashable)

_NICENESS = 5
"""The niceness of threads that compile: on busy cores, one of them has a third of the time of another thread."""
_IDLE_S = 1.0
"""Likely programs wait until no call has compiled a program itself for this long: a request needs several in turn.

XLA compiles the parts of all programs with the same threads, in their order, whatever the niceness of who asks.
"""
_LOG_EVERY = 5
"""Programs between two lines of the log."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A jitted function with its static arguments, and its other arguments or their shapes."""

    function: Any  # what jax.jit returns
    arguments: tuple[Any, ...]
    static: Mapping[str, Any]

    def compile(self) -> Callable[..., Any]:
        """Return the compiled program."""
        return self.function.lower(*self.arguments, **self.static).compile()

    def compile_lazily(self) -> Callable[..., Any]:
        """Return the function, which compiles itself when it is called."""
        return partial(self.function, **self.static)


@dataclass(slots=True)
class CompiledProgram:
    """A program that can be called with all arguments but the static ones."""

    call: Callable[..., Any]
    num_calls: int = 0
    """Counted by the caller."""


class Compiler(Generic[Key]):
    """Programs by key. Its methods are called from one thread, but for `progress`."""

    def __init__(self, num_threads: int, monitor: CompilationMonitor) -> None:
        """Start the threads: one for programs that are needed, and `num_threads` of less priority for all.

        By `monitor`, likely programs wait for calls that compile programs themselves.
        """
        self.ready: dict[Key, CompiledProgram] = {}
        """The programs that are compiled."""
        self._monitor = monitor
        self._lock = threading.Condition()
        self._likely: deque[tuple[Key, Program]] = deque()
        self._needed: deque[tuple[Key, Program]] = deque()
        self._running: set[Key] = set()
        self._num_done = 0
        self._started_at = time.monotonic()
        self._is_closed = False
        self._threads = [ServiceThread("compiler", partial(self._work, self._needed))]
        for number in range(num_threads):
            work = partial(self._work_at_low_priority, self._needed, self._likely)
            self._threads.append(ServiceThread(f"compiler-{number}", work))
        for thread in self._threads:
            thread.start()

    def queue_likely(self, programs: Iterable[tuple[Key, Program]]) -> None:
        """Compile programs when no request needs another, in this order."""
        with self._lock:
            self._likely.extend(programs)
            self._lock.notify_all()

    def queue_needed(self, key: Key, program: Callable[[], Program]) -> None:
        """Compile a program before those that are merely likely, and after those that were needed earlier."""
        with self._lock:
            if key in self.ready or self._is_pending(key):
                return
            found = next((each for each in self._likely if each[0] == key), None)
            if found is not None:
                self._likely.remove(found)
            self._needed.append(found or (key, program()))
            self._lock.notify_all()

    def wait(self, key: Key, timeout_s: float) -> bool:
        """Wait for a program that is needed; return whether it is ready."""
        with self._lock, self._monitor.waiting():
            return self._lock.wait_for(lambda: key in self.ready, timeout_s)

    def wait_if_pending(self, key: Key) -> None:
        """Wait for a program if it is needed and not ready. Any other is left to its first call."""
        with self._lock:
            if not self._is_pending(key):
                return
            with self._monitor.waiting():
                self._lock.wait_for(lambda: not self._is_pending(key))

    def _is_pending(self, key: Key) -> bool:
        return key in self._running or any(key == each for each, _ in self._needed)

    def progress(self) -> str | None:
        """Describe what is left to compile; None if nothing is."""
        with self._lock:
            num_left = len(self._likely) + len(self._needed) + len(self._running)
            if not num_left:
                return None
            return (
                f"compiled {self._num_done} of {self._num_done + num_left} programs in the background, "
                f"{time.monotonic() - self._started_at:.0f} s"
            )

    def close(self) -> None:
        """Compile nothing more, and wait for the programs that are being compiled. Idempotent.

        XLA cannot be interrupted, and a process that ends while it compiles is aborted.
        """
        with self._lock:
            self._is_closed = True
            self._likely.clear()
            self._needed.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _work_at_low_priority(self, *queues: deque[tuple[Key, Program]]) -> None:
        if sys.platform == "linux":  # elsewhere the niceness is that of the process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._work(*queues)

    def _work(self, *queues: deque[tuple[Key, Program]]) -> None:
        self._monitor.exclude_this_thread()
        while (taken := self._take_program(queues)) is not None:
            key, program = taken
            try:
                ready = CompiledProgram(program.compile())
            except Exception:  # the request that needs it gets the error itself
                log.warning("cannot compile %s in the background", key, exc_info=True)
                ready = CompiledProgram(program.compile_lazily())
            with self._lock:
                self.ready[key] = ready
                self._running.discard(key)
                self._num_done += 1
                self._lock.notify_all()
            self._log_progress()

    def _take_program(self, queues: Iterable[deque[tuple[Key, Program]]]) -> tuple[Key, Program] | None:
        """Return the next program of the first queue that has one; None when the compiler is closed."""
        with self._lock:
            while not self._is_closed:
                wait_s = None
                for queue in queues:
                    if queue is self._likely and queue:
                        wait_s = max(_IDLE_S - self._monitor.seconds_since_call, 0.0)
                        if wait_s:
                            continue
                    while queue:
                        taken = queue.popleft()
                        if taken[0] not in self.ready and taken[0] not in self._running:
                            self._running.add(taken[0])
                            return taken
                self._lock.wait(wait_s)
            return None

    def _log_progress(self) -> None:
        progress = self.progress()
        if progress is None:
            log.info(
                "compiled %d programs in the background, %.0f s", self._num_done, time.monotonic() - self._started_at
            )
        elif self._num_done % _LOG_EVERY == 0:
            log.info("%s", progress)


class Popularity:
    """How often programs were called, in a file that servers of the same model share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, int]:
        """Return the calls of each program by name, the most first; empty without a readable file."""
        try:
            content = json.loads(self._path.read_text())
            counts = {str(name): int(count) for name, count in content.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
        return dict(sorted(counts.items(), key=lambda each: -each[1]))

    def add(self, counts: Mapping[str, int]) -> None:
        """Add calls to the file. Two servers that write at the same time may lose counts, and nothing else."""
        total = self.read()
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(total, indent=1))
            own.replace(self._path)
        except OSError as error:
            log.warning("cannot write which programs are popular: %s", error)


_CompilerOptions = dict[str, bool | int | str] | None

_OPTIONS_ARE_KNOWN = tuple(map(int, version("jax").split(".")[:2])) < (0, 12)

TRAINING_OPTIONS: _CompilerOptions = (
    {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True} if _OPTIONS_ARE_KNOWN else None
)
"""The arrays in which a loop over layers keeps what the backward pass reads are not filled with zeros first.

Measured on an H200: 36 of 2,273 ms of a step of Qwen3-8B, and 10 of 379 ms of 0.6B.
"""

_CUDA_GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"

DECODING_OPTIONS: _CompilerOptions = (
    {"xla_gpu_dot_merger_threshold_mb": 4, "xla_gpu_enable_command_buffer": _CUDA_GRAPH_COMMANDS}
    if _OPTIONS_ARE_KNOWN
    else None
)
"""Which products are joined, and what is a part of CUDA graphs.

Products of the same rows are joined into one only if their weights are narrow, as the first factors of adapters are.
The product of Qwen3-4B's gate and up, which XLA joins up to 64 MB, took 92 microseconds on an H200 for 256 rows.

XLA's choice has no loops and conditionals in graphs: then the host starts each step after it has read whether there is
one more, and is busy with a slice until that has ended. With them a step of 256 samples by eight layers of
Qwen3-0.6B takes 3.53 in place of 4.05 ms on an H200. A training step takes as long.
"""

_CPU_OPTIONS = "xla_cpu_disable_loop_unrolling=1,xla_cpu_disable_tiled_emitter=1"
"""Loops of kernels are vectorized, but not unrolled, and all kernels are generated alike.

A gradient of 30M parameters compiles in 0.7 of the CPU time, and a step and decoding take as long.
"""

_CPU_FLAG = "--xla_backend_extra_options"


def set_cpu_options(environment: MutableMapping[str, str]) -> None:
    """Set the options for CPUs in XLA_FLAGS, which XLA reads once: before its first use in a process.

    They cannot be given by program. If the user has set this flag, it stays.
    """
    flags = environment.get("XLA_FLAGS", "")
    if _CPU_FLAG not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_CPU_FLAG}={_CPU_OPTIONS}".strip()
