"""Owners share the device equally for any number of sessions, and do not share cached prompts."""

import time
from collections import Counter

import pytest
from sqlmodel import select

from skyrl_tx.contract.backend import Pass
from skyrl_tx.engine import loop
from skyrl_tx.store import futures
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample

ANN, BOB = 65, 66
"""The first token of each owner's prompts."""


class RecordingBackend(FakeBackend):
    """Records all requests, and before each slice how many samples of each owner are open."""

    def __init__(self, config):
        super().__init__("tiny", config)
        self.requests, self.slices = {}, []

    def begin_sample(self, batch):
        self.requests |= {request.request_id: request for request in batch.requests}
        super().begin_sample(batch)

    def step_sample(self):
        num_open = Counter()
        for request_id, num_samples in self._open.by_request().items():
            num_open[int(self.requests[request_id].prompt[0])] += num_samples
        self.slices.append(num_open)
        return super().step_sample()


@pytest.fixture
def make_harness(tmp_path):
    harnesses = []

    def make(config=None, **settings):
        harness = EngineHarness(tmp_path, **settings)
        harness.config = harness.config.model_copy(update=config or {})
        harnesses.append(harness)
        return harness

    yield make
    for harness in harnesses:
        harness.close()


def ask(owner_token, **params):
    return sample((owner_token, 1), eos_stops=False, **params)


def test_one_session_next_to_fifteen_of_another_owner_has_half_of_the_slots(make_harness):
    harness = make_harness({"sample_slots": 7})
    harness.become("ann")
    for _ in range(15):
        harness.session_id = harness.new_session()
        for _ in range(4):
            harness.submit(ask(ANN, max_tokens=160))
    harness.become("bob")
    of_bob = [harness.submit(ask(BOB, max_tokens=80)) for _ in range(16)]
    backend = RecordingBackend(harness.config)
    harness.run(*of_bob, backend=backend)
    under_load = backend.slices[: max(n for n, num_open in enumerate(backend.slices) if num_open[BOB] == 4)]
    assert len(under_load) >= 15
    assert all(num_open == {ANN: 4, BOB: 4} for num_open in under_load), under_load


def test_owner_alone_has_all_slots_and_gives_them_back_as_samples_end(make_harness):
    harness = make_harness({"sample_slots": 7})
    harness.become("ann")
    of_ann = [harness.submit(ask(ANN, max_tokens=16 * n)) for n in range(1, 20)]
    arrived = []

    class Interrupted(RecordingBackend):
        def step_sample(self):
            if len(self.slices) == 5:
                harness.become("bob")
                arrived.extend(harness.submit(ask(BOB, max_tokens=320)) for _ in range(8))
            return super().step_sample()

    backend = Interrupted(harness.config)
    harness.run(*of_ann, backend=backend)
    assert all(num_open == {ANN: 8} for num_open in backend.slices[:6])
    later = backend.slices[6:]
    shared = next(n for n, num_open in enumerate(later) if num_open[BOB] == 4)
    assert [num_open[ANN] for num_open in later[:shared]] == sorted([num_open[ANN] for num_open in later[:shared]])[
        ::-1
    ]
    assert later[shared] == {ANN: 4, BOB: 4}, "each slot that became free was bob's until then"


@pytest.mark.parametrize(("flag", "scopes"), [(False, ["ann", "bob"]), (True, ["", ""])])
def test_cached_prompts_are_used_for_their_owner_only_unless_shared(make_harness, flag, scopes):
    harness = make_harness(share_prefix_cache=flag)
    asked = []
    for owner in ("ann", "bob"):
        harness.become(owner)
        asked.append(harness.submit(ask(ANN)))
    backend = RecordingBackend(harness.config)
    harness.run(*asked, backend=backend)
    assert [backend.requests[request_id].cache_scope for request_id in asked] == scopes


class RecordingPass(Pass):
    """A pass that records the sessions of its micro-batches."""

    def __init__(self, inner, model_id, steps):
        self.inner, self.model_id, self.steps = inner, model_id, steps

    def step(self):
        self.steps.append(self.model_id.partition(":")[0])
        return self.inner.step()

    def results(self):
        return self.inner.results()

    def abort(self):
        self.inner.abort()


class ArrivalBackend(FakeBackend):
    """Records the session of each micro-batch, and calls `arrive` before the tenth."""

    def __init__(self, config, arrive):
        super().__init__("tiny", config)
        self.arrive, self.steps = arrive, []

    def begin_pass(self, batch, *, backward):
        inner = super().begin_pass(batch, backward=backward)
        return RecordingPass(inner, batch.examples[0].model_id, self.steps)

    def step_sample(self):
        if len(self.steps) >= 10 and self.arrive is not None:
            arrive, self.arrive = self.arrive, None
            arrive()
        return super().step_sample()


