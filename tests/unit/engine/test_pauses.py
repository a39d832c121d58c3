"""Pauses of requests by quotas of the day, samples and training steps at once: their bounds, ends and reasons."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlmodel import select

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.errors import ErrorCategory, UserError
from skyrl_tx.contract.results import Failure, PromptResult, SampledSequence, SampleOutput
from skyrl_tx.engine.accounts import Accounts
from skyrl_tx.engine.pauses import Pauses
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.room import Room
from skyrl_tx.store import audit, engine_state, futures, quotas, sessions, totals
from skyrl_tx.store.database import Store
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Subject
from skyrl_tx.store.tables import OverQuota, RequestRow
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample
from tests.support.waiting import until
from tests.unit.engine.test_schedule import queued

DAY = 20_000 * 86_400.0
PASS_TOKENS = 10
"""Tokens of `forward_backward()`."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[EngineHarness]:
    made = EngineHarness(tmp_path)
    yield made
    made.close()


def put(store: Store, subject: str, name: str, value: int | None, over: OverQuota = "wait") -> None:
    about = Subject.parse(subject)
    store.write(lambda tx: quotas.put(tx, about, name, value, audit.OPERATOR, time.time(), over=over))


class World:
    """The pauses of an engine whose clock and results the test controls."""

    def __init__(self, store: Store) -> None:
        self.store, self.now, self.num_waits = store, DAY + 100.0, 0
        view = QuotaView(store, clock=lambda: self.now)
        self.on_result: Callable[[QueuedRequest, object], None]
        self.pauses = Pauses(store, view, Accounts(store, view), self, clock=lambda: self.now)  # type: ignore[arg-type]

    def wait_for_commits(self) -> None:
        """Stand for the log of requests."""
        self.num_waits += 1

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.refresh()


@pytest.fixture
def world(harness: EngineHarness) -> World:
    return World(harness.api)


def failed() -> Failure:
    return Failure(message="no", category=ErrorCategory.USER)


def a_pass(owner: str = "ann", session: str | None = None, backward: bool = True) -> QueuedRequest:
    return queued(1, forward_backward(backward=backward), owner=owner, session=session or owner)


def a_sample(owner: str = "ann") -> QueuedRequest:
    return queued(None, sample(), model_id=None, owner=owner, session=owner)


def test_without_quotas_no_request_is_paused(world: World) -> None:
    world.pauses.refresh()
    world.pauses.hand_over(a_pass())
    assert not world.pauses.is_paused(a_pass()) and world.pauses.exhausted() == [] and world.num_waits == 0


def test_quotas_of_other_kinds_are_no_work_for_each_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    put(world.store, "key:*", "samples_at_once", 3)
    world.pauses.refresh()
    monkeypatch.setattr(Store, "read", lambda *_: pytest.fail("a query"))
    monkeypatch.setattr(Accounts, "forget", lambda *_: pytest.fail("sessions are looked up again"))
    for _ in range(10):
        world.later(0.01)
    assert not world.pauses.is_active


