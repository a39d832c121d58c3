"""Quotas in the engine: which requests wait or fail, for how long, and the messages."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_tx.apps.teams import quotas, usage
from skyrl_tx.apps.teams.admission import QuotaAdmission
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import Failure
from skyrl_tx.engine.extension import START, Fail, Wait
from skyrl_tx.engine.metrics import SampledTokenCounts
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.store import audit, engine_state, futures, sessions, totals
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause, collect_pauses
from skyrl_tx.store.tables import OverQuota, QuotaRow
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample
from tests.support.polling import until
from tests.unit.engine.test_schedule import make_request

DAY = 20_000 * 86_400.0
PASS_TOKENS = 10
"""Number of tokens in `forward_backward()`."""
SAMPLE_TOKENS = 8
"""Most tokens of a sample request: two of the prompt, and `max_tokens` 6."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[EngineHarness]:
    made = EngineHarness(tmp_path)
    yield made
    made.close()


def put(store: Store, subject: str, name: str, value: int | None, over: OverQuota = "wait") -> None:
    about = Subject.parse(subject)
    store.write(lambda tx: quotas.put(tx, about, name, value, audit.OPERATOR, time.time(), over=over))


class World:
    """Admission control with a clock and results that the test controls."""

    def __init__(self, store: Store) -> None:
        self.store, self.now, self.num_waits = store, DAY + 100.0, 0
        self.admission = QuotaAdmission(store, self.wait_for_commits, clock=lambda: self.now)

    def wait_for_commits(self) -> None:
        """Replace the log of requests."""
        self.num_waits += 1

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.admission.refresh()

    def waits(self, request: QueuedRequest) -> bool:
        return isinstance(self.admission.may_start(request), Wait)

    def start(self, request: QueuedRequest) -> QueuedRequest:
        """Check that a request may start, and record its start."""
        assert self.admission.may_start(request) == START
        num_tokens = request.num_tokens or SAMPLE_TOKENS
        self.admission.record_start(request, num_tokens)
        return request

    def end(self, request: QueuedRequest, sampled: int, cached: int = 0) -> None:
        """Record what a sample request with a prompt of two tokens has drawn."""
        self.admission.record_drawn(request, SampledTokenCounts(prompt=2 - cached, cached=cached, sampled=sampled))


@pytest.fixture
def world(harness: EngineHarness) -> World:
    return World(harness.api)


def make_failure() -> Failure:
    return Failure(message="no", category=ErrorCategory.USER)


def a_pass(owner: str = "ann", session: str | None = None, backward: bool = True) -> QueuedRequest:
    return make_request(1, forward_backward(backward=backward), owner=owner, session=session or owner)


def a_sample(owner: str = "ann") -> QueuedRequest:
    return make_request(None, sample(), model_id=None, owner=owner, session=owner)


def test_without_quotas_no_request_is_paused(world: World) -> None:
    world.admission.refresh()
    assert world.admission.may_start(a_pass()) == world.admission.may_start(a_sample()) == START
    assert not world.admission.is_counting_usage and not world.admission.list_pauses() and world.num_waits == 0


def test_quotas_of_other_kinds_are_no_work_for_each_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    put(world.store, "key:*", "models_in_training", 3)
    world.admission.refresh()
    monkeypatch.setattr(Store, "read", lambda *_: pytest.fail("a query"))
    for request in (a_pass(), a_sample()):
        assert world.admission.may_start(request) == START
    assert not world.admission.is_counting_usage


def test_a_pass_counts_when_it_starts_and_not_if_it_fails(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", 15)
    world.admission.refresh()
    world.start(a_pass())
    second = world.start(a_pass(backward=False))
    reason = "ann has used 20 of today's 15 training tokens; requests resume at 00:00 UTC"
    assert world.admission.may_start(a_pass()) == Wait(reason)
    for other in (a_pass("bob"), make_request(2, optim_step()), a_sample()):
        assert world.admission.may_start(other) == START
    about = {"subject_kind": "owner", "subject": "ann", "limit": "training_tokens_per_day"}
    assert world.admission.list_pauses() == [Pause(**about, reason=reason)]
    world.admission.record_end(second, make_failure())
    assert not world.waits(a_pass())


def test_what_runs_counts_once_when_usage_is_read_again(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", 3 * PASS_TOKENS)
    world.admission.refresh()
    done = world.start(a_pass())
    world.start(a_pass())
    world.admission.record_end(done, object())
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(61.0)
    assert world.num_waits == 2 and not world.waits(a_pass())
    world.start(a_pass())
    assert world.waits(a_pass())


def test_what_other_engines_add_counts_after_five_seconds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.store, "is_shared", True)
    put(world.store, "ann", "training_tokens_per_day", PASS_TOKENS)
    world.admission.refresh()
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(4.9)
    assert not world.waits(a_pass())
    world.later(0.1)
    assert world.waits(a_pass())


def test_a_new_day_ends_the_pause(world: World) -> None:
    put(world.store, "*", "training_tokens_per_day", 5)
    world.admission.refresh()
    done = world.start(a_pass())
    world.admission.record_end(done, object())
    work = Work(kind="training", tokens=PASS_TOKENS)
    session_id = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY))
    world.store.write(lambda tx: usage.add(tx, "ann", session_id, "m", world.now, (work,)))
    world.later(86_399.5 - 100)
    assert world.waits(a_pass())
    world.later(0.5)
    assert not world.waits(a_pass())


