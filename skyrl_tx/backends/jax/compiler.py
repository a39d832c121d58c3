"""Compile programs in background threads, and choose XLA options.

While the backend starts and requests run, `Compiler` compiles *likely* programs: programs that
later requests will probably use. A request waits only for the programs that it needs itself
(*needed* programs), and these are compiled before the likely ones. A likely program is put back
after it is traced or lowered if a request uses the cores by then. Which programs a request uses
depends on what is compiled already only where all of them give the same bits: in decode slices on
one CPU device (`slice_parts`). So the results never depend on it.

**Options.** GPU options are set per program, and CPU options per process in XLA_FLAGS. XLA ignores
the options of other devices, but it refuses GPU options that it does not know. The options here
exist up to JAX 0.11.
"""

import atexit
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import jax
from jax._src import xla_bridge  # pyright: ignore[reportPrivateUsage]  (JAX has no public function)
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from typing_extensions import override

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import CompilationMonitor
from skyrl_tx.backends.jax.gpu_memory import reserve_gpu_memory
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.signals import ServiceThread

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", int, bool)

_NICENESS = 5
"""The niceness of the threads for likely programs.
On busy cores, such a thread gets a third of the time of another thread."""
_IDLE_S = 1.0
"""Likely programs wait until no call has used the cores of the compiler for this long.

A request often needs more than one program, and likely programs would slow it down: XLA compiles
all programs with the same threads, first come, first served, regardless of niceness. For the same
reason a CPU compiles no likely program while it samples: with two cores, samples took twice as long.
"""
_LOG_EVERY = 5
"""How many compiled programs are between two log lines."""

log = logging.getLogger(__name__)

_started = WeakSet["Compiler[Any]"]()
"""Compilers whose threads run, or were closed while a thread was compiling."""


def _close_all() -> None:
    """Stop all compilers, and wait for running compilations: an interpreter that exits during one aborts."""
    for compiler in list(_started):
        compiler.close()
    for compiler in list(_started):
        compiler.join()


@dataclass(frozen=True, slots=True)
class Program:
    """A jitted function with the arguments to compile it for."""

    function: Any  # the result of jax.jit
    arguments: tuple[Any, ...]
    """Arguments, or their shapes."""
    static: Mapping[str, Any]
    """Static arguments."""

    def compile_in_steps(self) -> Generator[None, None, Callable[..., Any]]:
        """Return the compiled program. Yields after tracing and after lowering."""
        traced = self.function.trace(*self.arguments, **self.static)
        yield
        lowered = traced.lower()
        yield
        return lowered.compile()

    def compile_lazily(self) -> Callable[..., Any]:
        """Return a function that is compiled on its first call."""
        return partial(self.function, **self.static)


@dataclass(slots=True)
class CompiledProgram:
    """A compiled program."""

    call: Callable[..., Any]
    """Takes the arguments of the function without the static ones."""
    num_calls: int = 0
    """How often the program was called. Whoever uses `call` must increment it."""