def test_a_pass_counts_when_it_is_handed_over_and_not_if_it_fails(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", 15)
    world.pauses.refresh()
    first, second = a_pass(), a_pass(backward=False)
    for each in (first, second):
        assert not world.pauses.is_paused(each)
        world.pauses.hand_over(each)
    assert world.pauses.is_paused(a_pass()) and not world.pauses.is_paused(a_pass("bob"))
    assert not world.pauses.is_paused(queued(2, optim_step())) and not world.pauses.is_paused(a_sample())
    ((quota, reason),) = world.pauses.exhausted()
    assert quota.subject == Subject("owner", "ann")
    assert reason == "ann has used 20 of 15 training tokens of today, and goes on at 00:00 UTC"
    world.on_result(second, failed())
    assert not world.pauses.is_paused(a_pass())


def test_what_runs_counts_once_when_usage_is_read_again(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", 3 * PASS_TOKENS)
    world.pauses.refresh()
    done, running = a_pass(), a_pass()
    world.pauses.hand_over(done)
    world.pauses.hand_over(running)
    world.on_result(done, object())
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(61.0)
    assert world.num_waits == 2 and not world.pauses.is_paused(a_pass())
    world.pauses.hand_over(a_pass())
    assert world.pauses.is_paused(a_pass())


def test_what_other_engines_add_counts_after_five_seconds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "is_shared", True)
    put(world.store, "ann", "training_tokens_per_day", PASS_TOKENS)
    world.pauses.refresh()
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(4.9)
    assert not world.pauses.is_paused(a_pass())
    world.later(0.1)
    assert world.pauses.is_paused(a_pass())


def test_a_new_day_ends_the_pause(world: World) -> None:
    put(world.store, "*", "training_tokens_per_day", 5)
    world.pauses.refresh()
    world.pauses.hand_over(done := a_pass())
    world.on_result(done, object())
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(86_399.5 - 100)
    assert world.pauses.is_paused(a_pass())
    world.later(0.5)
    assert not world.pauses.is_paused(a_pass())


def test_a_higher_quota_ends_the_pause_within_a_second(world: World) -> None:
    put(world.store, "*", "training_tokens_per_day", 5)
    world.pauses.refresh()
    world.pauses.hand_over(a_pass())
    put(world.store, "ann", "training_tokens_per_day", 5_000)
    assert world.pauses.is_paused(a_pass())
    world.later(1.0)
    assert not world.pauses.is_paused(a_pass())


def test_samples_count_what_was_computed_and_drawn(world: World) -> None:
    put(world.store, "ann", "sample_tokens_per_day", 6)
    world.pauses.refresh()
    tokens = np.zeros(4, np.int32)
    output = SampleOutput(
        sequences=(SampledSequence(tokens=tokens, logprobs=tokens.astype(np.float32), stop_reason="stop"),),
        prompt=PromptResult(cache_hit_tokens=1),
    )
    world.on_result(a_sample(), output)  # 1 of the prompt and 4 new ones
    assert not world.pauses.is_paused(a_sample())
    world.on_result(a_sample(), output)
    assert world.pauses.is_paused(a_sample()) and not world.pauses.is_paused(a_pass())


def reason_to_fail(world: World, queued: QueuedRequest) -> str | None:
    try:
        world.pauses.check_start(queued)
    except UserError as error:
        return error.message
    return None


def test_beyond_a_quota_that_fails_no_request_waits(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", PASS_TOKENS, "fail")
    put(world.store, "ann", "sample_tokens_per_day", 1, "fail")
    world.pauses.refresh()
    first, second = a_pass(), a_pass()
    for each in (first, second):
        assert not world.pauses.is_paused(each)
        world.pauses.hand_over(each)
    reason = "training_tokens_per_day: ann has used 10 of 10 training tokens of today: send it after 00:00 UTC, or ask"
    assert reason_to_fail(world, first) is None
    assert (reason_to_fail(world, second) or "").startswith(reason)
    world.on_result(second, failed())
    assert world.pauses.exhausted()[0][1].startswith("ann has used 10 of 10 "), "what failed does not count"
    assert reason_to_fail(world, a_sample()) is None
    tokens = np.zeros(1, np.int32)
    sequence = SampledSequence(tokens=tokens, logprobs=tokens.astype(np.float32), stop_reason="stop")
    world.on_result(a_sample(), SampleOutput(sequences=(sequence,), prompt=PromptResult()))
    assert "sample_tokens_per_day: ann has used" in (reason_to_fail(world, a_sample()) or "")
    world.later(86_400.0)
    assert reason_to_fail(world, a_sample()) is None


def test_of_two_quotas_the_one_that_fails_decides(world: World) -> None:
    session = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY, project_id="math"))
    put(world.store, "ann", "training_tokens_per_day", 1)
    put(world.store, "project:*", "training_tokens_per_day", 15, "fail")
    world.pauses.refresh()
    world.pauses.hand_over(a_pass("ann", session))
    assert world.pauses.is_paused(a_pass("ann", session))
    put(world.store, "project:*", "training_tokens_per_day", 5, "fail")
    world.later(1.0)
    running = a_pass("ann", session)
    assert not world.pauses.is_paused(running)
    world.pauses.hand_over(running)
    assert "project math has used 10 of 5" in (reason_to_fail(world, running) or "")


def test_keys_and_projects_pause_their_sessions(world: World) -> None:
    made = world.store.write(
        lambda tx: [
            sessions.create(tx, owner="ann", now=DAY, key_id=4),
            sessions.create(tx, owner="ann", now=DAY, project_id="math"),
            sessions.create(tx, owner="bob", now=DAY, project_id="math"),
        ]
    )
    put(world.store, "key:4", "training_tokens_per_day", 1)
    put(world.store, "project:*", "training_tokens_per_day", 15)
    world.pauses.refresh()

    def paused() -> list[bool]:
        return [world.pauses.is_paused(a_pass("ann", session)) for session in made]

    world.pauses.hand_over(a_pass("ann", made[0]))
    assert paused() == [True, False, False]
    world.pauses.hand_over(a_pass("ann", made[1]))
    world.pauses.hand_over(a_pass("bob", made[2]))
    assert paused() == [True, True, True]
    world.store.write(lambda tx: sessions.set_project(tx, made[1], "other"))
    world.later(61.0)
    assert paused()[1] is False


