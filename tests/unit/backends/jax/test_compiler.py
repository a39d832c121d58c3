"""Background compilation: order, failures, progress, shutdown, and popular programs."""

import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import pytest

from skyrl_tx.backends.jax import compiler as compiler_module
from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.compiler import Compiler, Popularity, Program
from skyrl_tx.backends.jax.devices import CompilationMonitor
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from tests.support.tiny import TINY_CONFIG, TinyModel, make_model_runner

WAIT_S = 30.0


class FakeJitted:
    """A stand-in for a jitted function.

    It compiles when the test allows it, and records its name in `order`.
    """

    def __init__(self, name: str, order: list[str], error: Exception | None = None) -> None:
        self.name, self._order, self._error = name, order, error
        self.started, self.allowed, self.lowered = threading.Event(), threading.Event(), threading.Event()
        self.num_traced = 0

    def trace(self, *_: Any, **__: Any) -> "FakeJitted":
        self.num_traced += 1
        self.started.set()
        assert self.allowed.wait(WAIT_S)
        self._order.append(self.name)
        if self._error is not None:
            raise self._error
        return self

    def lower(self) -> "FakeJitted":
        self.lowered.set()
        return self

    def compile(self) -> Callable[..., str]:
        return lambda *_: f"compiled {self.name}"

    def __call__(self, *_: Any, **static: Any) -> str:
        return f"called {self.name} with {static}"


def program(jitted: FakeJitted) -> Program:
    return Program(jitted, (), {"config": 1})


@pytest.fixture
def compiler() -> Iterator[Compiler[str]]:
    found = Compiler[str](1, CompilationMonitor())
    yield found
    found.close()


def test_a_needed_program_comes_before_likely_ones_and_is_compiled_once(compiler: Compiler[str]) -> None:
    order: list[str] = []
    likely = {name: FakeJitted(name, order) for name in "abcd"}
    compiler.queue_likely((name, program(jitted)) for name, jitted in likely.items())
    assert likely["a"].started.wait(WAIT_S)

    for name in "ac":  # a is being compiled, c is queued
        compiler.queue_needed(name, lambda: pytest.fail("the likely program is known"))
    compiler.queue_needed("e", lambda: program(likely.setdefault("e", FakeJitted("e", order))))

    assert likely["c"].started.wait(WAIT_S)  # on the thread for needed programs, while a is still being compiled
    assert not likely["b"].started.is_set()
    assert compiler.progress() == "compiled 0 of 5 programs in the background, 0 s"

    likely["c"].allowed.set()
    assert compiler.wait("c", WAIT_S)
    assert likely["e"].started.wait(WAIT_S)

    for jitted in likely.values():
        jitted.allowed.set()
    for name in likely:
        assert compiler.wait(name, WAIT_S)
    assert compiler.progress() is None
    assert sorted(order) == ["a", "b", "c", "d", "e"]
    assert compiler.ready["e"].call() == "compiled e"


def test_requests_take_turns(compiler: Compiler[str]) -> None:
    """A request that needs many programs delays another one by the programs that are being compiled."""
    order: list[str] = []
    jitted = {name: FakeJitted(name, order) for name in ("first", "other", "a1", "a2", "a3", "b1")}
    for name in ("first", "other"):  # one for each thread
        compiler.queue_needed(name, lambda name=name: program(jitted[name]), "a")
        assert jitted[name].started.wait(WAIT_S)

    for name, turn in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("a3", "b")):
        compiler.queue_needed(name, lambda name=name: program(jitted[name]), turn)
    assert compiler.progress() == "compiled 0 of 6 programs in the background, 0 s"
    expected = ["first", "a1", "b1", "a2", "a3"]
    for name in expected:
        jitted[name].allowed.set()
        assert compiler.wait(name, WAIT_S)
    assert order == expected, "b needs a3 too, which is compiled once"

    jitted["other"].allowed.set()
    assert compiler.wait("other", WAIT_S)
    assert compiler.progress() is None


def test_likely_programs_wait_for_a_call_that_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_IDLE_S", 0.2)
    monitor, order = CompilationMonitor(), list[str]()
    found = Compiler[str](1, monitor)
    likely, needed = FakeJitted("likely", order), FakeJitted("needed", order)
    event = "/jax/core/compile/backend_compile_duration"
    monitor.on_start(event, 0.0)
    assert monitor.seconds_since_call == 0

    found.queue_likely([("likely", program(likely))])
    found.queue_needed("needed", lambda: program(needed))
    assert needed.started.wait(WAIT_S)
    needed.allowed.set()  # the thread that compiles it may be the only one for likely programs

    with monitor.waiting():  # waiting does not count as a call that compiles
        assert not likely.started.wait(0.3)
        monitor.on_end(event, 1.0)
        assert 0 < monitor.seconds_since_call < WAIT_S
        assert likely.started.wait(WAIT_S)

    for jitted in (likely, needed):
        jitted.allowed.set()
    found.close()