class Compiler(Generic[Key]):
    """Compile programs in background threads, and store them by key.

    Programs that a request needs are compiled first, then the likely ones. If there are multiple
    requesters, the threads alternate between them. So a request that needs many programs delays
    another request by only one program per thread. Only `progress` is thread-safe; call all
    other methods from one thread.
    """

    def __init__(self, num_threads: int, monitor: CompilationMonitor) -> None:
        """Make one thread for needed programs, and `num_threads` threads for all programs.

        The `num_threads` threads have a low priority. All threads start with the first program.
        `monitor` says whether a call is using the cores of the compiler. No thread starts a likely
        program during that time.
        """
        self.ready: dict[Key, CompiledProgram] = {}
        """The compiled programs."""

        self._monitor = monitor
        self._lock = threading.Condition()
        self._likely: deque[tuple[Key, Program]] = deque()
        self._needed: dict[Hashable, deque[tuple[Key, Program]]] = {}  # by requester; the next requester first
        self._running: set[Key] = set()
        self._only_likely: set[Key] = set()  # the programs of _running that no request needs
        self._begun: dict[Key, Generator[None, None, Callable[..., Any]]] = {}  # likely programs that were put back
        self._num_done = 0
        self._started_at = time.monotonic()
        self._is_closed = False
        self._threads = [ServiceThread("compiler", partial(self._work, takes_likely=False))]
        for number in range(num_threads):
            self._threads.append(ServiceThread(f"compiler-{number}", self._work_at_low_priority))
        self._is_started = False

    def queue_likely(self, programs: Iterable[tuple[Key, Program]]) -> None:
        """Compile programs in this order, while no needed program is waiting."""
        with self._lock:
            self._likely.extend(programs)
            self._notify_threads()

    def queue_needed(self, key: Key, program: Callable[[], Program], requester: Hashable = None) -> None:
        """Compile a program before all likely ones, after other programs of the same requester.

        `requester` identifies who needs the program, for example a training pass. `program` is
        called to make the program, unless it is queued or compiled already.
        """
        with self._lock:
            queued_for_requester = self._needed.get(requester, ())
            is_queued = any(key == needed for needed, _ in queued_for_requester)
            self._only_likely.discard(key)
            if key in self.ready or key in self._running or is_queued:
                return
            queued = next((entry for entry in self._likely if entry[0] == key), None)
            if queued is not None:
                self._likely.remove(queued)
            self._needed.setdefault(requester, deque()).append(queued or (key, program()))
            self._notify_threads()

    def wait(self, key: Key, timeout_s: float) -> bool:
        """Wait until a needed program is ready, at most `timeout_s` seconds.

        Returns whether it is ready.
        """
        with self._lock, self._monitor.waiting():
            self._only_likely.discard(key)
            return self._lock.wait_for(lambda: key in self.ready, timeout_s)

    def wait_if_pending(self, key: Key) -> None:
        """Wait for a program if it is needed or being compiled.

        Return at once for any other program: its first call compiles it.
        """
        with self._lock:
            if not self._is_pending(key):
                return
            self._only_likely.discard(key)
            with self._monitor.waiting():
                self._lock.wait_for(lambda: not self._is_pending(key))

    def _is_pending(self, key: Key) -> bool:
        return key in self._running or any(key == needed for needed, _ in chain(*self._needed.values()))

    def computing(self) -> AbstractContextManager[None]:
        """Mark that this thread computes on the cores that also compile: likely programs wait."""
        return self._monitor.computing()

    def progress(self) -> str | None:
        """Describe the progress of background compilation; None if nothing is left to compile."""
        with self._lock:
            needed = {key for key, _ in chain(*self._needed.values())}
            num_left = len(self._likely) + len(needed) + len(self._running)
            if not num_left:
                return None
            return (
                f"compiled {self._num_done} of {self._num_done + num_left} programs in the background, "
                f"{time.monotonic() - self._started_at:.0f} s"
            )

    def close(self) -> None:
        """Stop compiling. Idempotent.

        XLA cannot be interrupted. So a thread that is compiling a program ends after that, and its
        program is not used.
        """
        with self._lock:
            self._is_closed = True
            self._likely.clear()
            self._needed.clear()
            self._begun.clear()
            self._lock.notify_all()
            if self._running:
                log.info("%d programs are still being compiled and will not be used", len(self._running))

    def join(self) -> None:
        """Wait until the threads of a closed compiler end."""
        if self._is_started:
            for thread in self._threads:
                thread.join()

    def _notify_threads(self) -> None:
        """Tell the threads that there is a new program. The first program starts the threads."""
        self._lock.notify_all()
        if not self._is_started and not self._is_closed:
            self._is_started = True
            _started.add(self)
            # JAX clears its caches at exit. Functions run in the reverse order, so register after JAX.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
            for thread in self._threads:
                thread.start()

    def _work_at_low_priority(self) -> None:
        if sys.platform == "linux":  # elsewhere all threads of a process have the same niceness
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._work(takes_likely=True)

    def _work(self, *, takes_likely: bool) -> None:
        self._monitor.exclude_this_thread()
        while (taken := self._take_program(takes_likely=takes_likely)) is not None:
            key, program = taken
            ready = self._compile(key, program)
            if ready is None:
                continue

            with self._lock:
                self._running.discard(key)
                self._only_likely.discard(key)
                if not self._is_closed:
                    self.ready[key] = ready
                self._num_done += 1
                self._lock.notify_all()
            self._log_progress()

    def _compile(self, key: Key, program: Program) -> CompiledProgram | None:
        """Compile a program. Returns None if it is only likely and was put back."""
        steps = self._begun.pop(key, None) or program.compile_in_steps()
        try:
            while True:
                next(steps)
                if self._put_back(key, program, steps):
                    return None

        except StopIteration as end:
            return CompiledProgram(end.value)
        except Exception:  # the request that calls the program will get the error
            log.warning("cannot compile %s in the background; it is compiled on first use", key, exc_info=True)
            return CompiledProgram(program.compile_lazily())

    def _put_back(self, key: Key, program: Program, steps: Generator[None, None, Callable[..., Any]]) -> bool:
        """Put a likely program back if a request uses the cores. Returns whether this was done."""
        with self._lock:
            is_idle = self._monitor.seconds_since_call >= _IDLE_S
            if key not in self._only_likely or (is_idle and not self._is_closed):
                return False

            self._running.discard(key)
            self._only_likely.discard(key)
            if not self._is_closed:
                self._begun[key] = steps
                self._likely.appendleft((key, program))
            return True

    def _take_program(self, *, takes_likely: bool) -> tuple[Key, Program] | None:
        """Wait for the next program. Returns None if the compiler is closed."""
        with self._lock:
            while not self._is_closed:
                # Choose a needed program, or a likely one if no request uses the cores.
                taken, wait_s = self._pop_needed(), None
                is_needed = taken is not None
                if taken is None and takes_likely and self._likely:
                    wait_s = max(_IDLE_S - self._monitor.seconds_since_call, 0.0)
                    taken = None if wait_s else self._likely.popleft()

                # Take it, unless it is compiled already.
                if taken is None:
                    self._lock.wait(wait_s)
                elif taken[0] not in self.ready and taken[0] not in self._running:
                    self._running.add(taken[0])
                    if not is_needed:
                        self._only_likely.add(taken[0])
                    else:
                        log.info("compiling a program that is needed now: %s", taken[0])
                    return taken
            return None

    def _pop_needed(self) -> tuple[Key, Program] | None:
        """Remove and return the next needed program. Its requester is then the last in the order."""
        if not self._needed:
            return None
        requester = next(iter(self._needed))
        queue = self._needed.pop(requester)
        taken = queue.popleft()
        if queue:
            self._needed[requester] = queue
        return taken

    def _log_progress(self) -> None:
        progress = self.progress()
        if progress is None:
            log.info(
                "compiled %d programs in the background, %.0f s", self._num_done, time.monotonic() - self._started_at
            )
        elif self._num_done % _LOG_EVERY == 0:
            log.info("%s", progress)


