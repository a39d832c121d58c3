"""Training and sampling take turns, and so do sessions, regardless of the load of either side."""

import time
from dataclasses import replace

import numpy as np
import pytest
from sqlmodel import select

from skyrl_tx.contract import codec
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.engine.activity import DeviceClock
from skyrl_tx.store import futures
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, sample

NUM_QUEUED = 1_500


class RecordingBackend(FakeBackend):
    """Records turns (T: micro-batch, S: decode slice) and the order in which samples start."""

    def __init__(self, config):
        super().__init__("tiny", config)
        self.turns, self.started, self.passes = [], [], []

    def begin_pass(self, batch, *, backward):
        self.passes.append({example.model_id for example in batch.examples})
        return RecordingPass(super().begin_pass(batch, backward=backward), self.turns)

    def begin_sample(self, batch):
        self.started += [request.request_id for request in batch.requests for _ in range(request.num_samples)]
        super().begin_sample(batch)

    def step_sample(self):
        self.turns.append("S")
        return super().step_sample()


class RecordingPass(Pass):
    """A pass that records its micro-batches."""

    def __init__(self, inner, turns):
        self.inner, self.turns = inner, turns

    def step(self):
        self.turns.append("T")
        return self.inner.step()

    def results(self):
        return self.inner.results()

    def abort(self):
        self.inner.abort()


@pytest.fixture
def open_harness(tmp_path):
    harnesses = []

    def make(config=None, **settings):
        harness = EngineHarness(tmp_path, **settings)
        harness.config = harness.config.model_copy(update=config or {})
        harnesses.append(harness)
        return harness

    yield make
    for harness in harnesses:
        harness.close()


def many(harness, requests, **where):
    """Store many requests in a single commit."""
    return harness.api.write(lambda tx: [harness._submit(tx, request, **where) for request in requests])


def endless(**changes):
    return sample(**{"max_tokens": 2000, "eos_stops": False, **changes})


def longest_run(turns, side):
    return max(map(len, "".join(turns).replace("T" if side == "S" else "S", " ").split()), default=0)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_training_and_sampling_take_turns_of_equal_time(open_harness, monkeypatch, num_slices):
    """A micro-batch takes as long as `num_slices` decode slices."""
    monkeypatch.setattr(DeviceClock, "count_slices_per_micro_batch", lambda _: num_slices)
    harness = open_harness()
    model_id, created = harness.create()
    harness.run(created)
    data = tuple(datum(seed) for seed in range(10))
    passes = [harness.submit(forward_backward(data=data), model_id=model_id, seq_id=1 + n) for n in range(12)]
    samples = [harness.submit(endless()) for _ in range(2)]
    backend = RecordingBackend(harness.config)
    harness.run(*passes, *samples, backend=backend)

    turns = "".join(backend.turns)
    both = turns[turns.index("S") if turns[0] == "T" else turns.index("T") : min(turns.rindex("T"), turns.rindex("S"))]
    assert len(both) > 60
    assert longest_run(both, "T") == 1 and longest_run(both, "S") == num_slices