def test_likely_programs_wait_while_a_call_computes_on_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_IDLE_S", 0.2)
    monitor, order = CompilationMonitor(), list[str]()
    found = Compiler[str](1, monitor)
    likely, needed = FakeJitted("likely", order), FakeJitted("needed", order)
    with found.computing():
        assert monitor.seconds_since_call == 0 and not monitor.is_compiling
        found.queue_likely([("likely", program(likely))])
        found.queue_needed("needed", lambda: program(needed))
        assert needed.started.wait(WAIT_S)
        needed.allowed.set()  # the thread that compiles it may be the only one for likely programs
        assert not likely.started.wait(0.3)
    assert likely.started.wait(WAIT_S)

    for jitted in (likely, needed):
        jitted.allowed.set()
    found.close()


@pytest.mark.parametrize("continues", ["idle", "needed", "closed"])
def test_a_likely_program_that_has_begun_pauses_while_a_call_computes(
    monkeypatch: pytest.MonkeyPatch, continues: str
) -> None:
    """Its thread compiles needed programs meanwhile, and it continues where it paused."""
    monkeypatch.setattr(compiler_module, "_IDLE_S", 0.2)
    found, order = Compiler[str](1, CompilationMonitor()), list[str]()
    likely = FakeJitted("likely", order)
    found.queue_likely([("likely", program(likely))])
    assert likely.started.wait(WAIT_S)

    with found.computing():
        # Its trace ends, and both threads compile needed programs.
        likely.allowed.set()
        needed = [FakeJitted(f"needed {number}", order) for number in range(2)]
        for jitted in needed:
            found.queue_needed(jitted.name, partial(program, jitted), jitted.name)
            assert jitted.started.wait(WAIT_S), "both threads are free"
            assert not likely.lowered.is_set()
        for jitted in needed:
            jitted.allowed.set()
            assert found.wait(jitted.name, WAIT_S)
        assert not likely.lowered.wait(0.3)

        # A request needs it, or the compiler is closed.
        if continues == "needed":
            found.queue_needed("likely", lambda: pytest.fail("the program is known"))
            assert found.wait("likely", WAIT_S)
        if continues == "closed":
            found.close()
            found.join()

    if continues == "idle":
        assert likely.lowered.wait(WAIT_S) and found.wait("likely", WAIT_S)
    assert likely.lowered.is_set() == (continues != "closed") and likely.num_traced == 1
    found.close()


def test_a_likely_program_that_a_request_waits_for_does_not_pause(compiler: Compiler[str]) -> None:
    likely = FakeJitted("likely", [])
    compiler.queue_likely([("likely", program(likely))])
    assert likely.started.wait(WAIT_S)
    with compiler.computing():
        compiler.queue_needed("likely", lambda: pytest.fail("the program is known"))
        likely.allowed.set()
        assert compiler.wait("likely", WAIT_S)