class ValueFile(Generic[Value]):
    """A JSON file beside the compiled programs, with values by name. Servers may share the file."""

    def __init__(self, path: Path, kind: type[Value], *, loss: str) -> None:
        """All values are of one `kind`. If the file cannot be written, the log names the `loss`."""
        self._path = path
        self._kind = kind
        self._loss = loss

    def read(self) -> dict[str, Value]:
        """Return the values by name. The result is empty if there is no valid file."""
        try:
            content = json.loads(self._path.read_text())
            return {str(name): value for name, value in content.items() if isinstance(value, self._kind)}
        except (OSError, ValueError, AttributeError):
            return {}

    def write(self, values: Mapping[str, Value]) -> None:
        """Replace the file at once, so that other servers never read a part of it."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(values, indent=1))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot write %s: %s", self._loss, error)


class Popularity(ValueFile[int]):
    """The number of calls of each program. Servers of the same model share the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, int, loss="the popular programs, so the next start compiles in a fixed order")

    @override
    def read(self) -> dict[str, int]:
        """Return the number of calls of each program by name, the largest number first."""
        return dict(sorted(super().read().items(), key=lambda entry: -entry[1]))

    def add(self, counts: Mapping[str, int]) -> None:
        """Add calls to the file. If two servers write at the same time, some counts may be lost."""
        self.write(Counter(self.read()) + Counter(counts))


