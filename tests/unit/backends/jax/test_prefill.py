"""Chunked prefill and the prefix cache, on fake programs.

The fake's log-probabilities depend on the chunk in which each key was computed, so equal bits mean
equal chunks.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import BLUE, RED, Results, begin, make_prompt, make_request, run

CONFIG = JaxConfig(sample_slots=8, decode_slice_tokens=4, prefill_tokens=64, prefill_chunk_tokens=32)
MEMORY = SampleMemory(num_slots=8, tokens=8 * 256, prefix_tokens=512, max_length=512, page=16)
NO_PREFIXES = replace(MEMORY, prefix_tokens=0)


@pytest.fixture
def programs() -> FakeModelRunner:
    return FakeModelRunner()


@pytest.fixture
def scheduler(programs: FakeModelRunner) -> SampleScheduler:
    return start(programs)


def start(programs: FakeModelRunner, memory: SampleMemory = MEMORY, config: JaxConfig = CONFIG) -> SampleScheduler:
    scheduler = SampleScheduler(programs, config, memory, ())
    scheduler.load(RED, 1)
    scheduler.load(BLUE, 2)
    return scheduler


def run_and_count(programs: FakeModelRunner, run_it: Callable[[], Results]) -> tuple[Results, int]:
    """Return the results and the number of computed prompt tokens, padding included."""
    before = programs.num_computed
    return run_it(), programs.num_computed - before


@pytest.mark.parametrize("adapter", [None, RED])
def test_prefix_cache_hits_save_prefill_and_change_no_bit(programs, adapter):
    prefix = make_prompt(96)
    prompts = {
        "first": np.concatenate([prefix, make_prompt(20, seed=1)]),
        "equal": np.concatenate([prefix, make_prompt(20, seed=1)]),
        "alike": np.concatenate([prefix, make_prompt(50, seed=2)]),
        "longer": np.concatenate([prefix, make_prompt(20, seed=1), make_prompt(9, seed=3)]),
        "part": prefix[:70],
        "other": make_prompt(80, seed=4),
    }
    requests = [make_request(name, prompt, sampler=adapter, max_tokens=6) for name, prompt in prompts.items()]
    without, sizes = {}, {}

    for request in requests:
        fresh = start(programs, NO_PREFIXES)
        without[request.request_id], sizes[request.request_id] = run_and_count(
            programs, lambda fresh=fresh, request=request: run(fresh, request)
        )

    assert all(results.cache_hits == {} for results in without.values())
    assert sizes == {"first": 128, "equal": 128, "alike": 160, "longer": 128, "part": 96, "other": 96}

    warm, hits = start(programs), {}
    for request in requests:
        results, sizes[request.request_id] = run_and_count(programs, lambda request=request: run(warm, request))
        assert results.bits == without[request.request_id].bits, request.request_id
        hits |= results.cache_hits

    assert hits == {"equal": 116, "alike": 96, "longer": 96, "part": 64}
    assert sizes == {"first": 128, "equal": 0, "alike": 64, "longer": 32, "part": 32, "other": 96}


def test_simultaneous_requests_of_one_prompt_compute_it_once(programs, scheduler):
    prompt = make_prompt(70)
    results = run(scheduler, *(make_request(f"r{i}", prompt, sampler=RED, seed=i) for i in range(16)))
    assert programs.num_computed == 96
    assert len(set(results.bits.values())) == 16 and results.ended == {(f"r{i}", 0) for i in range(16)}
    assert results.cache_hits == {f"r{i}": 70 for i in range(1, 16)}


@pytest.mark.parametrize("adapter", [None, RED])
def test_simultaneous_requests_of_one_short_prefix_compute_it_once(programs, adapter):
    prefix, config = make_prompt(140), CONFIG.model_copy(update={"prefill_chunk_tokens": 256})
    requests = [
        make_request(f"r{i}", np.concatenate([prefix, make_prompt(10 + i, seed=i)]), sampler=adapter, max_tokens=3)
        for i in range(16)
    ]
    memory = replace(MEMORY, prefix_tokens=1024)
    without = {}
    for request in requests[:3]:
        without |= run(start(programs, replace(memory, prefix_tokens=0), config), request).bits
    programs.extended.clear()
    results = run(start(programs, memory, config), *requests)

    assert results.cache_hits == {f"r{i}": 128 for i in range(1, 16)}
    assert programs.extended.count((0, 128)) == 1

    rest = [chunk for chunk in programs.extended if chunk != (0, 128)]
    assert len(rest) == 16 and all(start == 128 and padded in (32, 64) for start, padded in rest)
    assert {key: results.bits[key] for key in without} == without


def test_prefixes_belong_to_one_sampler_until_it_is_dropped(programs, scheduler):
    prompt = make_prompt(70)
    red, blue, base = (
        run_and_count(
            programs, lambda name=name, sampler=sampler: run(scheduler, make_request(name, prompt, sampler=sampler))
        )
        for name, sampler in (("red", RED), ("blue", BLUE), ("base", None))
    )
    assert len({*red[0].bits.values(), *blue[0].bits.values(), *base[0].bits.values()}) == 3
    assert red[1] == blue[1] == base[1] == 96
    scheduler.drop(RED)
    scheduler.load(RED, 3)
    again = run(scheduler, make_request("again", prompt, sampler=RED))
    assert again.cache_hits == {} and list(again.bits.values()) != list(red[0].bits.values())


def score(name: str, prompt: np.ndarray, *, sampler: SamplerId | None = RED, **options) -> SampleRequest:
    """Return a request as `compute_logprobs` sends it."""
    options = PromptOptions(**{"logprobs": True, **options})
    return make_request(name, prompt, sampler=sampler, max_tokens=1, options=options)


def get_scores(results: Results) -> dict[str, bytes]:
    """Return the bytes of the prompt log-probabilities of each request."""
    found = {name: results.prompt(name) for name, _ in results.parts}
    return {name: prompt.logprobs.tobytes() for name, prompt in found.items() if prompt is not None}


def score_alone(memory: SampleMemory, *requests: SampleRequest) -> dict[str, bytes]:
    """Return the prompt log-probabilities of requests that share nothing."""
    fresh = replace(memory, prefix_tokens=0)
    return {
        name: own
        for request in requests
        for name, own in get_scores(run(start(FakeModelRunner(), fresh), request)).items()
    }


@pytest.mark.parametrize("prompts_of_shard", [1, 4])
def test_a_group_of_scored_prompts_computes_its_prefix_once(prompts_of_shard):
    programs, prefix = FakeModelRunner(prompts_of_shard=prompts_of_shard), make_prompt(96)
    requests = [score(f"r{n}", np.concatenate([prefix, make_prompt(20 + n, seed=n)])) for n in range(16)]
    memory = replace(MEMORY, prefix_tokens=1024)
    results = run(start(programs, memory), *requests)

    assert results.cache_hits == {"r0": 0, **{f"r{n}": 96 for n in range(1, 16)}}
    assert sum(start < 96 for start, _ in programs.extended) == 3, "three chunks of 32 tokens"
    assert get_scores(results) == score_alone(memory, *requests)


def test_an_equal_scored_prompt_computes_nothing(programs, scheduler):
    first, again = (score(name, make_prompt(70)) for name in ("first", "again"))
    run(scheduler, first)
    results, num_computed = run_and_count(programs, lambda: run(scheduler, again))
    assert num_computed == 0 and results.cache_hits == {"again": 70}
    assert get_scores(results) == score_alone(MEMORY, again)


def test_a_scored_prompt_may_have_samples(programs, scheduler):
    """Its samples have the same bits after a hit. A preempted sample has no scores."""
    prompt, options = make_prompt(70), PromptOptions(logprobs=True)
    first, again = (make_request(name, prompt, samples=3, max_tokens=6, options=options) for name in ("first", "again"))
    results = run(scheduler, first, again)
    assert results.cache_hits == {"first": 0, "again": 70} and programs.num_computed == 96
    scores = get_scores(results)
    assert scores["first"] == scores["again"]
    for index in range(3):
        assert results.bits["first", index] == results.bits["again", index]


KINDS = {
    "none": {"logprobs": False},
    "logprobs": {},
    "topk": {"topk": 2},
    "last_n": {"last_n": 20},
    "later": {"last_n": 10},
    "targets": {"target_tokens": np.zeros((69, 2), np.int64)},
    "alternatives": {"alt_tokens_k": 2},
}
"""Options of requests that need different data of each chunk. Targets and alternatives belong to one request."""


def test_prompts_share_scores_of_their_own_kind_only(programs, scheduler):
    prompt, kinds = make_prompt(70), KINDS
    first = run(scheduler, *(score(kind, prompt, **options) for kind, options in kinds.items()))
    assert not any(first.cache_hits.values()) and programs.num_computed == len(kinds) * 96
    again = run(scheduler, *(score(f"{kind} again", prompt, **options) for kind, options in kinds.items()))
    hits = {kind: again.cache_hits[f"{kind} again"] for kind in kinds}
    assert hits == {**dict.fromkeys(kinds, 70), "targets": 0, "alternatives": 0}
    assert run(scheduler, score("likeliest", prompt, topk=1)).cache_hits == {"likeliest": 70}, "K is in no program"


def test_scores_belong_to_one_sampler_and_scope(programs, scheduler):
    prompt = make_prompt(70)
    requests = [
        *(score(f"{sampler}", prompt, sampler=sampler) for sampler in (RED, BLUE, None)),
        replace(score("scope", prompt), cache_scope="ann"),
    ]
    results = run(scheduler, *requests)
    assert not any(results.cache_hits.values()) and programs.num_computed == 4 * 96
    assert len(set(get_scores(results).values())) == 3, "each sampler has its own"
    scheduler.drop(RED)
    scheduler.load(RED, 3)
    again = run(scheduler, score("again", prompt))
    assert again.cache_hits == {"again": 0} and get_scores(again)["again"] not in get_scores(results).values()


def test_evicted_scores_are_computed_again(programs):
    """The cache holds one prompt of 112 tokens."""
    memory = replace(MEMORY, prefix_tokens=128)
    scheduler, prompts = start(programs, memory), [make_prompt(100, seed=seed) for seed in range(2)]
    requests = [score(f"{n}", prompts[n % 2]) for n in range(4)]
    for request in requests:
        results = run(scheduler, request)
        assert results.cache_hits == {request.request_id: 0}
        assert get_scores(results) == score_alone(memory, request)
    assert run(scheduler, score("last", prompts[1])).cache_hits == {"last": 100}
    assert scheduler.meters().prefix_cache_tokens == 112


def test_a_long_prompt_is_computed_between_the_slices_of_running_samples(programs, scheduler):
    running, long = (
        make_request("running", make_prompt(9), max_tokens=40),
        make_request("long", make_prompt(240, seed=1), max_tokens=2),
    )
    alone = {request.request_id: run(start(FakeModelRunner()), request).bits for request in (running, long)}
    results = Results()
    begin(scheduler, running)
    results.add(scheduler.step())
    before = programs.num_computed
    begin(scheduler, long)
    num_steps = 0

    while ("long", 0) not in results.ended:
        earlier = programs.num_computed
        deltas = scheduler.step()
        num_steps += 1
        assert programs.num_computed - earlier <= CONFIG.prefill_tokens
        assert any(delta.request_id == "running" and delta.tokens.size == 4 for delta in deltas)
        results.add(deltas)

    assert num_steps == 4 and programs.num_computed - before == 256

    while deltas := scheduler.step():
        results.add(deltas)
    bits = {key: pair for key, pair in results.bits.items() if pair != (b"", b"")}

    assert bits == alone["running"] | alone["long"]


def test_short_prompts_pass_a_long_one_that_progresses_in_every_step(scheduler):
    results = Results()
    long = make_request("long", make_prompt(250), max_tokens=2)
    begin(scheduler, long, *(make_request(f"s{i}", make_prompt(20, seed=i), max_tokens=2) for i in range(12)))
    first_step: dict[str, int] = {}
    step = 0

    while deltas := scheduler.step():
        results.add(deltas)
        for delta in deltas:
            if delta.tokens.size:
                first_step.setdefault(delta.request_id, step)
        step += 1

    assert results.ended == {("long", 0), *((f"s{i}", 0) for i in range(12))}
    assert first_step["long"] == 6, "64 tokens, then half of 64 while others wait"
    assert sum(first_step[f"s{i}"] < first_step["long"] for i in range(12)) >= 5
    assert max(first_step.values()) <= 9


def test_a_step_that_only_computes_prefill_reports_an_empty_delta(scheduler):
    begin(scheduler, make_request("long", make_prompt(200), sampler=RED, max_tokens=2))
    (delta,) = scheduler.step()
    assert (delta.request_id, delta.tokens.size, delta.stop_reason, delta.prompt) == ("long", 0, None, None)
    scheduler.cancel([RequestId("long")])
    assert scheduler.step() == []
    scheduler.drop(RED)


def test_a_failed_chunk_ends_its_request_alone(programs, scheduler):
    good = make_request("good", make_prompt(30))
    expected = run(scheduler, good).bits
    programs.fail_extend = True  # from the second chunk on
    results = run(scheduler, make_request("bad", make_prompt(200, seed=1)), good, into=Results(may_fail=True))
    assert results.errors == {"bad": "the server could not compute the prompt; its log has the error under request bad"}
    assert {key: bits for key, bits in results.bits.items() if key[0] == "good"} == expected


def test_a_device_that_fails_in_a_chunk_ends_several_hosts(programs, scheduler, monkeypatch):
    """The other hosts wait for this one in that chunk, so it must not begin another program.

    Any other error occurs on all hosts.
    """
    monkeypatch.setattr(devices, "is_distributed", lambda: True)
    programs.fail_extend = True
    assert run(scheduler, make_request("bad", make_prompt(200)), into=Results(may_fail=True)).errors.keys() == {"bad"}

    def extend(*_: object, **__: object) -> None:
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(programs, "prefill", extend)
    begin(scheduler, make_request("exhausted", make_prompt(200)))
    with pytest.raises(BackendLost, match="other hosts may wait for it: RESOURCE_EXHAUSTED"):
        scheduler.step()


def test_prompts_and_samples_share_the_pages(programs):
    """There are pages for the longest prompt and seven more, so requests wait for each other."""
    memory = SampleMemory(num_slots=8, tokens=256, prefix_tokens=64, max_length=256, page=32)
    scheduler = start(programs, memory, CONFIG.model_copy(update={"prefill_tokens": 32}))
    requests = [
        make_request(name, make_prompt(size, seed=size), samples=samples, max_tokens=max_tokens)
        for name, size, samples, max_tokens in (
            ("many", 20, 12, 9),
            ("long", 240, 2, 9),
            ("score", 250, 1, 1),
            ("long too", 200, 1, 9),
            ("score too", 230, 1, 1),
            ("short", 30, 1, 9),
            ("short score", 31, 1, 1),
        )
    ]
    results = run(scheduler, *requests)

    for request in requests:
        for index in range(request.num_samples):
            assert len(results.tokens[request.request_id, index]) == request.params.max_tokens
    assert scheduler.meters().kv_cache_tokens_used == 0


def test_a_hit_copies_at_most_one_page(programs):
    """Both prompts share six pages.

    Each sample copies the partly filled last page of its prompt.
    """
    scheduler, prefix = start(programs), make_prompt(96)
    first = make_request("first", np.concatenate([prefix, make_prompt(20, seed=1)]), max_tokens=2)
    alike = make_request("alike", np.concatenate([prefix, make_prompt(30, seed=2)]), max_tokens=2)
    for request, cleared, copied in ((first, 8, 1), (alike, 2, 1), (replace(alike, request_id=RequestId("b")), 0, 1)):
        programs.copied.clear()
        run(scheduler, request)
        sources = [source for source, _ in programs.copied]
        assert (sources.count(0), len(sources) - sources.count(0)) == (cleared, copied), request.request_id
    assert scheduler.meters().prefix_cache_tokens == (8 + 2) * 16


def test_a_hit_may_be_evicted_while_it_is_used(programs):
    """There are pages for little more than one prompt.

    The second prompt begins with pages of the first.
    """
    memory = SampleMemory(num_slots=2, tokens=256, prefix_tokens=256, max_length=256, page=32)
    scheduler, prefix = start(programs, replace(memory, prefix_tokens=224)), make_prompt(192)
    first = make_request("first", np.concatenate([prefix, make_prompt(20, seed=1)]))
    alike = make_request("alike", np.concatenate([prefix, make_prompt(30, seed=2)]), samples=2)
    assert run_and_count(programs, lambda: run(scheduler, first))[1] == 224
    other = make_request("other", make_prompt(200, seed=3), max_tokens=40)
    begin(scheduler, other)
    results = run(scheduler, alike)
    assert len(results.ended) == 3
    fresh = start(FakeModelRunner(), replace(memory, prefix_tokens=0))
    expected = run(fresh, alike).bits | run(fresh, other).bits
    assert results.bits == expected


def test_short_prompts_are_computed_together_and_each_is_as_alone():
    programs = FakeModelRunner(prompts_of_shard=4)
    requests = [make_request(f"{n}", make_prompt(8 + n, seed=n), samples=2, max_tokens=9) for n in range(6)]
    found = run(start(programs), *requests)
    assert programs.together == [4, 2], "64 tokens are the budget of a step, and the first four have 38"
    for request in requests:
        alone = run(start(FakeModelRunner()), request)
        assert {key: found.bits[key] for key in alone.bits} == alone.bits


def test_a_prompt_waits_for_another_whose_beginning_it_shares():
    """The first of four prompts that share 32 tokens is computed with another prompt.

    The other three follow together.
    """
    programs, prefix = FakeModelRunner(prompts_of_shard=4), make_prompt(32)
    sharing = [np.concatenate([prefix, make_prompt(n, seed=n)]) for n in (5, 6, 7, 8)]
    scheduler = start(programs, config=CONFIG.model_copy(update={"prefill_tokens": 256}))
    run(scheduler, *(make_request(f"{n}", prompt, max_tokens=4) for n, prompt in enumerate([make_prompt(9), *sharing])))
    assert programs.together == [2, 1, 3], "the first two, the rest of the second, and what three have after 32 tokens"


@pytest.mark.parametrize("seed", range(8))
def test_prompts_together_take_no_more_than_there_is(seed):
    """With few pages, prompts give the same samples together as one after another."""
    draw = np.random.default_rng(seed)
    memory = replace(MEMORY, tokens=400, prefix_tokens=int(draw.choice([0, 64])), max_length=200)
    requests = [
        make_request(
            f"{n}",
            make_prompt(int(draw.integers(1, 120)), seed=int(draw.integers(9))),
            samples=int(draw.integers(1, 5)),
            max_tokens=int(draw.integers(1, 60)),
        )
        for n in range(20)
    ]
    programs = FakeModelRunner(prompts_of_shard=4)
    config = CONFIG.model_copy(update={"prefill_tokens": 256})
    found, alone = (run(start(runner, memory, config), *requests) for runner in (programs, FakeModelRunner()))

    assert found.tokens == alone.tokens and max(programs.together) > 1