def test_a_higher_quota_ends_the_pause_within_a_second(world: World) -> None:
    put(world.store, "*", "training_tokens_per_day", 5)
    world.admission.refresh()
    world.start(a_pass())
    put(world.store, "ann", "training_tokens_per_day", 5_000)
    assert world.waits(a_pass())
    world.later(1.0)
    assert not world.waits(a_pass())


def test_samples_count_what_was_computed_and_drawn(world: World) -> None:
    put(world.store, "ann", "sample_tokens_per_day", 6)
    world.admission.refresh()
    world.end(a_sample(), sampled=4, cached=1)  # 1 prompt token and 4 new tokens
    assert not world.waits(a_sample())
    world.end(a_sample(), sampled=4, cached=1)
    assert world.waits(a_sample()) and not world.waits(a_pass())


@pytest.mark.parametrize("over", ["wait", "fail"])
def test_a_sample_is_charged_with_its_most_tokens_until_it_ends(world: World, over: OverQuota) -> None:
    put(world.store, "ann", "sample_tokens_per_day", 2 * SAMPLE_TOKENS, over)
    world.admission.refresh()
    first, second = world.start(a_sample()), world.start(a_sample())
    reason = "the running requests of ann may use up today's sample tokens"
    assert world.admission.may_start(a_sample()) == Wait(reason) and world.admission.list_pauses() == []
    world.later(61.0)
    assert world.waits(a_sample()), "usage was read again"

    # It settles its charge when it ends or fails.
    world.end(first, sampled=1)
    world.start(first)
    world.admission.record_start(first, SAMPLE_TOKENS)  # it was put back: it is charged once
    assert world.waits(a_sample())
    world.admission.record_end(first, make_failure())
    world.end(second, sampled=1)
    third = world.start(a_sample())
    assert not world.waits(a_sample())
    world.end(third, sampled=9)
    assert world.admission.may_start(a_sample()) != START and not world.waits(a_sample("bob"))
    assert len(world.admission.list_pauses()) == 1


def reason_to_fail(world: World, queued: QueuedRequest) -> str | None:
    decision = world.admission.may_start(queued)
    return decision.reason if isinstance(decision, Fail) else None


def test_beyond_a_quota_that_fails_no_request_waits(world: World) -> None:
    put(world.store, "ann", "training_tokens_per_day", PASS_TOKENS, "fail")
    put(world.store, "ann", "sample_tokens_per_day", 1, "fail")
    world.admission.refresh()
    world.start(a_pass())
    second = a_pass()
    reason = "training_tokens_per_day: ann has used 10 of today's 10 training tokens: retry after 00:00 UTC, or ask"
    assert (reason_to_fail(world, second) or "").startswith(reason)
    world.admission.record_end(second, make_failure())
    assert (reason_to_fail(world, a_pass()) or "").startswith(reason), "what failed does not count"
    assert reason_to_fail(world, a_sample()) is None
    world.end(a_sample(), sampled=1)
    assert "sample_tokens_per_day: ann has used" in (reason_to_fail(world, a_sample()) or "")
    world.later(86_400.0)
    assert reason_to_fail(world, a_sample()) is None


