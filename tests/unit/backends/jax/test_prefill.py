"""Prompts in chunks, beside running samples, and again from what was computed before."""

from collections import Counter

import numpy as np
import pytest

from skyrl_tx.backends.jax import prefill
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.prefill import Prefiller
from skyrl_tx.backends.jax.sampler import Sampler
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams

CONFIG = JaxConfig(
    sample_slots=8,
    max_sample_tokens=8 * 256,
    decode_slice_tokens=4,
    prefill_tokens=64,
    prefill_chunk_tokens=32,
    max_sampler_adapters=2,
    max_lora_rank=4,
)
RED, BLUE = SamplerId("red"), SamplerId("blue")


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 256, length, dtype=np.int32)


def ask(name: str, prompt: np.ndarray, *, sampler=None, num_samples=1, max_tokens=6, seed=3, **options):
    return SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=prompt,
        num_samples=num_samples,
        params=SamplingParams(seed=seed, max_tokens=max_tokens, eos_stops=False),
        options=PromptOptions(**options),
    )


@pytest.fixture
def make(tiny):
    def sampler(**changed) -> Sampler:
        made = Sampler(tiny.params, tiny.config, CONFIG.model_copy(update=changed), [])
        made.load(RED, tiny.adapter(1))
        made.load(BLUE, tiny.adapter(2))
        return made

    return sampler


@pytest.fixture
def computed(monkeypatch) -> Counter:
    """How many tokens were computed for each request, padding included."""
    counts: Counter = Counter()
    real = Prefiller.advance

    def advance(self, under_way):
        size = real(self, under_way)
        counts[under_way.request.request_id] += size
        return size

    monkeypatch.setattr(prefill.Prefiller, "advance", advance)
    return counts


class Heard:
    """Tokens and logprobs by request and index, and what was said of the prompts."""

    def __init__(self) -> None:
        self.bits: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self.spared: dict[str, int] = {}
        self.ended: set[str] = set()

    def add(self, deltas) -> None:
        for delta in deltas:
            assert delta.error is None
            key = (str(delta.request_id), delta.index)
            tokens, logprobs = self.bits.get(key, (b"", b""))
            self.bits[key] = (tokens + delta.tokens.tobytes(), logprobs + delta.logprobs.tobytes())
            if delta.prompt is not None:
                self.spared[key[0]] = delta.prompt.cache_hit_tokens
            if delta.stop_reason is not None:
                self.ended.add(key[0])


def run(sampler: Sampler, *requests: SampleRequest) -> Heard:
    heard = Heard()
    sampler.begin(PreparedSampleBatch(requests=requests))
    while deltas := sampler.step():
        heard.add(deltas)
    return heard


@pytest.mark.parametrize("adapter", [None, RED])
def test_hits_are_told_spare_work_and_change_no_bit(make, computed, adapter):
    prefix = prompt_of(96)
    prompts = {
        "first": np.concatenate([prefix, prompt_of(20, seed=1)]),
        "equal": np.concatenate([prefix, prompt_of(20, seed=1)]),
        "alike": np.concatenate([prefix, prompt_of(50, seed=2)]),
        "longer": np.concatenate([prefix, prompt_of(20, seed=1), prompt_of(9, seed=3)]),
        "part": prefix[:70],
        "other": prompt_of(80, seed=4),
    }
    requests = [ask(name, prompt, sampler=adapter) for name, prompt in prompts.items()]
    fresh = {request.request_id: run(make(prefix_cache_tokens=0), request) for request in requests}
    assert all(heard.spared == {} for heard in fresh.values())
    assert computed == {"first": 128, "equal": 128, "alike": 160, "longer": 128, "part": 96, "other": 96}
    computed.clear()
    warm = make()
    for request in requests:
        heard = run(warm, request)
        assert heard.bits == fresh[request.request_id].bits, request.request_id
        expected = {"equal": 116, "alike": 96, "longer": 96, "part": 64}.get(request.request_id)
        assert heard.spared.get(request.request_id) == expected
    assert computed == {"first": 128, "alike": 64, "longer": 32, "part": 32, "other": 96}