def test_long_pass_of_one_owner_has_half_of_the_micro_batches_next_to_many_of_another(make_harness):
    harness = make_harness({"micro_batch_tokens": 64, "max_pass_tokens": 65_536})
    long = forward_backward(data=(datum(length=64),) * 60)
    harness.become("bob")
    bob = harness.session_id
    of_bob, _ = harness.create()
    harness.become("ann")
    for name in "abcd":
        if name == "c":
            harness.session_id = harness.new_session()
        model_id, _ = harness.create(name)
        harness.submit(long, model_id=model_id, seq_id=1)
    running = harness.submit(sample(max_tokens=16 * 200, eos_stops=False))
    arrived = []

    def arrive():
        harness.session_id, harness.owner = bob, "bob"
        arrived.append(harness.submit(long, model_id=of_bob, seq_id=1))

    backend = ArrivalBackend(harness.config, arrive)
    harness.run(running, backend=backend)
    first = backend.steps.index(bob)
    assert first <= 14, "a place was reserved for it, and it is next"
    window = backend.steps[first : first + 100]
    assert 48 <= window.count(bob) <= 52


def test_model_that_was_forgotten_while_evicted_goes_on(make_harness, monkeypatch):
    """With one adapter slot, housekeeping forgets the model that is not on the device."""
    cursors, read = [], loop.read_sequence_cursor

    def read_cursor(store, model_id):
        cursors.append((model_id, read(store, model_id).next_seq))
        return read(store, model_id)

    monkeypatch.setattr(loop, "read_sequence_cursor", read_cursor)
    harness = make_harness({"max_models": 1}, housekeeping_interval_s=0.01, gap_timeout_s=100.0)
    first, created = harness.create("first")
    harness.run(created)
    steps = [harness.submit(forward_backward(), model_id=first, seq_id=1)]
    steps.append(harness.submit(optim_step(), model_id=first, seq_id=2))
    second, _ = harness.create("second")
    backend = TwoModelBackend(harness, first, second)
    backend.more = steps
    last = harness.submit(sample(max_tokens=16 * 60, eos_stops=False))
    harness.run(last, backend=backend)
    assert cursors.count((first, 1)) <= 2 and (first, 3) in cursors, "it was forgotten"
    results = [harness.result(request_id) for request_id in backend.more]
    assert [getattr(result, "message", None) for result in results[:-1]] == [None] * (len(results) - 1)
    assert results[-1].message.startswith("seq_id 2 arrived too late"), "its last barrier is known"


class TwoModelBackend(FakeBackend):
    """Submits passes of two models in turn, during decode slices."""

    def __init__(self, harness, *models):
        super().__init__("tiny", harness.config)
        self.harness, self.models, self.num_slices, self.more = harness, models, 0, []

    def step_sample(self):
        self.num_slices += 1
        first, second = self.models
        if self.num_slices == 10:
            self.more.append(self.harness.submit(forward_backward(), model_id=second, seq_id=1))
        if self.num_slices == 30:
            self.more.append(self.harness.submit(forward_backward(), model_id=first, seq_id=3))
        if self.num_slices == 40:
            self.more.append(self.harness.submit(forward_backward(), model_id=first, seq_id=2))
        time.sleep(0.005)
        return super().step_sample()


def test_owner_behind_a_backlog_of_another_beyond_memory_is_served_in_turn(make_harness):
    """Fewer than 50 of the 250 waiting requests fit in memory."""
    harness = make_harness({"max_pass_tokens": 64, "micro_batch_tokens": 16}, max_backlog_bytes=2**14)
    forward = forward_backward(backward=False, data=(datum(length=32),))
    harness.become("ann")
    of_ann, created = harness.create()
    harness.run(created)
    queued = harness.api.write(
        lambda tx: [harness._submit(tx, forward, model_id=of_ann, seq_id=n) for n in range(1, 251)]
    )
    harness.become("bob")
    of_bob, _ = harness.create()
    last = harness.submit(forward, model_id=of_bob, seq_id=1)
    harness.run(last)
    done = harness.api.read(lambda tx: futures.get_outcomes(tx, queued))
    assert len(done) < 75, "it is next once it is read"

    harness.run(*queued)
    in_order = select(RequestRow.seq_id).where(RequestRow.model_id == of_ann, RequestRow.seq_id > 0)
    orders = harness.api.read(lambda tx: tx.exec(in_order.order_by(RequestRow.answer_order)).all())
    assert list(orders) == list(range(1, 251)), "requests that are read late are in seq_id order too"
