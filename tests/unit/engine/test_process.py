"""The engine as a process: signals and exit codes."""

import multiprocessing
import os
import signal
import time

import pytest

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.engine.process import ExitCode, run_engine
from skyrl_tx.store import engine_state, futures, snapshots
from skyrl_tx.store.database import Store
from skyrl_tx.testing.engine_house import House, Perishable, forward_backward, optim_step, run_fake_engine
from skyrl_tx.testing.waiting import until


@pytest.fixture(autouse=True)
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_ends_in_good_order(house):
    process = multiprocessing.get_context("spawn").Process(target=run_fake_engine, args=(house.settings,))
    process.start()
    try:
        model_id, _ = house.create()
        house.submit(forward_backward(), model_id=model_id, seq_id=1)
        deadline = time.monotonic() + 30
        while (state := house.api.read(engine_state.get)) is None or state.status != "ready" or open_requests(house):
            assert time.monotonic() < deadline, state
            house.api.wait(1.0)
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == ExitCode.STOPPED
    finally:
        process.kill()
        process.join()
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order == 2
    assert house.api.read(engine_state.get).status == "stopping"


def test_what_a_stopped_engine_leaves_undone_costs_no_attempt(house):
    start = multiprocessing.get_context("spawn").Process
    process = start(target=run_fake_engine, args=(house.settings, 60.0))  # a step takes longer than anybody waits
    process.start()
    try:
        model_id, _ = house.create()
        house.submit(forward_backward(), model_id=model_id, seq_id=1)
        until(lambda: [pending.attempts for pending in open_requests(house)] == [1])
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: [pending.attempts for pending in open_requests(house)] == [0])
    finally:
        process.kill()
        process.join()


def open_requests(house):
    return house.api.read(lambda tx: futures.pending(tx, 0, 10))


def test_a_killed_engine_is_followed_by_one_that_goes_on(house, tmp_path_factory):
    undisturbed = House(tmp_path_factory.mktemp("undisturbed"))
    expected = losses_of(undisturbed, train(undisturbed))
    undisturbed.close()
    passes = train(house)
    process = multiprocessing.get_context("spawn").Process(target=run_fake_engine, args=(house.settings, 0.01))
    process.start()
    while len(house.api.read(lambda tx: futures.statuses(tx, passes))) < 3:
        assert process.is_alive()
        house.api.wait(1.0)
    process.kill()
    process.join()
    num_answered = len(house.api.read(lambda tx: futures.statuses(tx, passes)))
    assert num_answered < len(passes), "it was too quick to be killed in the middle"
    assert losses_of(house, passes) == expected


def train(house):
    model_id, _ = house.create()
    passes = []
    for step in range(8):
        passes.append(house.submit(forward_backward(step), model_id=model_id, seq_id=2 * step + 1))
        house.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    return passes


def losses_of(house, passes):
    house.run(*passes)
    return [house.result(name).metrics["loss:sum"] for name in passes]


def test_a_lost_device_is_worth_a_restart(house):
    config = house.config
    spec = BackendSpec(config=type(config), load=lambda: lambda base_model, config: Perishable(config, 0))
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    assert run_engine(house.settings, spec, config) == ExitCode.LOST
    assert len(open_requests(house)) == 1


@pytest.mark.parametrize("error", [UserError("base_model: no such directory"), BackendLost("no driver")])
def test_a_backend_that_does_not_start(house, error, caplog):
    class Stillborn(Perishable):
        def start(self):
            raise error

    spec = BackendSpec(config=type(house.config), load=lambda: lambda base_model, config: Stillborn(config, 0))
    expected = ExitCode.CANNOT_START if isinstance(error, UserError) else ExitCode.LOST
    assert run_engine(house.settings, spec, house.config) == expected
    assert str(error) in caplog.text


def test_a_second_engine_is_refused(house, caplog):
    spec = find_backend("fake")
    store = Store.open(house.data_dir, role="engine", url=house.settings.store_url)
    assert run_engine(house.settings, spec, house.config) == ExitCode.CANNOT_START
    assert f"process {os.getpid()}" in caplog.text
    store.close()