def test_sixteen_requests_of_one_prompt_compute_it_once(make, computed):
    prompt = prompt_of(70)
    heard = run(make(), *(ask(f"r{i}", prompt, sampler=RED, seed=i) for i in range(16)))
    assert computed == {"r0": 96}
    assert len(set(heard.bits.values())) == 16 and heard.ended == {f"r{i}" for i in range(16)}
    assert heard.spared == {f"r{i}": 70 for i in range(1, 16)}


@pytest.mark.parametrize("adapter", [None, RED])
def test_sixteen_requests_of_one_short_prefix_compute_it_once(make, computed, adapter):
    prefix = prompt_of(140)
    requests = [
        ask(f"r{i}", np.concatenate([prefix, prompt_of(10 + i, seed=i)]), sampler=adapter, max_tokens=3)
        for i in range(16)
    ]
    fresh = {}
    for request in requests[:3]:
        fresh |= run(make(prefill_chunk_tokens=256, prefix_cache_tokens=0), request).bits
    computed.clear()
    heard = run(make(prefill_chunk_tokens=256, prefix_cache_tokens=1024), *requests)
    assert heard.spared == {f"r{i}": 128 for i in range(1, 16)}
    assert computed["r0"] == 128 + 32 and all(computed[f"r{i}"] in (32, 64) for i in range(1, 16))
    assert {key: heard.bits[key] for key in fresh} == fresh


def test_each_sampler_has_prompts_of_its_own_until_it_goes(tiny, make, computed):
    sampler, prompt = make(), prompt_of(70)
    red = run(sampler, ask("red", prompt, sampler=RED))
    blue = run(sampler, ask("blue", prompt, sampler=BLUE))
    base = run(sampler, ask("base", prompt))
    assert len({*red.bits.values(), *blue.bits.values(), *base.bits.values()}) == 3
    assert computed == {"red": 96, "blue": 96, "base": 96}
    sampler.drop(RED)
    sampler.load(RED, tiny.adapter(3))
    again = run(sampler, ask("again", prompt, sampler=RED))
    assert again.spared == {} and list(again.bits.values()) != list(red.bits.values())


def test_what_is_asked_of_a_prompt_is_computed_from_its_start(make, computed):
    sampler, prompt = make(), prompt_of(70)
    run(sampler, ask("first", prompt))
    heard = run(sampler, ask("score", prompt, max_tokens=1, logprobs=True), ask("both", prompt, logprobs=True))
    assert heard.spared == {"score": 0, "both": 0}
    assert computed == {"first": 96, "score": 96, "both": 96}


def test_a_long_prompt_comes_in_chunks_between_the_tokens_of_others(make, computed):
    sampler, running = make(), ask("running", prompt_of(9), max_tokens=40)
    long = ask("long", prompt_of(240, seed=1), max_tokens=2)
    alone = {name: run(make(), each).bits for name, each in (("running", running), ("long", long))}
    heard = Heard()
    sampler.begin(PreparedSampleBatch(requests=(running,)))
    heard.add(sampler.step())
    computed.clear()
    sampler.begin(PreparedSampleBatch(requests=(long,)))
    steps = 0
    while "long" not in heard.ended:
        before = sum(computed.values())
        deltas = sampler.step()
        steps += 1
        assert sum(computed.values()) - before <= CONFIG.prefill_tokens
        assert any(delta.request_id == "running" and delta.tokens.size == 4 for delta in deltas)
        heard.add(deltas)
    assert steps == 4 and computed["long"] == 256
    while deltas := sampler.step():
        heard.add(deltas)
    assert heard.bits == alone["running"] | alone["long"]


def test_short_prompts_pass_a_long_one_which_still_comes_to_its_turn(make, computed):
    sampler, heard = make(), Heard()
    long = ask("long", prompt_of(250), max_tokens=2)
    shorts = [ask(f"s{i}", prompt_of(20, seed=i), max_tokens=2) for i in range(12)]
    sampler.begin(PreparedSampleBatch(requests=(long, *shorts)))
    first_of: dict[str, int] = {}
    step = 0
    while deltas := sampler.step():
        heard.add(deltas)
        for delta in deltas:
            if delta.tokens.size:
                first_of.setdefault(delta.request_id, step)
        step += 1
    assert heard.ended == {"long", *(f"s{i}" for i in range(12))}
    assert first_of["long"] == 6, "64 tokens, then half of 64 while others wait"
    assert sum(first_of[f"s{i}"] < first_of["long"] for i in range(12)) >= 5
    assert max(first_of.values()) <= 9