def test_paused_passes_wait_while_saves_and_other_owners_go_on(harness: EngineHarness) -> None:
    harness.become("ann")
    ann, created = harness.create()
    harness.run(created)
    put(harness.api, "ann", "training_tokens_per_day", PASS_TOKENS)
    first = [
        harness.submit(forward_backward(), model_id=ann, seq_id=1),
        harness.submit(optim_step(), model_id=ann, seq_id=2),
    ]
    waiting = [
        harness.submit(forward_backward(), model_id=ann, seq_id=3),
        harness.submit(optim_step(), model_id=ann, seq_id=4),
    ]
    drawn = harness.submit(sample())
    harness.become("bob")
    bob, _ = harness.create()
    other = [harness.submit(forward_backward(), model_id=bob, seq_id=1 + number) for number in range(5)]
    harness.run(*first, *other, drawn)
    assert harness.api.read(lambda tx: futures.statuses(tx, waiting)) == {}
    harness.run(harness.submit(forward_backward(), model_id=bob, seq_id=6))  # the next engine knows from usage
    assert harness.api.read(lambda tx: futures.statuses(tx, waiting)) == {}
    put(harness.api, "ann", "training_tokens_per_day", None)
    harness.run(*waiting)
    assert harness.result(waiting[0]).metrics["num_tokens:sum"] == PASS_TOKENS


def test_passes_and_samples_beyond_a_quota_fail_and_leave_the_gradient_incomplete(harness: EngineHarness) -> None:
    harness.become("ann")
    model_id, created = harness.create()
    put(harness.api, "ann", "training_tokens_per_day", PASS_TOKENS, "fail")
    put(harness.api, "ann", "sample_tokens_per_day", 1, "fail")
    passes = [harness.submit(forward_backward(), model_id=model_id, seq_id=seq_id) for seq_id in (1, 2)]
    step = harness.submit(optim_step(), model_id=model_id, seq_id=3)
    drawn = [harness.submit(sample(max_tokens=4, eos_stops=False)) for _ in range(40)]
    harness.run(created, *passes, step, *drawn)
    assert not isinstance(harness.result(passes[0]), Failure)
    for failed_id, text in ((passes[1], "ann has used 10 of 10 training tokens"), (step, "the gradient is incomplete")):
        failure = harness.result(failed_id)
        assert isinstance(failure, Failure) and failure.category is ErrorCategory.USER and text in failure.message
    late = harness.submit(sample())
    harness.run(late)
    failures = [each for each in map(harness.result, [*drawn, late]) if isinstance(each, Failure)]
    assert 0 < len(failures) < 41 and failures[-1] == harness.result(late)
    assert all("sample_tokens_per_day: ann has used" in each.message for each in failures)