_CompilerOptions = dict[str, bool | int | str] | None

_OPTIONS_ARE_KNOWN = tuple(map(int, version("jax").split(".")[:2])) < (0, 12)

TRAINING_OPTIONS: _CompilerOptions = (
    {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True} if _OPTIONS_ARE_KNOWN else None
)
"""Do not fill arrays with zeros that a loop over layers overwrites for the backward pass.

On an H200 this saves 36 of 2,273 ms of a training micro-batch of Qwen3-8B, and 10 of 379 ms of
Qwen3-0.6B.
"""

_CUDA_GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"

DECODING_OPTIONS: _CompilerOptions = (
    {"xla_gpu_dot_merger_threshold_mb": 4, "xla_gpu_enable_command_buffer": _CUDA_GRAPH_COMMANDS}
    if _OPTIONS_ARE_KNOWN
    else None
)
"""Which matrix products are merged in decoding, and which operations become part of CUDA graphs.

**Merged products.** Products of the same rows are merged only if their weights are small (4 MB),
such as LoRA factors A. XLA's default limit of 64 MB also merges gate and up of Qwen3-4B, which then
take 92 microseconds for 256 rows on an H200.

**CUDA graphs.** By default, XLA leaves loops and conditionals out of graphs. After each decode
step, the host then reads whether there is another step, so the host is busy until the decode slice
(a fixed number of decode steps) ends. With loops in graphs, a decode step of 256 samples with eight
layers of Qwen3-0.6B takes 3.53 ms instead of 4.05 ms on an H200. Training gets no faster.
"""

_CPU_OPTIONS = "xla_cpu_disable_loop_unrolling=1,xla_cpu_disable_tiled_emitter=1"
"""Vectorize kernels without unrolling their loops, and generate all of them in the same way.

The gradient of a model with 30M parameters compiles in 0.7 times the CPU time. Training and
decoding take as long.
"""

_CPU_FLAG = "--xla_backend_extra_options"


def set_cpu_options(environment: MutableMapping[str, str]) -> None:
    """Set the CPU options in XLA_FLAGS, unless the user has set them.

    XLA has no CPU options per program. It reads XLA_FLAGS once per process, when it is first used,
    so call this function before.
    """
    flags = environment.get("XLA_FLAGS", "")
    if _CPU_FLAG not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_CPU_FLAG}={_CPU_OPTIONS}".strip()


def configure_jax(config: JaxConfig) -> JaxConfig:
    """Configure JAX in this process: GPU memory, XLA options, precision, compilation cache.

    Returns the settings, without `compile_cache_dir` if that directory cannot be written. Raises
    UserError if other programs use the memory of a GPU.
    """
    if not xla_bridge.backends_are_initialized():  # otherwise this process has its memory already
        reserve_gpu_memory(config)
    set_cpu_options(os.environ)
    jax.config.update("jax_default_matmul_precision", "highest")
    directory = config.compile_cache_dir
    if directory is None:
        return config

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        log.warning(
            "no compile cache: %s; all programs are compiled again at each start; set "
            "--backend-config.compile-cache-dir to a directory that can be written",
            explain_os_error(error, directory),
        )
        return config.model_copy(update={"compile_cache_dir": None})

    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Also cache programs that compile quickly, because there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return config


def disable_compilation_cache() -> None:
    """Disable the compilation cache for the rest of this process. Needed for meshes of CPU devices.

    CPU devices may wait for each other forever when they run a program that was loaded from the
    cache. With JAX 0.10.2 this always happens for the gradient on a mesh with cp.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX reads the setting only once
