"""Signals and exits of the engine process."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import socket
import time

import httpx
import pytest

from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.registry import find_backend, start_backend
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.launch import engine_process
from skyrl_tx.launch.engine_process import EngineLaunch, EngineProcess, run_engine
from skyrl_tx.launch.launcher import EngineEnd, EngineLost
from skyrl_tx.process import signals
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.store import StoreInUse, engine_state, futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow
from tests.support.engine_harness import EngineHarness, Perishable, forward_backward, optim_step, run_fake_engine
from tests.support.free_ports import free_ports
from tests.support.polling import until


@pytest.fixture(autouse=True)
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_stops_cleanly(harness):
    process = multiprocessing.get_context("spawn").Process(target=run_fake_engine, args=(harness.settings,))
    process.start()

    try:
        model_id, _ = harness.create()
        harness.submit(forward_backward(), model_id=model_id, seq_id=1)
        deadline = time.monotonic() + 30
        while (
            (state := harness.api.read(engine_state.get)) is None or state.status != "ready" or open_requests(harness)
        ):
            assert time.monotonic() < deadline, state
            harness.api.wait(1.0)
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()

    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order == 2
    assert harness.api.read(engine_state.get).status == "stopping"


def test_clean_stop_counts_no_delivery_attempt(harness):
    start = multiprocessing.get_context("spawn").Process
    process = start(target=run_fake_engine, args=(harness.settings, 60.0))  # each step takes 60 s
    process.start()
    try:
        model_id, _ = harness.create()
        harness.submit(forward_backward(), model_id=model_id, seq_id=1)
        until(lambda: [pending.attempts for pending in open_requests(harness)] == [1])
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: [pending.attempts for pending in open_requests(harness)] == [0])
    finally:
        process.kill()
        process.join()


def open_requests(harness):
    return harness.api.read(lambda tx: futures.list_pending(tx, 0, 10))


def test_killed_engine_is_continued_bit_equal(harness, tmp_path_factory):
    undisturbed = EngineHarness(tmp_path_factory.mktemp("undisturbed"))
    expected = compute_losses(undisturbed, train(undisturbed))
    undisturbed.close()
    passes = train(harness)
    process = multiprocessing.get_context("spawn").Process(target=run_fake_engine, args=(harness.settings, 0.01))
    process.start()
    while len(harness.api.read(lambda tx: futures.get_outcomes(tx, passes))) < 3:
        assert process.is_alive()
        harness.api.wait(1.0)
    process.kill()
    process.join()
    num_answered = len(harness.api.read(lambda tx: futures.get_outcomes(tx, passes)))
    assert num_answered < len(passes), "the engine ended before it was killed"
    assert compute_losses(harness, passes) == expected


@pytest.mark.parametrize(
    ("number", "is_memory_exhausted", "is_crash"),
    [(signal.SIGSEGV, False, True), (signal.SIGKILL, False, False), (signal.SIGKILL, True, True)],
)
def test_only_a_signal_that_the_engine_caused_is_a_crash(harness, monkeypatch, number, is_memory_exhausted, is_crash):
    counts = itertools.count(step=is_memory_exhausted)
    monkeypatch.setattr(engine_process, "_count_memory_kills", lambda: next(counts))
    launch = EngineLaunch(settings=harness.settings, backend="fake", backend_config=harness.config, log_level="error")

    async def run() -> EngineEnd:
        process = EngineProcess(launch)
        return await process.wait(lambda ready: os.kill(process.location.pid, number))

    end = asyncio.run(run())
    assert (end.is_crash, end.is_final) == (is_crash, False)
    assert number.name in end.message and ("memory" in end.message) == is_memory_exhausted


def test_death_of_a_thread_is_no_crash_of_a_request():
    end = EngineEnd.from_exit_code(signals.EXIT_STATUS, False)
    assert not end.is_crash and not end.was_killed and "one of its threads" in end.message


def train(harness):
    model_id, _ = harness.create()
    passes = []
    for step in range(8):
        passes.append(harness.submit(forward_backward(step), model_id=model_id, seq_id=2 * step + 1))
        harness.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    return passes


def compute_losses(harness, passes):
    harness.run(*passes)
    return [harness.result(name).metrics["loss:sum"] for name in passes]


def run_spec(settings, spec, config, *callbacks, name=""):
    """Run an engine with a backend."""
    run_engine(settings, lambda _: start_backend(name, spec, settings.base_model, config), *callbacks)


def test_lost_device_ends_the_engine_for_a_restart(harness):
    config = harness.config
    spec = BackendSpec(config=type(config), load=lambda: lambda base_model, config: Perishable(config, 0))
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    with pytest.raises(EngineLost):
        run_spec(harness.settings, spec, config)
    assert len(open_requests(harness)) == 1


@pytest.mark.parametrize("error", [UserError("base_model: no such directory"), BackendLost("no driver")])
def test_backend_that_cannot_start_exits_without_restart(harness, error):
    class Stillborn(Perishable):
        def start(self):
            raise error

    spec = BackendSpec(config=type(harness.config), load=lambda: lambda base_model, config: Stillborn(config, 0))
    expected = UserError if isinstance(error, UserError) else EngineLost
    with pytest.raises(expected, match=str(error)):
        run_spec(harness.settings, spec, harness.config)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: {}["weights.embed"], "KeyError: 'weights.embed'"),
        (lambda: AbstractBackend, "TypeError: Can't instantiate abstract class AbstractBackend"),
        (lambda: lambda base_model, config: config, "TypeError: load.. must return a subclass of AbstractBackend, not"),
    ],
)
def test_an_unexpected_error_at_the_start_names_the_backend(harness, load, reason):
    spec = BackendSpec(config=type(harness.config), load=load)
    with pytest.raises(CannotServe, match=f"backend 'mine': start failed: {reason}") as error:
        run_spec(harness.settings, spec, harness.config, name="mine")
    end = EngineEnd.from_error(error.value)
    assert end.is_final and end.message == str(error.value)


def test_second_engine_is_refused(harness):
    spec = find_backend("fake")
    store = Store.open(harness.data_dir, role="engine", url=harness.settings.store_url)
    with pytest.raises(StoreInUse, match=f"process {os.getpid()}"):
        run_spec(harness.settings, spec, harness.config)
    store.close()


def test_engine_alone_records_a_stuck_call_as_a_crash(harness, monkeypatch):
    ends = []
    monkeypatch.setattr(engine_process, "_end_stuck_process", ends.append)
    model_id, _ = harness.create()
    passed = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.api.write(lambda tx: futures.count_delivery_attempt(tx, [passed], is_alone=True))
    engine_process._end_in_foreground(harness.api, "forward_backward has taken longer")
    assert ends == ["forward_backward has taken longer"]
    assert harness.api.read(lambda tx: futures.get_max_crashes(tx, [passed])) == 1


def test_the_metrics_of_an_engine_alone_are_served_at_its_port(harness):
    settings = harness.settings.model_copy(update={"metrics_port": free_ports(1)})
    url, found = f"http://127.0.0.1:{settings.metrics_port}/metrics", []

    def on_ready(_ready: object) -> None:
        found.append(httpx.get(url).text)
        os.kill(os.getpid(), signal.SIGTERM)

    run_spec(settings, find_backend("fake"), harness.config, on_ready)
    assert "skyrl_tx_" in found[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_metrics_port_that_is_in_use_is_named(harness):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = harness.settings.model_copy(update={"metrics_port": port})
        with pytest.raises(OSError, match=rf"--metrics-port {port}: Address already in use"):
            run_spec(settings, find_backend("fake"), harness.config)


@pytest.mark.parametrize("has_published", [False, True])
def test_a_crash_counts_only_for_what_this_run_of_a_container_ran(harness, monkeypatch, has_published):
    """Both runs have the same host name and process id, as happens when a container restarts."""
    passed = harness.submit(forward_backward(), model_id=harness.create()[0], seq_id=1)
    harness.api.write(lambda tx: futures.count_delivery_attempt(tx, [passed], is_alone=True))
    publish(harness.api, "the run before")

    def fail(_launch: EngineLaunch, boot_id: str, *_: object, **__: object) -> None:
        if has_published:
            publish(harness.api, boot_id)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine_process, "_run", fail)
    launch = EngineLaunch(settings=harness.settings, backend="fake", backend_config=harness.config, log_level="info")
    with pytest.raises(CannotServe, match="no such kernel"):
        engine_process.run_in_foreground(launch, lambda _: None)
    assert harness.api.read(lambda tx: futures.get_max_crashes(tx, [passed])) == int(has_published)


def publish(store: Store, boot_id: str) -> None:
    where = {"host": socket.gethostname(), "pid": os.getpid()}
    row = EngineStateRow(
        boot_id=boot_id, **where, status="recovering", capabilities={}, base_models=["tiny"], updated_at=time.time()
    )
    store.write(lambda tx: engine_state.publish(tx, row))


@pytest.mark.parametrize(("num_hosts", "status"), [(1, []), (2, [1])])
def test_rank_0_in_the_foreground_does_not_wait_for_hosts_that_are_gone(
    harness, monkeypatch, caplog, num_hosts, status
):
    """JAX's own shutdown would wait for all hosts and finally abort the process."""

    def lose(*_: object, **__: object) -> None:
        raise EngineLost("host 1 has ended during step_sample")

    ended: list[int] = []
    monkeypatch.setattr(engine_process, "_run", lose)
    monkeypatch.setattr(os, "_exit", ended.append)
    spec = find_backend("fake")
    hosts = HostsSettings(size=num_hosts, address="127.0.0.1:7700")
    launch = EngineLaunch(
        settings=harness.settings, backend="fake", backend_config=spec.config(), log_level="info", hosts=hosts
    )
    with pytest.raises(CannotServe, match="host 1 has ended"):
        engine_process.run_in_foreground(launch, lambda _: None)
    assert ended == status and ("host 1 has ended" in caplog.messages[-1]) == bool(status)
