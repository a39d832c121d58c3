"""The host logic of the scheduler on fake programs: every sample depends on its own request alone.

The fake draws each token from all tokens before it, so wrong pages, positions or adapters give
other tokens.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample import shard as shard_module
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import BackendLost, CapacityError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import BLUE, RED, Results, begin, make_prompt, make_request, run
from tests.support.watched_samples import FEW, LONGEST, Watch, short

EOS = 1
CONFIG = JaxConfig(sample_slots=16, decode_slice_tokens=4, prefill_tokens=96, prefill_chunk_tokens=256)
MEMORY = SampleMemory(num_slots=16, tokens=16 * 160, prefix_tokens=640, max_length=512, page=16)


def start(
    config: JaxConfig = CONFIG,
    memory: SampleMemory = MEMORY,
    eos: tuple[int, ...] = (EOS,),
    *,
    runs_ahead: bool = False,
    prefers_few_rows: bool = False,
) -> SampleScheduler:
    programs = FakeModelRunner(runs_ahead=runs_ahead, prefers_few_rows=prefers_few_rows)
    scheduler = SampleScheduler(programs, config, memory, eos)
    scheduler.load(RED, 1)
    scheduler.load(BLUE, 2)
    return scheduler


@pytest.fixture(params=["waits", "runs_ahead", "prefers_few_rows"])
def scheduler(request) -> SampleScheduler:
    return start() if request.param == "waits" else start(**{request.param: True})


def test_requests_that_arrive_during_the_first_prefill_join_its_first_slice():
    scheduler = start()

    def step() -> dict[str, int]:
        new: dict[str, int] = defaultdict(int)
        for delta in scheduler.step():
            new[delta.request_id] += delta.tokens.size
        return new

    def queue(name: str) -> None:
        begin(scheduler, make_request(name, make_prompt(9), max_tokens=6))

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


def test_on_a_cpu_a_short_sample_does_not_wait_for_a_slice_of_long_ones():
    scheduler = start(prefers_few_rows=True)

    begin(scheduler, make_request("long", make_prompt(9), max_tokens=30))
    scheduler.step()
    scheduler.step()

    # The long sample is in every second slice, although each round has a short sample.
    for name, expected in [("a", {"a"}), ("b", {"b", "long"}), ("c", {"c"}), ("d", {"d", "long"})]:
        begin(scheduler, make_request(name, make_prompt(9), max_tokens=5))
        deltas = scheduler.step()
        assert {delta.request_id for delta in deltas} == expected
        assert [delta.request_id for delta in deltas if delta.stop_reason is not None] == [name]
    assert scheduler._programs.decoded == [4] * 5


def test_a_slice_is_dispatched_before_the_last_one_is_read_unless_a_prompt_waits():
    scheduler = start(runs_ahead=True)
    programs = scheduler._programs

    def step() -> tuple[dict[str, int], int]:
        """Return the new tokens of each request, and the number of dispatched slices."""
        new, before = dict[str, int](), len(programs.decoded)
        for delta in scheduler.step():
            new[delta.request_id] = new.get(delta.request_id, 0) + delta.tokens.size
        return new, len(programs.decoded) - before

    begin(scheduler, make_request("first", make_prompt(9), max_tokens=14))
    assert step() == ({"first": 1}, 0)
    assert step() == ({"first": 0}, 1)
    assert step() == ({"first": 4}, 1)
    begin(scheduler, make_request("second", make_prompt(9), max_tokens=4))
    assert step() == ({"first": 4, "second": 1}, 1), "both are in the slice that was dispatched"
    assert step() == ({"first": 4, "second": 3}, 1)
    assert step() == ({"first": 1}, 0)
    assert step() == ({}, 0)


def test_what_was_dispatched_for_samples_that_ended_counts_for_nothing():
    """A cancelled sample and one with a stop token are in a slice that is not read.

    Other samples take their pages.
    """
    scheduler = start(runs_ahead=True)
    free = run(scheduler, make_request("free", make_prompt(9), max_tokens=40)).tokens["free", 0]
    stop = next(token for token in free[5:] if token not in free[:5])
    stopped = make_request("stopped", make_prompt(9), max_tokens=40, stop_token_ids=(stop,))

    begin(
        scheduler,
        stopped,
        make_request("cancelled", make_prompt(20), max_tokens=40),
        make_request("goes on", make_prompt(30)),
    )
    results = Results()
    for _ in range(3):
        results.add(scheduler.step())

    scheduler.cancel([RequestId("cancelled")])
    later = make_request("later", make_prompt(50, seed=3), samples=14, max_tokens=30)
    run(scheduler, later, into=results)

    assert results.tokens["stopped", 0] == free[: free.index(stop) + 1]
    assert scheduler.meters().decode_slots_used == 0

    alone = run(start(), later, make_request("goes on", make_prompt(30)))
    assert {key: results.bits[key] for key in alone.bits} == alone.bits


@pytest.mark.parametrize("adapter", [None, RED])
def test_batch_invariance(scheduler, adapter):
    """A sample is the same alone and among samples of other requests and adapters."""
    request = make_request("mine", make_prompt(9), sampler=adapter, samples=3, max_tokens=20)
    alone, results = run(scheduler, request), Results()
    begin(
        scheduler,
        make_request("base", make_prompt(33, seed=1), max_tokens=30),
        make_request("red", make_prompt(6, seed=2), sampler=RED, samples=4, top_k=3),
        make_request("blue", make_prompt(70, seed=3), sampler=BLUE, samples=2, options=PromptOptions(sample_topk=2)),
    )
    results.add(scheduler.step())
    run(scheduler, request, into=results)
    assert {key: results.bits[key] for key in alone.bits} == alone.bits


def test_samples_beyond_the_slots_wait_for_a_free_slot(scheduler):
    request = make_request("many", make_prompt(9), samples=19, max_tokens=6)
    results = run(scheduler, request)
    assert all(len(tokens) == 6 for tokens in results.tokens.values()) and len(results.tokens) == 19
    assert len({tuple(tokens) for tokens in results.tokens.values()}) == 19
    few = run(scheduler, replace(request, num_samples=2))
    assert few.tokens["many", 1] == results.tokens["many", 1]


def test_a_stop_token_ends_a_sample_and_is_its_last_token(scheduler):
    free = run(scheduler, make_request("free", make_prompt(9), max_tokens=20)).tokens["free", 0]
    stop = next(token for token in free[5:] if token not in free[:5])
    cut = run(scheduler, make_request("cut", make_prompt(9), max_tokens=20, stop_token_ids=(stop, 999))).sequence("cut")
    assert (cut.tokens.tolist(), cut.stop_reason) == (free[: free.index(stop) + 1], "stop")
    first = run(scheduler, make_request("first", make_prompt(9), stop_token_ids=(free[0],))).sequence("first")
    assert (first.tokens.tolist(), first.stop_reason) == (free[:1], "stop")


def test_eos_ends_a_sample_only_if_the_request_says_so(scheduler):
    free = run(scheduler, make_request("free", make_prompt(9))).tokens["free", 0]
    eos = next(token for token in free[2:] if token not in free[:2])
    results = run(
        start(eos=(eos,)),
        make_request("stops", make_prompt(9), eos_stops=True, stop_token_ids=(999,)),
        make_request("continues", make_prompt(9)),
    )
    assert results.sequence("stops").tokens.tolist() == free[: free.index(eos) + 1]
    assert results.tokens["continues", 0] == free and len(free) == 12


def test_a_cancelled_request_ends_in_any_state_and_others_are_unchanged(scheduler):
    keep = make_request("keep", make_prompt(9), samples=2)
    alone, results = run(scheduler, keep), Results()
    gone = [
        make_request("running", make_prompt(20), samples=9, sampler=RED),
        make_request("half in slots", make_prompt(20), samples=9),
        make_request("queued", make_prompt(5)),
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


def test_an_ended_sample_frees_its_slot_for_the_next_step():
    scheduler = start()
    request = make_request("many", make_prompt(9), samples=20, max_tokens=60)  # four wait for a slot
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
    request = make_request("red", make_prompt(9), sampler=RED)
    before = run(scheduler, request)
    with pytest.raises(CapacityError):
        scheduler.load(SamplerId("third"), 3)
    blue = run(scheduler, make_request("other", make_prompt(9), sampler=BLUE))
    scheduler.drop(BLUE)
    scheduler.drop(BLUE)
    scheduler.load(SamplerId("third"), 3)
    results = run(scheduler, request, make_request("other", make_prompt(9), sampler=SamplerId("third")))
    assert results.tokens["red", 0] == before.tokens["red", 0]
    assert results.tokens["other", 0] != blue.tokens["other", 0]


def test_a_sampler_in_use_cannot_be_dropped(scheduler):
    begin(scheduler, make_request("red", make_prompt(9), sampler=RED))
    for _ in range(2):
        with pytest.raises(AssertionError, match="in use"):
            scheduler.drop(RED)
        scheduler.step()


def test_a_batch_with_a_request_that_never_fits_is_refused_as_a_whole(scheduler):
    good, bad = make_request("good", make_prompt(9)), make_request("bad", make_prompt(90), max_tokens=423)
    with pytest.raises(UserError, match=r"90 tokens\) and max_tokens \(423\) need 513 positions, more than the 512"):
        begin(scheduler, good, bad)
    assert scheduler.step() == []


def test_sample_topk_has_a_row_for_every_token(scheduler):
    results = run(scheduler, make_request("topk", make_prompt(9), options=PromptOptions(sample_topk=2)))
    topk = [part.topk for part in results.parts["topk", 0] if part.tokens.size]
    token_ids, logprobs = (
        np.concatenate([entry.token_ids for entry in topk]),
        np.concatenate([entry.logprobs for entry in topk]),
    )
    sequence = results.sequence("topk")
    assert token_ids.shape == logprobs.shape == (12, 2)
    assert (token_ids == sequence.tokens[:, None] + np.arange(2)).all()
    assert (logprobs[:, 0] == sequence.logprobs).all() and (logprobs[:, 1] < logprobs[:, 0]).all()


def test_scores_need_no_slot_and_pass_waiting_samples(scheduler):
    begin(scheduler, make_request("long", make_prompt(9), samples=20, max_tokens=60))
    scheduler.step()
    begin(scheduler, make_request("score", make_prompt(30), max_tokens=1, options=PromptOptions(logprobs=True)))
    (delta,) = [delta for delta in scheduler.step() if delta.request_id == "score"]
    assert delta.stop_reason == "length" and delta.tokens.size == 1
    assert delta.prompt is not None and delta.prompt.logprobs is not None and delta.prompt.logprobs.size == 30


def test_a_request_in_parts_draws_the_samples_of_the_whole():
    programs = FakeModelRunner()
    scheduler = SampleScheduler(programs, CONFIG, MEMORY, ())
    scheduler.load(RED, 1)
    request = make_request("a", make_prompt(40), sampler=RED, samples=20, max_tokens=9)
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
    programs = FakeModelRunner()
    scheduler = SampleScheduler(programs, CONFIG, replace(MEMORY, prefix_tokens=0), ())
    request = make_request("a", make_prompt(40), samples=3)
    for index in range(3):
        begin(scheduler, replace(request, first_index=index, num_samples=1))
    assert len(run(scheduler).ended) == 3 and programs.extended == [(0, 64)]


# Pages of the cache


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_short_samples_do_not_wait_for_samples_that_may_become_long(watch):
    watch.begin(short("a", 25), short("b", 50), short("unbounded", LONGEST - 5))
    watch.step()
    assert len(watch.results.parts) == 3
    watch.begin(short("short", 9))
    assert watch.steps_until(("short", 0)) == 2
    while ("unbounded", 0) not in watch.ended_at:
        name = f"short {watch.num_steps}"
        watch.begin(short(name, 5))
        assert watch.steps_until((name, 0)) == 1
    watch.run()
    assert len(watch.results.tokens["unbounded", 0]) == LONGEST - 5


def test_the_samples_of_a_request_have_its_prompt_once(watch):
    """A prompt of 67 tokens has nine pages.

    Only the last is copied for each sample, so 16 of 48 pages are used.
    """
    watch.begin(short("many", 3, size=67, samples=8))
    while len(watch.results.parts) < 8:
        watch.step()
    watch.programs.copied.clear()
    used = {watch.scheduler.meters().kv_cache_tokens_used for _ in range(2) if watch.step()}
    assert used <= {8 * 16, 0}
    watch.run()
    assert len(watch.ended_at) == 8


def test_preempted_samples_draw_the_tokens_they_would_draw_undisturbed(watch):
    request = short("many", 90, samples=8)  # each sample grows to twelve pages
    watch.run(request)
    assert len(set(watch.ended_at.values())) >= 3, "some waited"
    ample = Watch(replace(FEW, tokens=8 * LONGEST)).run(request)
    assert len(set(ample.ended_at.values())) == 1
    assert watch.results.tokens == ample.results.tokens
    assert all(len(tokens) == 90 for tokens in watch.results.tokens.values()) and len(watch.results.tokens) == 8


def test_the_sample_with_the_fewest_tokens_is_preempted(watch):
    watch.begin(*(short(f"{number}", 100) for number in range(3)))
    for _ in range(8):
        watch.step()
    watch.begin(*(short(f"late {number}", 100) for number in range(3)))
    while not watch.preempted:
        assert watch.step()
    assert {name[:4] for name, _ in watch.preempted} == {"late"}
    watch.run()
    assert len(watch.ended_at) == 6


def test_cached_prefixes_give_way_before_a_sample_is_preempted(watch):
    """Two samples of maximum length and all cached prefixes would need more than 48 pages."""
    for number in range(3):
        watch.run(short(f"prompt {number}", 2, size=40 + number))
    assert watch.scheduler.meters().prefix_cache_tokens == 48, "of three prompts of 48 positions one may be cached"
    requests = [short(f"long {number}", LONGEST - 5) for number in range(3)]
    watch.begin(*requests)
    while watch.step():
        assert not watch.preempted
    assert watch.scheduler.meters().prefix_cache_tokens == 0
    assert watch.run(short("again", 2, size=42)).results.cache_hits == {"long 1": 5, "long 2": 5}


def test_a_sample_begins_when_there_are_pages_for_some_slices_of_those_that_run(watch):
    """Running samples hold 40 of 48 pages, and each needs one more page within four slices."""
    watch.begin(*(short(f"{number}", 123) for number in range(3)))
    for _ in range(26):
        watch.step()
    watch.begin(short("late", 20, size=50))
    late: list[int] = []
    while ("late", 0) not in watch.ended_at:
        assert watch.step() and not watch.preempted
        late.append(len(watch.results.parts.get(("late", 0), ())))
    assert late[0] == 0, "it waited"
    watch.run()


def test_samples_begin_in_order_of_arrival(watch):
    watch.begin(*(short(f"first {number}", 30) for number in range(7)))
    watch.step()
    watch.begin(short("long", 20, size=60), short("short", 20))
    while ("long", 0) not in watch.results.parts:
        assert watch.step() and ("short", 0) not in watch.results.parts
    watch.run()
    assert len(watch.ended_at) == 9


def test_preempted_samples_can_be_ended_and_cancelled(watch):
    watch.begin(short("many", 90, samples=8), short("other", 90, size=6))
    while not watch.preempted:
        assert watch.step()
    ended = watch.preempted[0]
    watch.scheduler.end(RequestId(ended[0]), ended[1])
    watch.steps_until(*(key for key in [("many", index) for index in range(8)] if key != ended))
    assert ended not in watch.ended_at
    watch.begin(short("again", 90, samples=8))
    while not any(name == "again" for name, _ in watch.preempted):
        assert watch.step()
    watch.scheduler.cancel([RequestId("again"), RequestId("other"), RequestId("many")])
    assert not watch.step()
    assert watch.scheduler.meters().kv_cache_tokens_used == 0


def test_a_partly_computed_prompt_waits_again_when_samples_need_its_pages(monkeypatch):
    """A later part of the request arrives in between and joins it.

    The prompt needs twelve of the 20 pages.
    """
    monkeypatch.setattr(shard_module, "SPARE_SLICES", 0)
    watch = Watch(replace(FEW, num_slots=4, tokens=LONGEST, prefix_tokens=0), prefill_tokens=32)
    watch.begin(short("grow", 60, samples=3))
    watch.step()
    watch.step()
    long = short("long", 3, size=96)
    watch.begin(long)
    watch.step()
    watch.begin(replace(long, first_index=1, num_samples=2))
    watch.run()
    starts = [start for start, _ in watch.programs.extended]
    assert starts.count(0) > 2 and starts.count(64) == 1, "its first chunk was computed again, for all parts"

    expected = Watch(replace(FEW, tokens=16 * LONGEST)).run(replace(long, num_samples=3)).results
    assert {key: bits for key, bits in watch.results.bits.items() if key[0] == "long"} == expected.bits


def test_a_scored_prompt_waits_again_when_a_sample_cannot_begin():
    """There are 26 pages. Each prompt takes 13, so none is left for the sample."""
    watch = Watch(replace(FEW, num_slots=2, tokens=LONGEST), prefill_tokens=32)
    watch.begin(short("sample", 3, size=100))
    watch.step()
    scores = make_request("scores", make_prompt(104, seed=1), max_tokens=1, options=PromptOptions(logprobs=True))
    watch.run(scores)
    starts = [start for start, _ in watch.programs.extended]
    assert starts.count(0) == 3 and len(watch.ended_at) == 2


@pytest.mark.parametrize(("seed", "shards"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 3)])
def test_any_mix_of_requests_ends_with_the_bits_of_each_alone(seed, shards):
    """Random requests arrive, end early and are cancelled. The cache cannot hold all of them."""
    draw, watch = np.random.default_rng(seed), Watch(replace(FEW, num_slots=5, tokens=LONGEST, shards=shards))
    prompts = [make_prompt(120, seed=seed) for seed in range(3)]
    requests: list[SampleRequest] = []
    gone: set[str] = set()

    for number in range(40):
        size = int(draw.integers(1, 120))
        request = make_request(
            f"{number}",
            prompts[draw.integers(3)][:size],
            samples=int(draw.integers(1, 4)),
            max_tokens=int(draw.integers(1, LONGEST - size + 1)),
            options=PromptOptions(logprobs=bool(draw.random() < 0.2)),
        )
        requests.append(request)
        watch.begin(request)

        for _ in range(draw.integers(4)):
            watch.step()
        if draw.random() < 0.2:
            gone.add(requests[draw.integers(len(requests))].request_id)
            watch.scheduler.cancel([RequestId(name) for name in gone])

    watch.run()
    for request in requests:
        if request.request_id not in gone:
            alone = Watch(replace(FEW, num_slots=5, tokens=16 * LONGEST, prefix_tokens=0)).run(request).results
            assert {key: watch.results.bits[key] for key in alone.bits} == alone.bits
            if request.options.logprobs:
                own, expected = (results.prompt(request.request_id).logprobs for results in (watch.results, alone))
                np.testing.assert_array_equal(own, expected)
    watch.scheduler.drop(None)

    assert watch.scheduler.meters().prefix_cache_tokens == 0


def test_a_lost_cache_loses_the_backend(watch, monkeypatch):
    watch.begin(short("long", 90))
    watch.step()

    def fail(*given, **named) -> None:
        raise BackendLost("the cache is gone")

    monkeypatch.setattr(watch.programs, "prefill", fail)
    with pytest.raises(BackendLost, match="the cache is gone"):
        watch.run(short("other", 9, size=6))
