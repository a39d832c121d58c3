"""Weighted fair sharing of turns, of device time in training and of slots in sampling.

Results do not depend on weights.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.engine.extension import START, Admission, Decision, Wait
from skyrl_tx.engine.fair_share import FairShare
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store import audit
from skyrl_tx.testing.fake import FakeConfig
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample
from tests.unit.engine.test_owners import ANN, BOB, ArrivalBackend, RecordingBackend, ask
from tests.unit.engine.test_schedule import make_request, schedule

WEIGHTS = {"ann": 3}
SHARE = 3.0
TOLERANCE = 0.1

Make = Callable[..., EngineHarness]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 100)), min_size=1, max_size=200),
)
def test_owners_that_always_have_work_differ_by_one_piece_at_most(
    weights: list[int], pieces: list[tuple[int, int]]
) -> None:
    """The bound of start-time fair queuing.

    For each owner, it is the largest piece of work divided by the owner's weight.
    """
    by_owner = {f"owner-{number}": weight for number, weight in enumerate(weights)}
    share, done = FairShare(lambda: by_owner), Counter[str]()
    for owner in by_owner:
        share.drop_credit(owner)
    for _, size in pieces:
        owner = min(by_owner, key=share.get_virtual_time)
        share.charge(owner, size)
        done[owner] += size
    largest = max(size for _, size in pieces)
    served = {owner: done[owner] / weight for owner, weight in by_owner.items()}
    for owner, weight in by_owner.items():
        for other, weight_of_other in by_owner.items():
            assert served[owner] - served[other] <= largest / weight + largest / weight_of_other + 1e-6


def test_a_time_without_work_saves_up_nothing() -> None:
    share = FairShare(lambda: {})
    for _ in range(100):
        share.charge("ann", 10)
    share.drop_credit("bob")
    order: list[str] = []
    for _ in range(6):
        owner = min(("ann", "bob"), key=share.get_virtual_time)
        share.charge(owner, 10)
        order.append(owner)
    assert order == ["bob", "ann", "bob", "ann", "bob", "ann"]


def test_a_short_absence_loses_nothing() -> None:
    share = FairShare(lambda: {"ann": 2})
    for owner in ("ann", "bob", "ann"):
        share.charge(owner, 1)
    before = share.get_virtual_time("ann")
    share.drop_credit("ann")
    assert share.get_virtual_time("ann") == before


def test_many_owners_are_forgotten_without_a_change_of_order() -> None:
    share = FairShare(lambda: {})
    for number in range(5000):
        share.drop_credit(f"owner-{number}")
        share.charge(f"owner-{number}", 1)
        share.charge("busy", 1)
    assert len(share._times) <= 1025


def test_owners_of_weight_0_come_last_and_are_equal_among_themselves() -> None:
    weights = {"ann": 0, "bob": 0}
    share = FairShare(lambda: weights)

    def turns(number: int, *owners: str) -> list[str]:
        found: list[str] = []
        for _ in range(number):
            found.append(min(owners, key=share.get_virtual_time))
            share.charge(found[-1], 10)
        return found

    assert Counter(turns(100, "ann", "bob", "eve")) == {"eve": 100}
    assert Counter(turns(10, "ann", "bob")) == {"ann": 5, "bob": 5}
    weights["ann"] = 1
    back = Counter(turns(20, "ann", "bob", "eve"))
    assert back == {"ann": 11, "eve": 9}, "it starts with the work that started last, and gets no past share back"


def passes(owner: str, number: int, model: str) -> list[Any]:
    return [make_request(seq, model_id=ModelId(model), owner=owner, session=owner) for seq in range(1, number + 1)]


def test_with_weights_a_batch_has_one_owner() -> None:
    plain = schedule(*passes("ann", 1, "a"), *passes("bob", 1, "b"))
    step = plain.take(0.0)
    assert step is not None and {request.owner for request in step.requests} == {"ann", "bob"}
    weighted = schedule(*passes("ann", 1, "a"), *passes("bob", 1, "b"), *passes("ann", 1, "c"))
    weighted.fair_share = FairShare(lambda: WEIGHTS)
    step = weighted.take(0.0)
    assert step is not None and [request.owner for request in step.requests] == ["ann", "ann"]


def test_the_order_of_one_owner_does_not_depend_on_weights() -> None:
    def order(weights: dict[str, int]) -> list[tuple[str | None, int | None]]:
        requests = [
            make_request(seq, optim_step() if seq % 3 == 0 else None, model_id=ModelId(model), session=model)
            for seq in range(1, 13)
            for model in "abcd"
        ]
        made, found = schedule(*requests, max_pass_tokens=35), list[tuple[str | None, int | None]]()
        made.fair_share = FairShare(lambda: weights)
        while (step := made.take(0.0)) is not None:
            found += [(request.model_id, request.seq_id) for request in step.requests]
        return found

    assert order({}) == order({"ann": 7}) == order({"bob": 2})


def test_passes_of_weight_0_run_when_no_other_could() -> None:
    """They also wait for the second model of another owner, although models normally take turns."""
    made = schedule(*passes("ann", 3, "a"), *passes("bob", 2, "b"), *passes("bob", 2, "c"), max_pass_tokens=10)
    made.fair_share = FairShare(lambda: {"ann": 0})
    order: list[str | None] = []
    while (step := made.take(0.0)) is not None:
        assert len(step.requests) == 1
        order.append(step.requests[0].model_id)
    assert order == ["b", "c", "b", "c", "a", "a", "a"]
    made = schedule(*passes("ann", 1, "a"), *passes("bob", 1, "b"))
    made.fair_share = FairShare(lambda: {"ann": 0})
    step = made.take(0.0, blocked=[ModelId("b")])
    assert step is not None and step.requests[0].owner == "ann"


class PausedOwners(Admission):
    """Keeps the requests of some owners waiting."""

    def __init__(self, owners: set[str]) -> None:
        self.owners = owners

    def may_start(self, queued: QueuedRequest) -> Decision:
        return Wait("not now") if queued.owner in self.owners else START


def test_a_paused_owner_does_not_save_up() -> None:
    """After a pause the owner gets its normal share, and is not compensated for the time it was paused."""
    made = schedule(*passes("ann", 40, "a"), *passes("bob", 40, "b"), max_pass_tokens=10)
    paused = {"ann"}
    made.admission = PausedOwners(paused)
    owners: list[str] = []
    for turn in range(40):
        if turn == 20:
            paused.clear()
        step = made.take(0.0)
        assert step is not None
        owners.append(step.requests[0].owner)
    assert owners[:20] == ["bob"] * 20
    assert abs(owners[20:].count("ann") - 10) <= 1


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[Make]:
    harnesses: list[EngineHarness] = []

    def make(config: dict[str, Any], weights: dict[str, int] = WEIGHTS) -> EngineHarness:
        harness = EngineHarness(tmp_path / str(len(harnesses)))
        harness.config = harness.config.model_copy(update=config)
        harnesses.append(harness)
        for owner, weight in weights.items():
            subject = Subject("owner", owner)
            harness.api.write(lambda tx, s=subject, w=weight: quotas.put(tx, s, "weight", w, audit.OPERATOR, 1.0))
        return harness

    yield make
    for harness in harnesses:
        harness.close()


@pytest.mark.parametrize(
    ("num_models", "num_micro_batches", "with_steps"),
    [
        pytest.param(*case, marks=() if case in ((1, 1, True), (3, 3, True)) else pytest.mark.slow)
        for case in itertools.product((1, 3), (1, 3), (True, False))
    ],
)
def test_training_shares_micro_batches_by_weight(
    make_harness: Make, num_models: int, num_micro_batches: int, with_steps: bool
) -> None:
    harness = make_harness({"micro_batch_tokens": 64, "max_pass_tokens": 256})
    data, sessions, last = (datum(length=64),) * num_micro_batches, dict[str, str](), list[RequestId]()

    for owner, number in (("ann", 60), ("bob", 60)):
        harness.become(owner)
        sessions[harness.session_id] = owner

        for name in "abc"[:num_models]:
            model_id, created = harness.create(name)
            harness.run(created)
            pass_ = forward_backward(data=data)
            queue = (pass_, optim_step() if with_steps else pass_) * (number // num_models)
            ended = harness.api.write(
                lambda tx, model_id=model_id, queue=queue: [
                    harness._submit(tx, request, model_id=model_id, seq_id=seq_id)
                    for seq_id, request in enumerate(queue, start=1)
                ]
            )
            last += ended[-1:] if owner == "ann" else []

    backend = ArrivalBackend(harness.config, None)
    harness.run(*last, backend=backend)
    owners = [sessions[session] for session in backend.steps]
    under_load = Counter(owners[: len(owners) - owners[::-1].index("ann")])
    ratio = under_load["ann"] / under_load["bob"]
    print(f"training, {num_models} models, {num_micro_batches} micro-batches, steps {with_steps}: {ratio:.2f}")
    assert abs(ratio / SHARE - 1) <= TOLERANCE, under_load


class TokenCountingBackend(RecordingBackend):
    """Records how many tokens each decode slice adds to the samples of each owner."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.tokens: list[Counter[int]] = []

    def step_sample(self) -> list[SampleDelta]:
        deltas = super().step_sample()
        added = Counter[int]()
        for delta in deltas:
            added[int(self.requests[delta.request_id].prompt[0])] += delta.tokens.size
        self.tokens.append(added)
        return deltas


