"""The scheduler's host logic on fake programs: every sample depends on its own request alone.

The fake draws a token from all tokens before it, so wrong keys, slots, positions or adapters give other tokens.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import KVLayout, SampleMemory
from skyrl_tx.contract.batches import STARVATION_BOUND, SampleRequest
from skyrl_tx.contract.errors import BackendLost, CapacityError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions
from tests.support.fake_programs import FakePrograms
from tests.support.sample_requests import BLUE, RED, Results, ask, begin, prompt_of, run

EOS = 1
CONFIG = JaxConfig(sample_slots=16, decode_slice_tokens=4, prefill_tokens=96)
MEMORY = SampleMemory(num_slots=16, tokens=16 * 160, prompt_tokens=2048, prefix_tokens=640, max_length=512)


def start(config: JaxConfig = CONFIG, memory: SampleMemory = MEMORY, eos: tuple[int, ...] = (EOS,)) -> SampleScheduler:
    scheduler = SampleScheduler(FakePrograms(), config, memory, eos)
    scheduler.load(RED, 1)
    scheduler.load(BLUE, 2)
    return scheduler


@pytest.fixture
def scheduler() -> SampleScheduler:
    return start()


def test_requests_that_arrive_during_the_first_prefill_join_its_first_slice(scheduler):
    def step() -> dict[str, int]:
        new: dict[str, int] = defaultdict(int)
        for delta in scheduler.step():
            new[delta.request_id] += delta.tokens.size
        return new

    def queue(name: str) -> None:
        begin(scheduler, ask(name, prompt_of(9), max_tokens=6))

    queue("first")
    assert step() == {"first": 1}
    queue("second")
    assert step() == {"first": 4, "second": 5}
    queue("third")
    assert step() == {"first": 1, "second": 1, "third": 5}
    assert step() == {"third": 1}
    assert step() == {}
    queue("alone")
    assert [step(), step(), step()] == [{"alone": 1}, {"alone": 4}, {"alone": 1}]


@pytest.mark.parametrize("adapter", [None, RED])
def test_batch_invariance(scheduler, adapter):
    """A sample is the same alone and among samples of other requests and adapters."""
    request = ask("mine", prompt_of(9), sampler=adapter, samples=3, max_tokens=20)
    alone, results = run(scheduler, request), Results()
    begin(
        scheduler,
        ask("base", prompt_of(33, seed=1), max_tokens=30),
        ask("red", prompt_of(6, seed=2), sampler=RED, samples=4, top_k=3),
        ask("blue", prompt_of(70, seed=3), sampler=BLUE, samples=2, options=PromptOptions(sample_topk=2)),
    )
    results.add(scheduler.step())
    run(scheduler, request, into=results)
    assert {key: results.bits[key] for key in alone.bits} == alone.bits


def test_samples_beyond_the_slots_wait_for_a_free_slot(scheduler):
    request = ask("many", prompt_of(9), samples=19, max_tokens=6)
    results = run(scheduler, request)
    assert all(len(tokens) == 6 for tokens in results.tokens.values()) and len(results.tokens) == 19
    assert len({tuple(tokens) for tokens in results.tokens.values()}) == 19
    few = run(scheduler, replace(request, num_samples=2))
    assert few.tokens["many", 1] == results.tokens["many", 1]


def test_a_stop_token_ends_a_sample_and_is_its_last_token(scheduler):
    free = run(scheduler, ask("free", prompt_of(9), max_tokens=20)).tokens["free", 0]
    stop = next(token for token in free[5:] if token not in free[:5])
    cut = run(scheduler, ask("cut", prompt_of(9), max_tokens=20, stop_token_ids=(stop, 999))).sequence("cut")
    assert (cut.tokens.tolist(), cut.stop_reason) == (free[: free.index(stop) + 1], "stop")
    first = run(scheduler, ask("first", prompt_of(9), stop_token_ids=(free[0],))).sequence("first")
    assert (first.tokens.tolist(), first.stop_reason) == (free[:1], "stop")


def test_eos_ends_a_sample_only_if_the_request_says_so(scheduler):
    free = run(scheduler, ask("free", prompt_of(9))).tokens["free", 0]
    eos = next(token for token in free[2:] if token not in free[:2])
    results = run(
        start(eos=(eos,)),
        ask("stops", prompt_of(9), eos_stops=True, stop_token_ids=(999,)),
        ask("continues", prompt_of(9)),
    )
    assert results.sequence("stops").tokens.tolist() == free[: free.index(eos) + 1]
    assert results.tokens["continues", 0] == free and len(free) == 12


def test_a_cancelled_request_ends_in_any_state_and_others_are_unchanged(scheduler):
    keep = ask("keep", prompt_of(9), samples=2)
    alone, results = run(scheduler, keep), Results()
    gone = [
        ask("running", prompt_of(20), samples=9, sampler=RED),
        ask("half in slots", prompt_of(20), samples=9),
        ask("queued", prompt_of(5)),
    ]
    begin(scheduler, keep, *gone)
    results.add(scheduler.step())
    scheduler.cancel([request.request_id for request in gone])
    before = set(results.parts)
    while deltas := scheduler.step():
        assert {delta.request_id for delta in deltas} == {"keep"}
        results.add(deltas)
    assert ("running", 8) in before and ("half in slots", 8) in before and ("queued", 0) not in before
    assert {key: bits for key, bits in results.bits.items() if key[0] == "keep"} == alone.bits
    scheduler.drop(RED)  # its requests are gone


def test_an_ended_sample_frees_its_slot_for_the_next_step(scheduler):
    request = ask("many", prompt_of(9), samples=20, max_tokens=60)  # four wait for a slot
    alone, results = run(scheduler, request), Results()
    begin(scheduler, request)
    results.add(scheduler.step())
    for index in (0, 3, 15, 19, 19, 99):
        scheduler.end(RequestId("many"), index)
    deltas = scheduler.step()
    assert {delta.index for delta in deltas} == set(range(19)) - {0, 3, 15}, "16, 17 and 18 took the free slots"
    results.add(deltas)
    while deltas := scheduler.step():
        results.add(deltas)
    assert all(results.tokens["many", index] == alone.tokens["many", index] for index in (1, 16, 18))


def test_an_adapter_slot_is_used_again_after_a_drop(scheduler):
    request = ask("red", prompt_of(9), sampler=RED)
    before = run(scheduler, request)
    with pytest.raises(CapacityError):
        scheduler.load(SamplerId("third"), 3)
    blue = run(scheduler, ask("other", prompt_of(9), sampler=BLUE))
    scheduler.drop(BLUE)
    scheduler.drop(BLUE)
    scheduler.load(SamplerId("third"), 3)
    results = run(scheduler, request, ask("other", prompt_of(9), sampler=SamplerId("third")))
    assert results.tokens["red", 0] == before.tokens["red", 0]
    assert results.tokens["other", 0] != blue.tokens["other", 0]


def test_a_sampler_in_use_cannot_be_dropped(scheduler):
    begin(scheduler, ask("red", prompt_of(9), sampler=RED))
    for _ in range(2):
        with pytest.raises(AssertionError, match="in use"):
            scheduler.drop(RED)
        scheduler.step()


def test_a_batch_with_a_request_that_never_fits_is_refused_as_a_whole(scheduler):
    good, bad = ask("good", prompt_of(9)), ask("bad", prompt_of(90), max_tokens=423)
    with pytest.raises(UserError, match="90 tokens and max_tokens 423 make 513, more than the 512"):
        begin(scheduler, good, bad)
    assert scheduler.step() == []


def test_a_request_longer_than_a_slot_reallocates_the_cache_with_longer_slots():
    programs = FakePrograms()
    scheduler = SampleScheduler(programs, CONFIG, MEMORY, ())
    before, after = ask("before", prompt_of(9)), ask("after", prompt_of(9))
    long = ask("long", prompt_of(150, seed=1), samples=9, temperature=0.0, max_tokens=14)
    results = run(scheduler, before, long, after)
    assert KVLayout(8, 320) in programs.layouts
    assert results.tokens["before", 0] == results.tokens["after", 0]
    assert len({tuple(results.tokens["long", index]) for index in range(9)}) == 1
    alone = run(start(), replace(long, num_samples=1))
    assert results.tokens["long", 8] == alone.tokens["long", 0]


def test_sample_topk_has_a_row_for_every_token(scheduler):
    results = run(scheduler, ask("topk", prompt_of(9), options=PromptOptions(sample_topk=2)))
    topk = [part.topk for part in results.parts["topk", 0]]
    token_ids, logprobs = (
        np.concatenate([each.token_ids for each in topk]),
        np.concatenate([each.logprobs for each in topk]),
    )
    sequence = results.sequence("topk")
    assert token_ids.shape == logprobs.shape == (12, 2)
    assert (token_ids == sequence.tokens[:, None] + np.arange(2)).all()
    assert (logprobs[:, 0] == sequence.logprobs).all() and (logprobs[:, 1] < logprobs[:, 0]).all()


def test_scores_need_no_slot_and_pass_waiting_samples(scheduler):
    begin(scheduler, ask("long", prompt_of(9), samples=20, max_tokens=60))
    scheduler.step()
    begin(scheduler, ask("score", prompt_of(30), max_tokens=1, options=PromptOptions(logprobs=True)))
    (delta,) = [delta for delta in scheduler.step() if delta.request_id == "score"]
    assert delta.stop_reason == "length" and delta.tokens.size == 1
    assert delta.prompt is not None and delta.prompt.logprobs is not None and delta.prompt.logprobs.size == 30


def test_a_request_in_parts_draws_the_samples_of_the_whole():
    programs = FakePrograms()
    scheduler = SampleScheduler(programs, CONFIG, MEMORY, ())
    scheduler.load(RED, 1)
    request = ask("a", prompt_of(40), sampler=RED, samples=20, max_tokens=9)
    whole, parts = run(scheduler, request), Results()
    programs.extended.clear()
    for first, end in ((0, 1), (1, 3), (3, 12), (12, 18), (18, 19), (19, 20)):
        begin(scheduler, replace(request, first_index=first, num_samples=end - first))
        if first < 18:
            parts.add(scheduler.step())
    run(scheduler, into=parts)
    assert parts.bits == whole.bits
    assert programs.extended == [], "every part used the cached prompt"


def test_parts_that_wait_together_are_prefilled_once():
    programs = FakePrograms()
    scheduler = SampleScheduler(programs, CONFIG, replace(MEMORY, prefix_tokens=0), ())
    request = ask("a", prompt_of(40), samples=3)
    for index in range(3):
        begin(scheduler, replace(request, first_index=index, num_samples=1))
    assert len(run(scheduler).ended) == 3 and programs.extended == [(0, 64)]


# Layouts of the KV cache

LONGEST = 128
SHORT_SLOTS = JaxConfig(sample_slots=8, decode_slice_tokens=4, prefill_chunk_tokens=32)
SHORT_MEMORY = SampleMemory(num_slots=8, tokens=8 * 32, prompt_tokens=512, prefix_tokens=64, max_length=LONGEST)
LAYOUTS = KVLayout(8, 32), KVLayout(4, 64), KVLayout(2, 128)


class Watch:
    """Steps a scheduler and records when each sample ends and which samples were preempted."""

    def __init__(self, tokens: int = SHORT_MEMORY.tokens) -> None:
        self.programs = FakePrograms()
        memory = replace(SHORT_MEMORY, tokens=tokens)
        self.scheduler = SampleScheduler(self.programs, SHORT_SLOTS, memory, ())
        self.results = Results()
        self.num_steps = 0
        self.ended_at: dict[tuple[str, int], int] = {}
        self.preempted: list[tuple[str, int]] = []
        """The samples that got no token in the last step, though they had some and have not ended."""

    @property
    def layout(self) -> KVLayout:
        return self.programs.layouts[-1]

    def begin(self, *requests: SampleRequest) -> None:
        begin(self.scheduler, *requests)

    def step(self) -> bool:
        deltas = self.scheduler.step()
        self.num_steps += 1
        progressed = {(delta.request_id, delta.index) for delta in deltas if delta.tokens.size}
        running = set(self.results.parts) - self.results.ended
        self.preempted = sorted(running - progressed)
        self.results.add(deltas)
        for key in self.results.ended - self.ended_at.keys():
            self.ended_at[key] = self.num_steps
        return bool(deltas)

    def run(self, *requests: SampleRequest) -> "Watch":
        self.begin(*requests)
        while self.step():
            pass
        return self

    def steps_until(self, *keys: tuple[str, int]) -> int:
        """Step until these samples have ended and return the number of steps."""
        started = self.num_steps
        while not self.ended_at.keys() >= set(keys):
            assert self.step()
        return self.num_steps - started


@pytest.fixture
def watch() -> Watch:
    return Watch()


def short(name: str, max_tokens: int, *, size: int = 5, samples: int = 1) -> SampleRequest:
    return ask(name, prompt_of(size, seed=size), max_tokens=max_tokens, samples=samples)


def test_short_samples_do_not_wait_for_samples_that_may_become_long(watch):
    watch.begin(short("a", 25), short("b", 50), short("unbounded", LONGEST - 5))
    watch.step()
    assert watch.layout == LAYOUTS[0] and len(watch.results.parts) == 3
    watch.begin(short("short", 9))
    assert watch.steps_until(("short", 0)) == 2
    seen = {watch.layout}
    watch.steps_until(("a", 0))
    while ("unbounded", 0) not in watch.ended_at:
        name = f"short {watch.num_steps}"
        watch.begin(short(name, 5))
        assert watch.steps_until((name, 0)) == 1
        seen.add(watch.layout)
    assert seen == set(LAYOUTS)
    watch.run()
    assert len(watch.results.tokens["unbounded", 0]) == LONGEST - 5


def test_reallocated_and_preempted_samples_draw_the_tokens_they_would_draw_undisturbed(watch):
    request = short("many", 90, samples=8)  # eight reach the end of their slots at the same time
    watch.run(request)
    assert len(set(watch.ended_at.values())) >= 3, "some waited"
    ample = Watch(tokens=8 * LONGEST).run(request)
    assert ample.layout == KVLayout(8, LONGEST) and len(set(ample.ended_at.values())) == 1
    assert watch.results.tokens == ample.results.tokens
    assert all(len(tokens) == 90 for tokens in watch.results.tokens.values()) and len(watch.results.tokens) == 8


def test_preempted_samples_evict_no_prompt_from_the_prefix_cache(watch):
    watch.run(short("many", 90, samples=8))
    assert watch.run(short("again", 2)).results.cache_hits == {"again": 5}


def test_a_long_sample_is_passed_up_to_the_starvation_bound(watch):
    watch.begin(*(short(f"first {number}", 4 + 3 * number) for number in range(8)))
    watch.step()
    watch.begin(short("long", 20, size=100))
    queued: list[str] = []
    while ("long", 0) not in watch.results.parts:
        waiting = [name for name in queued if (name, 0) not in watch.results.parts]
        for _ in range(7 - len(waiting)):
            queued.append(f"next {len(queued)}")
            watch.begin(short(queued[-1], 20))
        watch.step()
    passed = [key for key in watch.results.parts if key[0].startswith("next")]
    assert STARVATION_BOUND - 8 <= len(passed) <= STARVATION_BOUND
    watch.run()
    assert len(watch.ended_at) == 8 + 1 + len(queued)
    assert len(watch.results.tokens["long", 0]) == 20


def test_slots_are_short_again_after_long_samples_have_ended(watch):
    watch.begin(short("long", 10, size=64))
    watch.step()
    assert watch.layout == LAYOUTS[2]
    watch.begin(*(short(f"short {number}", 12) for number in range(9)))
    watch.steps_until(("long", 0))
    watch.step()
    watch.step()
    assert watch.layout == LAYOUTS[0]
    watch.run()
    assert len(watch.ended_at) == 10


def test_preempted_samples_can_be_ended_and_cancelled(watch):
    watch.begin(short("many", 90, samples=8), short("other", 90, size=6))
    while not watch.preempted:
        assert watch.step()
    ended = watch.preempted[0]
    assert len(watch.preempted) > 1
    watch.scheduler.end(RequestId(ended[0]), ended[1])
    watch.steps_until(*(key for key in [("many", index) for index in range(8)] if key != ended))
    assert ended not in watch.ended_at
    watch.begin(short("again", 90, samples=8))
    while not any(name == "again" for name, _ in watch.preempted):
        assert watch.step()
    watch.scheduler.cancel([RequestId("again"), RequestId("other"), RequestId("many")])
    assert not watch.step()


def test_a_failed_reallocation_loses_the_backend(watch, monkeypatch):
    watch.begin(short("long", 90))
    watch.step()

    def fail(layout: KVLayout) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(watch.programs, "allocate_cache", fail)
    with pytest.raises(BackendLost, match="no memory"):
        watch.run()