def test_a_step_of_nothing_but_prompt_is_not_the_end(make):
    sampler = make()
    sampler.begin(PreparedSampleBatch(requests=(ask("long", prompt_of(200), max_tokens=2),)))
    (delta,) = sampler.step()
    assert (delta.request_id, delta.tokens.size, delta.stop_reason, delta.prompt) == ("long", 0, None, None)
    sampler.cancel([RequestId("long")])
    assert sampler.step() == []
    sampler.drop(RED)


def test_a_failed_chunk_ends_its_request_alone(make, monkeypatch):
    sampler, real = make(), Prefiller.advance
    good = ask("good", prompt_of(40))
    expected = run(sampler, good).bits

    def advance(self, under_way):
        if under_way.request.request_id == "bad" and under_way.num_done >= 64:
            raise RuntimeError("no")
        return real(self, under_way)

    monkeypatch.setattr(prefill.Prefiller, "advance", advance)
    sampler.begin(PreparedSampleBatch(requests=(ask("bad", prompt_of(200, seed=1)), good)))
    errors, heard = [], Heard()
    while deltas := sampler.step():
        errors += [delta for delta in deltas if delta.error is not None]
        heard.add([delta for delta in deltas if delta.error is None and delta.request_id == "good"])
    assert [delta.request_id for delta in errors] == ["bad"] and "no" in errors[0].error
    assert heard.bits == expected


def positions_beside_the_rows(sampler: Sampler) -> int:
    lanes, prompts = (sampler._scored, sampler._prompts), sampler._prefiller.prefixes._prompts.values()
    held = [lane.current for lane in lanes if lane.current is not None] + [*sampler._prefilled, *prompts]
    return sum({id(each.keys): each.keys.k.shape[3] for each in held}.values())  # one may be kept and wait for slots


def test_prompts_beside_the_rows_never_take_more_than_their_room(make):
    sampler = make(max_sample_tokens=256, prefill_tokens=32)  # long ones of both kinds, many samples, many short ones
    assert sampler.room.prompt_tokens == 256 + 32 and sampler.room.prefix_tokens == 64
    requests = [
        ask(name, prompt_of(size, seed=size), num_samples=num_samples, max_tokens=max_tokens)
        for name, size, num_samples, max_tokens in (
            ("many", 20, 12, 9),
            ("long", 240, 2, 9),
            ("score", 250, 1, 1),
            ("long too", 200, 1, 9),
            ("score too", 230, 1, 1),
            ("short", 30, 1, 9),
            ("short score", 31, 1, 1),
        )
    ]
    heard, most = Heard(), 0
    sampler.begin(PreparedSampleBatch(requests=tuple(requests)))
    while deltas := sampler.step():
        heard.add(deltas)
        most = max(most, positions_beside_the_rows(sampler))
    assert 256 < most <= sampler.room.prompt_tokens
    assert heard.ended == {request.request_id for request in requests}
    assert all(len(heard.bits[each.request_id, 0][0]) == 4 * each.params.max_tokens for each in requests)


def test_a_hit_is_not_copied_where_it_and_the_copy_have_no_room(make, computed):
    sampler, prefix = make(max_sample_tokens=256, prefix_cache_tokens=256), prompt_of(192)
    run(sampler, ask("first", np.concatenate([prefix, prompt_of(20, seed=1)])))
    heard = run(sampler, ask("alike", np.concatenate([prefix, prompt_of(30, seed=2)])))
    assert heard.spared == {} and computed == {"first": 224, "alike": 224}
    assert run(sampler, ask("equal", np.concatenate([prefix, prompt_of(30, seed=2)]))).spared == {"equal": 222}