@pytest.mark.parametrize("slots", [0, 4, *(pytest.param(slots, marks=pytest.mark.slow) for slots in (2, 7, 16, 64))])
def test_sampling_shares_decoded_tokens_by_weight(make_harness: Make, slots: int) -> None:
    room = {"max_sample_tokens": 4 * 66} if not slots else {}
    harness = make_harness({"sample_slots": slots, **room})
    of_ann, count = list[RequestId](), max(160, 20 * slots)
    for owner, token in (("bob", BOB), ("ann", ANN)):
        harness.become(owner)
        asked = [ask(token, max_tokens=48 + 16 * (number % 3)) for number in range(count)]
        of_ann = harness.api.write(lambda tx, asked=asked: [harness._submit(tx, request) for request in asked])

    backend = TokenCountingBackend(harness.config)
    harness.run(*of_ann, backend=backend)
    tenth = len(backend.tokens) // 10
    decoded = sum(
        backend.tokens[2 * tenth : 8 * tenth], Counter[int]()
    )  # only the slices during which samples of both owners are waiting
    ratio = decoded[ANN] / decoded[BOB]
    print(f"sampling, {slots} slots: {ratio:.2f}")
    assert abs(ratio / SHARE - 1) <= TOLERANCE, decoded


def test_micro_batches_of_weight_0_wait_for_those_of_others(make_harness: Make) -> None:
    """A pass of weight 0 that has already started waits too.

    All of its passes finish in the end.
    """
    harness = make_harness({"micro_batch_tokens": 64, "max_pass_tokens": 65_536}, {"ann": 0})
    long = forward_backward(data=(datum(length=64),) * 30)
    harness.become("bob")
    bob = harness.session_id
    of_bob, created = harness.create()
    harness.run(created)
    harness.become("ann")
    of_ann, _ = harness.create()
    last = harness.submit(long, model_id=of_ann, seq_id=1)

    def arrive() -> None:
        harness.session_id, harness.owner = bob, "bob"
        for seq_id in (1, 2):
            harness.submit(long, model_id=of_bob, seq_id=seq_id)

    running = harness.submit(sample(max_tokens=16 * 30, eos_stops=False))
    backend = ArrivalBackend(harness.config, arrive)
    harness.run(running, last, backend=backend)
    first = backend.steps.index(bob)
    assert 10 <= first <= 14
    assert backend.steps[first : first + 30] == [bob] * 30
    assert Counter(backend.steps)[bob] == 60 and len(backend.steps) == 90
    after = backend.steps[first + 30 :]
    assert after.index(bob) <= 1 and after[-15:].count(bob) == 0, "between two passes of Bob at most one step of Ann"