def test_a_program_that_cannot_be_compiled_is_called_as_if_there_were_no_compiler(
    compiler: Compiler[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken = FakeJitted("broken", [], ValueError("no such instruction"))
    broken.allowed.set()
    compiler.queue_needed("broken", lambda: program(broken))
    assert compiler.wait("broken", WAIT_S)
    assert compiler.ready["broken"].call() == "called broken with {'config': 1}"
    assert "cannot compile broken in the background" in caplog.text
    assert "no such instruction" in caplog.text


def test_closing_does_not_wait_for_a_running_compilation() -> None:
    compiler, order = Compiler[str](0, CompilationMonitor()), list[str]()
    running, waiting = FakeJitted("running", order), FakeJitted("waiting", order)
    compiler.queue_needed("running", lambda: program(running))
    assert running.started.wait(WAIT_S)
    compiler.queue_needed("waiting", lambda: program(waiting))

    compiler.close()
    compiler.close()  # returns although the program is not allowed to end
    running.allowed.set()
    compiler.join()
    assert order == ["running"] and not waiting.started.is_set()
    assert compiler.ready == {}


def test_a_process_that_exits_without_closing_waits_for_a_running_compilation() -> None:
    """Otherwise the interpreter aborts: XLA calls back into a thread that has ended."""
    program = """
import threading
from skyrl_tx.backends.jax.compiler import Compiler, Program
from skyrl_tx.backends.jax.devices import CompilationMonitor

class Slow:
    def trace(self):
        begun.set()
        threading.Event().wait(0.5)
        print("traced", flush=True)
        return self
    lower = compile = lambda self: self

begun = threading.Event()
compiler = Compiler(1, CompilationMonitor())
compiler.queue_likely([("slow", Program(Slow(), (), {})), ("next", Program(Slow(), (), {}))])
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "traced\n", "")


def test_finish_waits_for_a_program_that_is_needed_and_for_no_other() -> None:
    compiler, jitted = Compiler[str](1, CompilationMonitor()), FakeJitted("a", [])
    compiler.wait_if_pending("a")
    compiler.queue_needed("a", lambda: program(jitted))
    assert jitted.started.wait(WAIT_S)

    compiler.wait_if_pending("b")
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: [compiler.wait_if_pending("a"), ended.set()])
    waiting.start()
    assert not ended.wait(0.05)

    jitted.allowed.set()
    assert ended.wait(WAIT_S) and "a" in compiler.ready

    waiting.join()
    compiler.wait_if_pending("a")
    compiler.close()


def test_only_a_call_that_waits_counts_as_compiling() -> None:
    monitor = CompilationMonitor()
    found = Compiler[str](1, monitor)
    seen: list[bool] = []

    class Event(FakeJitted):
        def trace(self, *_: Any, **__: Any) -> "FakeJitted":
            monitor.on_start("/jax/core/compile/jaxpr_trace_duration", 0.0)
            seen.append(monitor.is_compiling)
            monitor.on_end("/jax/core/compile/jaxpr_trace_duration", 1.0)
            monitor.on_end("/jax/core/compile/backend_compile_duration", 2.0)
            return super().trace()

    event = Event("event", [])
    found.queue_likely([("event", program(event))])
    assert event.started.wait(WAIT_S)
    assert seen == [False] and not monitor.is_compiling
    assert not found.wait("event", 0.0)
    with monitor.waiting():
        assert monitor.is_compiling
    event.allowed.set()
    assert found.wait("event", WAIT_S)
    found.close()
    assert (monitor.num_compiled, monitor.seconds, monitor.is_compiling) == (1, 2.0, False)


def test_memory_is_returned_once_after_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[float] = []
    now = 100.0
    monkeypatch.setattr(devices, "trim_allocator", lambda: trims.append(now))
    monkeypatch.setattr(devices.time, "monotonic", lambda: now)
    monitor = CompilationMonitor()
    monitor.on_end("/jax/core/compile/jaxpr_trace_duration", 9.0)
    for now in (100.0, 100.5, 101.0, 102.0, 110.0):
        monitor.return_memory()
        if now < 101.0:  # compilations follow each other
            monitor.on_end("/jax/core/compile/backend_compile_duration", 5.0)
    assert trims == [101.0]


def test_popular_programs_are_those_with_the_most_calls_of_all_starts(tmp_path) -> None:
    path = tmp_path / "popular" / "model.json"
    assert Popularity(path).read() == {}
    Popularity(path).add({"short": 2, "long": 1})
    Popularity(path).add({"long": 5, "other": 3})
    assert list(Popularity(path).read().items()) == [("long", 6), ("other", 3), ("short", 2)]
    assert [file.name for file in path.parent.iterdir()] == ["model.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": "many"}', '{"a": null}'])
def test_an_unreadable_file_of_popular_programs_is_written_again(tmp_path, content: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    assert Popularity(path).read() == {}
    Popularity(path).add({"a": 1})
    assert Popularity(path).read() == {"a": 1}


def test_no_likely_program_is_compiled_while_a_cpu_samples(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = CompilationMonitor()
    compiler = Compiler[Hashable](1, monitor)
    device, seen = make_model_runner(tiny.params, tiny.config, TINY_CONFIG, compiler), []
    scheduler = SampleScheduler(device, TINY_CONFIG, device.memory, ())
    monkeypatch.setattr(scheduler, "_admit", lambda: seen.append(monitor.seconds_since_call) or [])
    scheduler.step()
    assert seen == [0] and monitor.seconds_since_call > 0
    device._is_single_cpu = False  # elsewhere, the cores are free to compile
    monitor._last_end = 0.0
    scheduler.step()
    assert seen[1] > 0
    compiler.close()