def test_thousands_of_passes_of_one_model_delay_another_by_one_batch(open_harness):
    harness = open_harness(config={"max_pass_tokens": 64})
    greedy, _ = harness.create("greedy")
    harness.run(harness.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    forward = forward_backward(backward=False, data=(datum(length=32),))
    many(harness, [forward] * NUM_QUEUED, model_id=greedy)
    last = harness.submit(forward, model_id=modest)
    backend = RecordingBackend(harness.config)
    started = time.monotonic()
    harness.run(last, backend=backend)
    num_before = next(index for index, models in enumerate(backend.passes) if modest in models)
    num_read_in_turns = (
        time.monotonic() - started
    ) / 0.1  # upper bound on the number of turns it took to read all requests
    assert num_before <= num_read_in_turns + 2, "it is next once it is read"


class ArrivalBackend(RecordingBackend):
    """Lets another client arrive during a micro-batch and records the models of all micro-batches."""

    def __init__(self, config, arrive):
        super().__init__(config)
        self.arrive, self.place, self.steps = arrive, None, []

    def begin_pass(self, batch, *, backward):
        inner = super().begin_pass(batch, backward=backward)
        return ArrivalPass(inner, self, {example.model_id for example in batch.examples})


class ArrivalPass(RecordingPass):
    """A pass that records the models of its micro-batches."""

    def __init__(self, inner, backend, models):
        super().__init__(inner, backend.turns)
        self.backend, self.models = backend, models

    def step(self):
        self.backend.steps.append(self.models)
        if self.backend.place is None and len(self.backend.steps) >= 40:
            self.backend.place = len(self.backend.steps)
            self.backend.arrive()
        return super().step()

    def results(self):
        self.backend.steps.append("answered")
        return super().results()


@pytest.mark.parametrize(
    ("num_requests", "num_data"), [(300, 1), (1, 150)], ids=["many requests", "one request of many micro-batches"]
)
def test_short_pass_waits_for_a_few_micro_batches_only(open_harness, num_requests, num_data):
    """A pass of 32 tokens competes with large requests and long queues, with default limits."""
    harness = open_harness(config={"micro_batch_tokens": 1024, "max_pass_tokens": 65_536, "max_context_length": 2048})
    greedy, created = harness.create("greedy")
    harness.run(created, harness.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    queue = forward_backward(backward=False, data=(datum(length=1024),) * num_data)
    many(harness, [queue] * num_requests, model_id=greedy)
    arrived = []

    def arrive():
        arrived.append(harness.submit(forward_backward(data=(datum(length=32),)), model_id=modest, seq_id=1))

    backend = ArrivalBackend(harness.config, arrive)
    first = harness.submit(sample(max_tokens=16 * 80, eos_stops=False))
    harness.run(first, backend=backend)
    after = backend.steps[backend.place :]
    place = after.index({modest})
    assert place <= 4, "a step or two while it is read, and one of each running batch"
    assert after[place + 1] == "answered", "its result follows at once"
    assert harness.result(arrived[0]).metrics["num_tokens:sum"] == 32


def test_long_passes_of_one_session_leave_a_batch_slot_to_another(open_harness):
    """Three models run a pass of 100 micro-batches each, and another session runs a pass of nine."""
    harness = open_harness(config={"micro_batch_tokens": 64, "max_pass_tokens": 65_536})
    for name in "abc":
        model_id, _ = harness.create(name)
        harness.submit(forward_backward(data=(datum(length=64),) * 100), model_id=model_id, seq_id=1)
    harness.session_id = harness.new_session()
    (modest, _), arrived = harness.create("modest"), []

    def arrive():
        data = (datum(length=32),) * 9
        arrived.append(harness.submit(forward_backward(data=data), model_id=modest, seq_id=1))

    backend = ArrivalBackend(harness.config, arrive)
    harness.run(harness.submit(sample(max_tokens=16 * 80, eos_stops=False)), backend=backend)
    after = backend.steps[backend.place :]
    assert after.index({modest}) <= 4, "it starts while they run"
    assert after.index("answered") <= 4 + 3 * 9, "and has every fourth turn at least"
    assert harness.result(arrived[0]).metrics["num_datums:sum"] == 9


def test_client_behind_a_backlog_beyond_memory_is_served_in_turn(open_harness):
    harness = open_harness(max_backlog_bytes=2**18)
    greedy, created = harness.create("greedy")
    harness.run(created, harness.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    large = forward_backward(data=(datum(length=1000),))
    size = len(codec.encode(large))
    queued = harness.api.write(
        lambda tx: [harness._submit(tx, large, model_id=greedy, seq_id=seq_id) for seq_id in range(1, 101)]
    )
    assert 100 * size > 4 * 2**18

    last = harness.submit(large, model_id=modest, seq_id=1), harness.submit(sample())
    backend = RecordingBackend(harness.config)
    harness.run(*last, backend=backend)
    assert len(backend.passes) <= 20 and all(harness.result(request_id) is not None for request_id in last)

    harness.run(*queued)
    orders = harness.api.read(
        lambda tx: tx.exec(
            select(RequestRow.seq_id)
            .where(RequestRow.model_id == greedy, RequestRow.seq_id > 0)
            .order_by(RequestRow.effect_order)
        ).all()
    )
    assert list(orders) == list(range(1, 101)), "requests that are read late are in seq_id order too"


def test_long_queue_of_one_session_delays_another_by_one_sample(open_harness):
    harness = open_harness(config={"max_sample_tokens": 20})
    many(harness, [sample()] * 200)
    harness.session_id = harness.new_session()
    modest = harness.submit(sample())
    backend = RecordingBackend(harness.config)
    harness.run(modest, backend=backend)
    assert backend.started.index(modest) == 1


class ArrivalInSliceBackend(RecordingBackend):
    """Lets another client arrive during the fifth decode slice."""

    def __init__(self, config, arrive):
        super().__init__(config)
        self.arrive = arrive

    def step_sample(self):
        if len(self.turns) == 5:
            self.num_before, self.num_held = len(self.started), len(self._open)
            self.arrive()
        return super().step_sample()


def test_backend_holds_few_waiting_samples_and_sessions_take_turns_for_slots(open_harness):
    harness = open_harness(config={"sample_slots": 16})
    first = harness.submit(sample(max_tokens=320, eos_stops=False))
    many(harness, [sample(max_tokens=32, eos_stops=False)] * 500)
    check_new_session_gets_the_first_free_slot(harness, first)


def test_samples_of_one_request_take_turns_with_other_sessions(open_harness):
    harness = open_harness(config={"sample_slots": 16})
    first = harness.submit(sample(max_tokens=320, eos_stops=False))
    harness.submit(replace(sample(max_tokens=32, eos_stops=False), num_samples=500))
    check_new_session_gets_the_first_free_slot(harness, first)


def check_new_session_gets_the_first_free_slot(harness, first):
    """Check that a session that arrives in the fifth slice gets the first free slot.

    There are 16 slots, and 500 samples of another session are waiting.
    """
    harness.session_id = harness.new_session()
    arrived = []
    backend = ArrivalInSliceBackend(harness.config, lambda: arrived.append(harness.submit(sample())))
    harness.run(first, backend=backend)
    assert backend.num_held == 16 + 2, "an eighth more than the number of slots"
    assert backend.started.index(arrived[0]) - backend.num_before <= 16, (
        "only slots that were already free are filled first"
    )


def test_sessions_share_free_slots_sample_by_sample(open_harness):
    harness = open_harness(config={"sample_slots": 8})
    many_samples = harness.submit(replace(endless(max_tokens=160), num_samples=40))
    harness.session_id = harness.new_session()
    few_samples = many(harness, [endless(max_tokens=16)] * 40)
    backend = RecordingBackend(harness.config)
    harness.run(many_samples, *few_samples, backend=backend)
    assert backend.started[:9].count(many_samples) == 5, "of the first nine"
    assert max(backend.started.index(request_id) for request_id in few_samples) < 2 * len(few_samples), "and so on"


def test_max_tokens_does_not_limit_admission_with_kv_cache_slots(open_harness):
    room = {"max_context_length": 40_960, "max_sample_tokens": 65_536, "sample_slots": 32}
    harness = open_harness(config=room)
    many(harness, [replace(endless(max_tokens=None), num_samples=8)] * 3)
    last = harness.submit(sample())
    backend = RecordingBackend(harness.config)
    harness.run(last, backend=backend)
    assert len(backend.turns) < 500, "24 of 32 slots are taken: it starts at once"


def test_one_token_requests_do_not_wait_for_slots(open_harness):
    harness = open_harness(config={"sample_slots": 4})
    first, *_ = many(harness, [endless(max_tokens=320)] * 50)
    arrived = []
    backend = ArrivalInSliceBackend(harness.config, lambda: arrived.append(harness.submit(sample(max_tokens=1))))
    harness.run(first, backend=backend)
    assert backend.started.index(arrived[0]) == backend.num_before == 5, (
        "all slots are taken until the first sample ends"
    )


def test_request_without_a_sampler_slot_is_passed_up_to_the_starvation_bound(open_harness):
    harness = open_harness(config={"max_samplers": 1, "max_sample_tokens": 2**20})
    first, second = harness.save_samplers(2)
    pinning = harness.submit(endless(sampler=first))
    harness.session_id = harness.new_session()
    waiting = harness.submit(sample(sampler=second))
    harness.session_id = harness.new_session()
    passing = many(harness, [endless(sampler=first, max_tokens=64)] * (2 * STARVATION_BOUND))
    backend = RecordingBackend(harness.config)
    harness.run(pinning, waiting, *passing, backend=backend)
    place = backend.started.index(waiting)
    assert place == 1 + STARVATION_BOUND, "the others pass it up to the bound"


def test_burst_of_samples_is_read_while_others_run(open_harness):
    harness = open_harness()
    running = harness.submit(endless())
    backend = RecordingBackend(harness.config)
    burst = many(harness, [sample(max_tokens=1)] * 2000)
    harness.run(running, *burst, backend=backend)
    assert len(backend.started) == 2001
    assert np.count_nonzero([turn == "S" for turn in backend.turns]) >= 125
    assert len(harness.api.read(lambda tx: futures.get_outcomes(tx, burst))) == 2000