@pytest.mark.parametrize("slots", [0, 4])
def test_samples_of_weight_0_start_when_no_other_could(make_harness: Make, slots: int) -> None:
    room = {"max_sample_tokens": 4 * 66} if not slots else {}
    harness = make_harness({"sample_slots": slots, **room}, {"ann": 0})
    asked: list[RequestId] = []
    for owner, token in (("ann", ANN), ("bob", BOB)):
        harness.become(owner)
        asked += [harness.submit(ask(token, max_tokens=64)) for _ in range(12)]
    backend = RecordingBackend(harness.config)
    harness.run(*asked, backend=backend)
    started = [int(request.prompt[0]) for request in backend.requests.values()]
    assert started == [BOB] * 12 + [ANN] * 12


def test_an_owner_alone_gets_everything_whatever_its_weight(make_harness: Make) -> None:
    harness = make_harness({"sample_slots": 8}, {"ann": 1000, "bob": 0})
    harness.become("bob")
    asked = [harness.submit(ask(BOB, max_tokens=64)) for _ in range(30)]
    backend = RecordingBackend(harness.config)
    harness.run(*asked, backend=backend)
    assert max(num_open[BOB] for num_open in backend.slices) == 9


def test_no_bit_depends_on_weights(make_harness: Make) -> None:
    """Two owners train and sample at the same time, first with equal and then with different weights."""

    def results(weights: dict[str, int]) -> list[Any]:
        harness, ids = make_harness({"sample_slots": 4, "micro_batch_tokens": 16}, weights), list[RequestId]()
        for owner in ("ann", "bob"):
            harness.become(owner)
            model_id, _ = harness.create()
            for step in range(4):
                ids.append(harness.submit(forward_backward(seed=step), model_id=model_id, seq_id=2 * step + 1))
                ids.append(harness.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2))
            ids += [harness.submit(sample(temperature=1.0, seed=seed, max_tokens=24)) for seed in range(6)]
        harness.run(*ids)
        return [harness.result(request_id) for request_id in ids]

    for plain, weighted in zip(results({}), results({"ann": 5, "bob": 2}), strict=True):
        assert type(plain) is type(weighted)
        if hasattr(plain, "metrics"):
            assert plain.metrics == weighted.metrics
        for ours, theirs in zip(getattr(plain, "sequences", ()), getattr(weighted, "sequences", ()), strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.slow
def test_a_weight_that_is_set_while_the_engine_runs_is_followed(make_harness: Make) -> None:
    harness = make_harness({"micro_batch_tokens": 64, "max_pass_tokens": 64}, {})
    sessions: dict[str, str] = {}
    data, last = (datum(length=64),), list[RequestId]()
    for owner in ("ann", "bob"):
        harness.become(owner)
        sessions[harness.session_id] = owner
        model_id, created = harness.create()
        harness.run(created)
        last = [
            harness.submit(forward_backward(data=data), model_id=model_id, seq_id=seq_id) for seq_id in range(1, 600)
        ]
        if owner == "ann":
            until = last[-1]
    backend = ArrivalBackend(harness.config.model_copy(update={"step_delay_s": 0.003}), None)

    def arrive() -> None:
        subject = Subject("owner", "ann")
        harness.api.write(lambda tx: quotas.put(tx, subject, "weight", 3, audit.OPERATOR, time.time()))

    backend.arrive = arrive
    harness.become("eve")
    harness.submit(sample(max_tokens=16 * 100, eos_stops=False))
    harness.run(until, backend=backend)
    owners = [sessions[session] for session in backend.steps]
    end = len(owners) - owners[::-1].index("ann")
    late = Counter(owners[end - 120 : end])
    assert abs(late["ann"] / late["bob"] / SHARE - 1) <= TOLERANCE, late
