"""An engine waits for a database that takes nothing for now: no request pays for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, event

from skyrl_tx.api.engine_watch import EngineWatch
from skyrl_tx.store import futures
from skyrl_tx.store.errors import StoreBlocked
from skyrl_tx.testing.engine_house import House, datum, forward_backward, optim_step, sample
from skyrl_tx.testing.waiting import until


@pytest.fixture
def is_full():
    """While set, no database grows on connections made then: what is large does not fit, what is small may."""
    full = threading.Event()

    def connected(connection, _record):
        if full.is_set():
            connection.execute("PRAGMA max_page_count = 1")

    event.listen(Engine, "connect", connected)
    yield full
    event.remove(Engine, "connect", connected)


def test_an_answer_that_does_not_fit_waits_for_room(tmp_path, caplog, is_full):
    house = House(tmp_path)
    model_id, created = house.create()
    house.run(created)
    data = tuple(datum(seed, 1000) for seed in range(5))
    large = house.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    step = house.submit(optim_step(), model_id=model_id, seq_id=2)
    watch = EngineWatch(house.api, silence_s=60.0)
    is_full.set()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(house.run, large, step)
        until(lambda: "no space left" in (watch.trouble() or ""))
        assert str(watch.trouble()).startswith("the engine waits: database ")
        assert house.api.read(lambda tx: futures.attempts(tx, [large])) == 1
        assert "waiting until it takes what is to be written" in caplog.text
        is_full.clear()
        running.result(60)
    assert house.result(large).metrics["num_datums:sum"] == 5
    assert house.result(step).metrics["unclipped_grad_l2:mean"] > 0
    assert house.api.read(lambda tx: futures.attempts(tx, [large, step])) == 0
    house.close()


def test_told_to_stop_it_waits_no_longer_and_what_ran_is_not_to_blame(tmp_path, is_full):
    house = House(tmp_path)
    model_id, created = house.create()
    house.run(created)
    data = tuple(datum(seed, 1000) for seed in range(5))
    large = house.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    watched = house.submit(sample(max_tokens=4000, eos_stops=False))
    is_full.set()
    watch = EngineWatch(house.api, silence_s=60.0)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(house.run, watched)
        until(lambda: "no space left" in (watch.trouble() or ""))
        house.api.write(lambda tx: futures.complete(tx, watched, b"", failed=True, effect_order=None, now=0.0))
        with pytest.raises(StoreBlocked, match="no space left for it on the disk"):
            running.result(60)
    assert house.api.read(lambda tx: futures.attempts(tx, [large])) == 0
    is_full.clear()
    house.run(large)
    assert house.result(large).metrics["num_datums:sum"] == 5
    house.close()
