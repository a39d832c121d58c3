"""Training and sampling take turns, and so do tenants, however much one of them asks for."""

import time
from dataclasses import replace

import numpy as np
import pytest
from sqlmodel import select

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract import codec
from skyrl_tx.contract.backend import Pass
from skyrl_tx.engine.sampling import _MOST_PASSED
from skyrl_tx.store import futures
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.engine_house import House, datum, forward_backward, sample

NUM_QUEUED = 10_000


class Scripted(FakeBackend):
    """Writes down whose turn it was: T for a training step, S for a slice; and the order of what was begun."""

    def __init__(self, config):
        super().__init__("tiny", config)
        self.turns, self.begun, self.passes = [], [], []

    def begin_pass(self, batch, *, backward):
        self.passes.append({example.model_id for example in batch.examples})
        return Counted(super().begin_pass(batch, backward=backward), self.turns)

    def begin_sample(self, batch):
        self.begun += [request.request_id for request in batch.requests for _ in range(request.num_samples)]
        super().begin_sample(batch)

    def step_sample(self):
        self.turns.append("S")
        return super().step_sample()


class Counted(Pass):
    """A pass whose steps are written down."""

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
def open_house(tmp_path):
    houses = []

    def make(config=None, **settings):
        house = House(tmp_path, **settings)
        house.config = house.config.model_copy(update=config or {})
        houses.append(house)
        return house

    yield make
    for house in houses:
        house.close()


def many(house, requests, **where):
    """Store many requests in one commit."""
    return house.api.write(lambda tx: [house._submit(tx, request, **where) for request in requests])


def endless(**changes):
    return sample(**{"max_tokens": 2000, "eos_stops": False, **changes})


def longest_run(turns, side):
    return max(map(len, "".join(turns).replace("T" if side == "S" else "S", " ").split()), default=0)