def test_of_two_quotas_the_one_that_fails_decides(world: World) -> None:
    session = world.store.write(lambda tx: sessions.create(tx, owner="ann", now=DAY, project_id="math"))
    put(world.store, "ann", "training_tokens_per_day", 1)
    put(world.store, "project:*", "training_tokens_per_day", 15, "fail")
    world.admission.refresh()
    world.start(a_pass("ann", session))
    assert world.waits(a_pass("ann", session))
    put(world.store, "project:*", "training_tokens_per_day", 5, "fail")
    world.later(1.0)
    assert "project math has used 10 of today's 5" in (reason_to_fail(world, a_pass("ann", session)) or "")


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
    world.admission.refresh()

    def check_waits() -> list[bool]:
        return [world.waits(a_pass("ann", session)) for session in made]

    world.start(a_pass("ann", made[0]))
    assert check_waits() == [True, False, False]
    world.start(a_pass("ann", made[1]))
    world.start(a_pass("bob", made[2]))
    assert check_waits() == [True, True, True]
    world.store.write(lambda tx: sessions.set_project(tx, made[1], "other"))
    world.later(61.0)
    assert check_waits()[1] is False


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
    assert harness.api.read(lambda tx: futures.get_outcomes(tx, waiting)) == {}

    harness.run(harness.submit(forward_backward(), model_id=bob, seq_id=6))  # the next engine reads this from usage
    assert harness.api.read(lambda tx: futures.get_outcomes(tx, waiting)) == {}

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

    for failed_id, text in (
        (passes[1], "ann has used 10 of today's 10 training tokens"),
        (step, "the gradient is incomplete"),
    ):
        failure = harness.result(failed_id)
        assert isinstance(failure, Failure) and failure.category is ErrorCategory.USER and text in failure.message

    late = harness.submit(sample())
    harness.run(late)
    failures = [result for result in map(harness.result, [*drawn, late]) if isinstance(result, Failure)]
    assert 0 < len(failures) < 41 and failures[-1] == harness.result(late)
    assert all("sample_tokens_per_day: ann has used" in failure.message for failure in failures)


def test_results_are_those_of_a_server_without_quotas(harness: EngineHarness, tmp_path: Path) -> None:
    """A pause changes when a request runs, but not a single bit of its result."""

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
        return [of.result(request_id) for request_id in ids[1:]]

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
        pauses = collect_pauses(harness.api.read(engine_state.get))
        found = [
            harness.api.read(lambda tx, p=known_pauses: totals.read_totals(tx, time.time(), p))
            for known_pauses in ((), pauses)
        ]
    finally:
        put(harness.api, "ann", "training_tokens_per_day", None)
        engine.join()
    (pause,) = pauses
    assert (pause.subject_kind, pause.subject, pause.limit) == ("owner", "ann", "training_tokens_per_day")
    assert pause.reason == "ann has used 10 of today's 1 training tokens; requests resume at 00:00 UTC"
    assert [total.num_open for total in found] == [1, 1]
    assert found[0].oldest_at is not None and found[1].oldest_at is None


def test_new_models_and_checkpoints_beyond_a_quota_fail(harness: EngineHarness) -> None:
    """The quota is set while an engine runs.

    The engine applies it within about a second, without a restart.
    """
    harness.become("ann")
    model_id, created = harness.create("first")
    save = harness.submit(SaveWeights(kind="weights", name="one"), model_id=model_id, seq_id=1)
    harness.run(created, save)
    put(harness.api, "ann", "models_in_training", 1)
    put(harness.api, "ann", "checkpoint_bytes", 1)
    late = harness.submit(SaveWeights(kind="weights", name="two"), model_id=model_id, seq_id=2)
    uncreated, refused = harness.create("second")
    following = harness.submit(forward_backward(), model_id=uncreated, seq_id=1)
    harness.become("bob")
    _, other = harness.create("first")
    harness.run(late, refused, following, other)

    for request_id, text in (
        (late, "checkpoint_bytes: the checkpoints of ann take "),
        (refused, f"models_in_training: ann has 1 models in training, and the quota is 1: unload one of {model_id}"),
        (following, uncreated),
    ):
        failure = harness.result(request_id)
        assert isinstance(failure, Failure) and failure.category is ErrorCategory.USER and text in failure.message

    assert not isinstance(harness.result(other), Failure)


def test_quotas_of_dropped_limits_are_named_once_and_have_no_effect(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(tx) -> None:
        for subject, name in (("ann", "samples_at_once"), ("bob", "training_steps_at_once")):
            tx.add(QuotaRow(subject_kind="owner", subject=subject, name=name, value=1))

    world.store.write(fill)
    with caplog.at_level(logging.WARNING):
        admission = QuotaAdmission(world.store, world.wait_for_commits)
        for _ in range(3):
            admission.refresh()
    (message,) = (record.message for record in caplog.records)
    assert "samples_at_once of ann, training_steps_at_once of bob" in message and "no longer exist" in message
    assert admission.may_start(a_sample()) == admission.may_start(a_pass("bob")) == START
    assert not admission.is_counting_usage