def test_results_are_those_of_a_server_without_quotas(harness: EngineHarness, tmp_path: Path) -> None:
    """A pause changes when a request runs, and no bit of its result."""

    def train(of: EngineHarness) -> list[object]:
        model_id, created = of.create()
        ids = [created]
        for step in range(3):
            ids.append(of.submit(forward_backward(seed=step), model_id=model_id, seq_id=2 * step + 1))
            ids.append(of.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2))
        if of is harness:
            put(of.api, "*", "training_tokens_per_day", PASS_TOKENS)
            of.run(*ids[:3])
            put(of.api, "*", "training_tokens_per_day", 10**9)
        of.run(*ids)
        return [of.result(each) for each in ids[1:]]

    calm = EngineHarness(tmp_path / "calm")
    try:
        for paused, expected in zip(train(harness), train(calm), strict=True):
            assert paused.metrics == expected.metrics
            for ours, theirs in zip(getattr(paused, "logprobs", ()), getattr(expected, "logprobs", ()), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    finally:
        calm.close()


def test_the_status_names_the_pause_and_the_oldest_request_is_another(harness: EngineHarness) -> None:
    harness.become("ann")
    model_id, created = harness.create()
    put(harness.api, "ann", "training_tokens_per_day", 1)
    first = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    waiting = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
    engine = threading.Thread(target=harness.run, args=(created, first, waiting))
    engine.start()

    def is_paused() -> bool:
        row = harness.api.read(engine_state.get)
        meters: Any = row and row.meters
        return bool(meters) and meters["queues"]["training"]["paused"] == 1 and row.pauses is not None

    try:
        until(is_paused)
        pauses = engine_state.pauses_of(harness.api.read(engine_state.get))
        found = [harness.api.read(lambda tx, p=each: totals.read(tx, time.time(), p)) for each in ((), pauses)]
    finally:
        put(harness.api, "ann", "training_tokens_per_day", None)
        engine.join()
    (pause,) = pauses
    assert (pause.quota_subject, pause.limit) == (Subject("owner", "ann"), "training_tokens_per_day")
    assert pause.reason == "ann has used 10 of 1 training tokens of today, and goes on at 00:00 UTC"
    assert [each.num_open for each in found] == [1, 1]
    assert found[0].oldest_at is not None and found[1].oldest_at is None


class Slots(FakeBackend):
    """Records the most samples of each owner that ran at once."""

    def __init__(self, harness: EngineHarness) -> None:
        super().__init__("tiny", harness.config.model_copy(update={"sample_slots": 8}))
        self.store = harness.api
        self.open: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.owners: dict[str, str] = {}

    def _owner(self, request_id: str) -> str:
        if request_id not in self.owners:
            rows = self.store.read(lambda tx: list(tx.exec(select(RequestRow))))
            self.owners = {row.request_id: row.owner for row in rows}
        return self.owners[request_id]

    def begin_sample(self, batch):
        for request in batch.requests:
            owner = self._owner(request.request_id)
            self.open[owner] += request.num_samples
            self.most[owner] = max(self.most[owner], self.open[owner])
        super().begin_sample(batch)

    def step_sample(self):
        deltas = super().step_sample()
        for delta in deltas:
            self.open[self._owner(delta.request_id)] -= delta.stop_reason is not None
        return deltas


def test_samples_at_once_bound_an_owner_and_no_other(harness: EngineHarness) -> None:
    put(harness.api, "ann", "samples_at_once", 3)
    ids = []
    for owner in ("ann", "bob"):
        harness.become(owner)
        long = sample(max_tokens=40, eos_stops=False)
        ids += [harness.submit(long) for _ in range(6)]
    harness.become("ann")
    many = sample(max_tokens=20, eos_stops=False)
    ids.append(harness.submit(type(many)(prompt=many.prompt, num_samples=7, sampler=None, params=many.params)))
    backend = Slots(harness)
    harness.run(*ids, backend=backend)
    assert backend.most["ann"] == 3 and backend.most["bob"] > 3
    assert len(harness.result(ids[-1]).sequences) == 7


class Passes(FakeBackend):
    """Records the most passes of each owner's models that ran at once."""

    def __init__(self, harness: EngineHarness, owners: dict[str, str]) -> None:
        super().__init__("tiny", harness.config.model_copy(update={"micro_batch_tokens": 16}))
        self.owners, self.running, self.most = owners, Counter[str](), Counter[str]()

    def begin_pass(self, batch, *, backward):
        started = Counter(self.owners[model_id] for model_id in {each.model_id for each in batch.examples})
        self.running += started
        self.most |= self.running
        return Ended(super().begin_pass(batch, backward=backward), lambda: self.running.subtract(started))


class Ended(Pass):
    """A pass that says when it has ended."""

    def __init__(self, inner: Pass, on_end: Callable[[], None]) -> None:
        self.inner, self.on_end = inner, on_end

    def step(self) -> bool:
        return self.inner.step()

    def results(self):
        self.on_end()
        return self.inner.results()

    def abort(self) -> None:
        self.on_end()
        self.inner.abort()


def test_training_steps_at_once_bound_an_owner_and_no_other(harness: EngineHarness) -> None:
    """Each owner has passes of three models, of several micro-batches; steps and saves of all models go on."""
    put(harness.api, "ann", "training_steps_at_once", 1)
    owners: dict[str, str] = {}
    ids: list[Any] = []
    data = (datum(length=16),) * 4
    for owner in ("ann", "bob"):
        harness.become(owner)
        for name in "abc":
            model_id, created = harness.create(name)
            owners[model_id] = owner
            ids.append(created)
            for seq_id in (1, 3):
                ids.append(harness.submit(forward_backward(data=data), model_id=model_id, seq_id=seq_id))
                ids.append(harness.submit(optim_step(), model_id=model_id, seq_id=seq_id + 1))
    backend = Passes(harness, owners)
    harness.run(*ids, backend=backend)
    assert backend.most["ann"] == 1 and backend.most["bob"] > 1
    assert not any(isinstance(harness.result(each), Failure) for each in ids)


def test_a_pass_that_waits_for_another_model_names_the_quota(harness: EngineHarness) -> None:
    view = QuotaView(harness.api)
    put(harness.api, "key:4", "training_steps_at_once", 2)
    view.refresh()
    session_id = harness.api.write(lambda tx: sessions.create(tx, owner="ann", now=DAY, key_id=4))
    room = Room("training_steps_at_once", view, Accounts(harness.api, view))
    running = a_pass(session=session_id)
    room.start_round([(running, 1)])
    assert room.of(running) == 1 and room.full() == []
    room.take(running, 1)
    assert room.of(running) == 0 and room.of(a_pass("bob")) > 0
    ((quota, reason),) = room.full()
    assert quota.subject == Subject("key", "4") and engine_state.Pause.of(quota, reason).concerns_training
    assert reason == "key 4 has 2 passes at once, as many as it may have"