@pytest.mark.parametrize(("num_steps", "num_slices"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_neither_side_waits_for_more_than_its_bound(open_house, num_steps, num_slices):
    house = open_house(training_steps_per_turn=num_steps, decode_slices_per_turn=num_slices)
    model_id, created = house.create()
    house.run(created)
    data = tuple(datum(seed) for seed in range(10))
    passes = [house.submit(forward_backward(data=data), model_id=model_id, seq_id=1 + n) for n in range(12)]
    samples = [house.submit(endless()) for _ in range(2)]
    backend = Scripted(house.config)
    house.run(*passes, *samples, backend=backend)
    turns = "".join(backend.turns)
    both = turns[turns.index("S") if turns[0] == "T" else turns.index("T") : min(turns.rindex("T"), turns.rindex("S"))]
    assert len(both) > 60
    assert longest_run(both, "T") == num_steps and longest_run(both, "S") == num_slices


def test_ten_thousand_passes_of_one_model_delay_another_by_one_batch(open_house):
    house = open_house(config={"max_pass_tokens": 64})
    greedy, _ = house.create("greedy")
    house.run(house.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    forward = forward_backward(backward=False, data=(datum(length=32),))
    many(house, [forward] * NUM_QUEUED, model_id=greedy)
    last = house.submit(forward, model_id=modest)
    backend = Scripted(house.config)
    begun = time.monotonic()
    house.run(last, backend=backend)
    num_before = next(index for index, models in enumerate(backend.passes) if modest in models)
    num_read_in_turns = (time.monotonic() - begun) / 0.1  # how many turns it took to read them all, at most
    assert num_before <= num_read_in_turns + 2, "once it was read it was next"


class Visited(Scripted):
    """In a step of training another client comes along; the models of all steps are written down."""

    def __init__(self, config, arrive):
        super().__init__(config)
        self.arrive, self.place, self.steps = arrive, None, []

    def begin_pass(self, batch, *, backward):
        inner = super().begin_pass(batch, backward=backward)
        return Stepped(inner, self, {example.model_id for example in batch.examples})


class Stepped(Counted):
    """A pass that tells which models its steps are of."""

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
def test_a_pass_waits_for_some_steps_of_others_whatever_they_ask_for(open_house, num_requests, num_data):
    """In steps of the device, at the default bounds: of 32 tokens beside requests and queues of any size."""
    house = open_house(config={"micro_batch_tokens": 1024, "max_pass_tokens": 65_536, "max_context_length": 2048})
    greedy, created = house.create("greedy")
    house.run(created, house.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    queue = forward_backward(backward=False, data=(datum(length=1024),) * num_data)
    many(house, [queue] * num_requests, model_id=greedy)
    arrived = []

    def arrive():
        arrived.append(house.submit(forward_backward(data=(datum(length=32),)), model_id=modest, seq_id=1))

    backend = Visited(house.config, arrive)
    first = house.submit(sample(max_tokens=16 * 80, eos_stops=False))
    house.run(first, backend=backend)
    after = backend.steps[backend.place :]
    place = after.index({modest})
    assert place <= 4, "a step or two while it is read, and one of each under way"
    assert after[place + 1] == "answered", "and it is answered at once"
    assert house.result(arrived[0]).metrics["num_tokens:sum"] == 32


def test_long_passes_of_one_sessions_models_leave_a_place_to_another_session(open_house):
    """Three models with 100 micro-batches each, and a visitor with nine: no batch but one longer request each."""
    house = open_house(config={"micro_batch_tokens": 64, "max_pass_tokens": 65_536})
    for name in "abc":
        model_id, _ = house.create(name)
        house.submit(forward_backward(data=(datum(length=64),) * 100), model_id=model_id, seq_id=1)
    house.session_id = house.new_session()
    (modest, _), arrived = house.create("modest"), []

    def arrive():
        data = (datum(length=32),) * 9
        arrived.append(house.submit(forward_backward(data=data), model_id=modest, seq_id=1))

    backend = Visited(house.config, arrive)
    house.run(house.submit(sample(max_tokens=16 * 80, eos_stops=False)), backend=backend)
    after = backend.steps[backend.place :]
    assert after.index({modest}) <= 4, "it began beside them"
    assert after.index("answered") <= 4 + 3 * 9, "and had a turn of three"
    assert house.result(arrived[0]).metrics["num_datums:sum"] == 9


def test_who_comes_behind_more_than_memory_holds_is_served_in_turn(open_house):
    house = open_house(max_backlog_bytes=2**20)
    greedy, created = house.create("greedy")
    house.run(created, house.create("modest")[1])
    modest = greedy.replace("greedy", "modest")
    large = forward_backward(data=(datum(length=2000),))
    size = len(codec.encode(large))
    queued = [house.submit(large, model_id=greedy, seq_id=seq_id) for seq_id in range(1, 201)]
    assert 200 * size > 4 * 2**20
    last = house.submit(large, model_id=modest, seq_id=1), house.submit(sample())
    backend = Scripted(house.config)
    house.run(*last, backend=backend)
    assert len(backend.passes) <= 20 and all(house.result(each) is not None for each in last)
    house.run(*queued)
    orders = house.api.read(
        lambda tx: tx.exec(
            select(RequestRow.seq_id)
            .where(RequestRow.model_id == greedy, RequestRow.seq_id > 0)
            .order_by(RequestRow.effect_order)
        ).all()
    )
    assert list(orders) == list(range(1, 201)), "what was read late took effect in order all the same"


def test_a_long_queue_of_one_session_delays_another_by_one_sample(open_house):
    house = open_house(config={"max_sample_tokens": 20})
    many(house, [sample()] * 200)
    house.session_id = house.new_session()
    modest = house.submit(sample())
    backend = Scripted(house.config)
    house.run(modest, backend=backend)
    assert backend.begun.index(modest) == 1


class Interrupted(Scripted):
    """In its fifth slice another client comes along."""

    def __init__(self, config, arrive):
        super().__init__(config)
        self.arrive = arrive

    def step_sample(self):
        if len(self.turns) == 5:
            self.num_before, self.num_held = len(self.begun), sum(map(len, self._running.values()))
            self.arrive()
        return super().step_sample()


def test_the_backend_is_handed_what_it_can_start_soon_and_sessions_take_turns_for_the_rest(open_house):
    house = open_house(config={"sample_slots": 16})
    first = house.submit(sample(max_tokens=320, eos_stops=False))
    many(house, [sample(max_tokens=32, eos_stops=False)] * 500)
    check_that_a_visitor_has_the_first_slot(house, first)


def test_samples_of_one_request_take_turns_with_those_of_others(open_house):
    house = open_house(config={"sample_slots": 16})
    first = house.submit(sample(max_tokens=320, eos_stops=False))
    house.submit(replace(sample(max_tokens=32, eos_stops=False), num_samples=500))
    check_that_a_visitor_has_the_first_slot(house, first)


def check_that_a_visitor_has_the_first_slot(house, first):
    """In the fifth slice, with 16 slots and 500 samples of another session waiting for them."""
    house.session_id = house.new_session()
    arrived = []
    backend = Interrupted(house.config, lambda: arrived.append(house.submit(sample())))
    house.run(first, backend=backend)
    assert backend.num_held == 16 + 2, "an eighth more than there are slots"
    assert backend.begun.index(arrived[0]) - backend.num_before <= 16, "it had the first slot but those free by then"


def test_sessions_share_what_comes_free_sample_by_sample(open_house):
    house = open_house(config={"sample_slots": 8})
    many_samples = house.submit(replace(endless(max_tokens=160), num_samples=40))
    house.session_id = house.new_session()
    few_samples = many(house, [endless(max_tokens=16)] * 40)
    backend = Scripted(house.config)
    house.run(many_samples, *few_samples, backend=backend)
    assert backend.begun[:9].count(many_samples) == 5, "of nine that are handed over first"
    assert max(backend.begun.index(each) for each in few_samples) < 2 * len(few_samples), "and so on"


def test_what_samples_may_come_to_be_takes_no_room_where_slots_are_told(open_house):
    room = {"max_context_length": 40_960, "max_sample_tokens": 65_536, "sample_slots": 32}
    house = open_house(config=room)
    many(house, [replace(endless(max_tokens=None), num_samples=8)] * 3)
    last = house.submit(sample())
    backend = Scripted(house.config)
    house.run(last, backend=backend)
    assert len(backend.turns) < 500, "of 32 slots 24 are taken: it did not wait for what the others may come to"


def test_what_takes_no_slot_does_not_wait_for_one(open_house):
    house = open_house(config={"sample_slots": 4})
    first, *_ = many(house, [endless(max_tokens=320)] * 50)
    arrived = []
    backend = Interrupted(house.config, lambda: arrived.append(house.submit(sample(max_tokens=1))))
    house.run(first, backend=backend)
    assert backend.begun.index(arrived[0]) == backend.num_before == 5, "all slots are taken until the first is answered"


def test_a_sampler_without_a_slot_holds_nobody_up_and_is_not_passed_for_ever(open_house):
    house = open_house(config={"max_samplers": 1, "max_sample_tokens": 2**20})
    first, second = house.save_samplers(2)
    pinning = house.submit(endless(sampler=first))
    house.session_id = house.new_session()
    waiting = house.submit(sample(sampler=second))
    house.session_id = house.new_session()
    passing = many(house, [endless(sampler=first, max_tokens=320)] * (2 * _MOST_PASSED))
    backend = Scripted(house.config)
    house.run(pinning, waiting, *passing, backend=backend)
    place = backend.begun.index(waiting)
    assert place == 1 + _MOST_PASSED, "others went by, up to the bound"


def test_samples_of_a_burst_are_read_while_others_run(open_house):
    house = open_house()
    running = house.submit(endless())
    backend = Scripted(house.config)
    burst = many(house, [sample(max_tokens=1)] * 2000)
    house.run(running, *burst, backend=backend)
    assert len(backend.begun) == 2001
    assert np.count_nonzero([turn == "S" for turn in backend.turns]) >= 125
    assert len(house.api.read(lambda tx: futures.statuses(tx, burst))) == 2000
