"""Rows are as long as samples have come to be, and nobody short waits for somebody long."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.backends.jax import decode, prefill, rows
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sampler import MOST_PASSED, Sampler
from skyrl_tx.backends.jax.slots import CacheShape, RunningSample
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams

LONGEST = 128
CONFIG = JaxConfig(
    sample_slots=8,
    max_sample_tokens=8 * 32,
    max_context_length=LONGEST,
    decode_slice_tokens=4,
    prefill_chunk_tokens=32,
)
SHAPES = CacheShape(8, 32), CacheShape(4, 64), CacheShape(2, 128)


def ask(name: str, size: int, max_tokens: int, *, samples=1, **params) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(name),
        sampler=None,
        prompt=np.random.default_rng(size).integers(2, 256, size, dtype=np.int32),
        num_samples=samples,
        params=SamplingParams(**{"seed": 3, "max_tokens": max_tokens, "eos_stops": False, **params}),
        options=PromptOptions(),
    )


class Watch:
    """A sampler whose steps are counted: when each sample got its tokens, and what these were."""

    def __init__(self, tiny, config: JaxConfig = CONFIG) -> None:
        self.sampler = Sampler(tiny.params, tiny.config, config, [])
        self.num_steps = 0
        self.tokens, self.logprobs, self.ended_at = defaultdict(list), defaultdict(list), {}
        self.spared: dict[str, int] = {}

    @property
    def shape(self) -> CacheShape:
        return self.sampler._rows.shape

    def begin(self, *requests: SampleRequest) -> None:
        self.sampler.begin(PreparedSampleBatch(requests=requests))

    def step(self) -> bool:
        deltas = self.sampler.step()
        self.num_steps += 1
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert delta.error is None and key not in self.ended_at
            self.tokens[key] += delta.tokens.tolist()
            self.logprobs[key] += delta.logprobs.tolist()
            if delta.prompt is not None:
                self.spared[delta.request_id] = delta.prompt.cache_hit_tokens
            if delta.stop_reason is not None:
                self.ended_at[key] = self.num_steps
        return bool(deltas)

    def run(self, *requests: SampleRequest) -> "Watch":
        self.begin(*requests)
        while self.step():
            pass
        return self

    def wait_for(self, *keys) -> int:
        """How many steps it takes until these have ended."""
        began = self.num_steps
        while not self.ended_at.keys() >= set(keys):
            assert self.step()
        return self.num_steps - began


@pytest.fixture
def watch(tiny) -> Watch:
    return Watch(tiny)


def test_short_samples_wait_for_nobody_who_may_become_long(watch):
    watch.begin(ask("a", 5, 25), ask("b", 5, 50), ask("unbounded", 5, LONGEST - 5))
    watch.step()
    assert watch.shape == SHAPES[0] and len(watch.tokens) == 3
    watch.begin(ask("short", 5, 9))
    assert watch.wait_for(("short", 0)) == 2
    seen = {watch.shape}
    watch.wait_for(("a", 0))
    while ("unbounded", 0) not in watch.ended_at:
        name = f"short {watch.num_steps}"
        watch.begin(ask(name, 5, 5))
        assert watch.wait_for((name, 0)) == 1
        seen.add(watch.shape)
    assert seen == set(SHAPES)
    watch.run()
    assert len(watch.tokens["unbounded", 0]) == LONGEST - 5


def test_what_grows_and_what_made_room_goes_on_as_if_there_were_room(tiny, watch):
    request = ask("many", 5, 90, samples=8, temperature=0.8)  # eight reach the end of their rows at once
    watch.run(request)
    assert len(set(watch.ended_at.values())) >= 3, "some had to wait"
    roomy = Watch(tiny, CONFIG.model_copy(update={"max_sample_tokens": 8 * LONGEST})).run(request)
    assert roomy.shape == CacheShape(8, LONGEST) and len(set(roomy.ended_at.values())) == 1
    assert len(roomy.tokens) == 8
    for key, tokens in roomy.tokens.items():
        assert watch.tokens[key] == tokens and len(tokens) == 90
        np.testing.assert_allclose(watch.logprobs[key], roomy.logprobs[key], atol=1e-5)


def test_what_made_room_drives_no_prompt_out_of_those_kept(watch):
    watch.run(ask("many", 5, 90, samples=8))
    assert watch.run(ask("again", 5, 2)).spared == {"again": 5}


def test_a_long_prompt_is_passed_by_so_many_and_no_more(watch):
    watch.begin(*(ask(f"first {number}", 5, 4 + 3 * number) for number in range(8)))
    watch.step()
    watch.begin(ask("long", 100, 20))
    num_begun = 0
    while ("long", 0) not in watch.tokens:
        for _ in range(8 - len(watch.sampler._prompts.new)):
            watch.begin(ask(f"next {num_begun}", 5, 20))
            num_begun += 1
        watch.step()
    passed = [key for key in watch.tokens if key[0].startswith("next")]
    assert MOST_PASSED - 8 <= len(passed) <= MOST_PASSED
    watch.run()
    assert len(watch.ended_at) == 8 + 1 + num_begun
    assert len(watch.tokens["long", 0]) == 20


def test_rows_are_many_again_when_the_long_have_left(watch):
    watch.begin(ask("long", 64, 10))
    watch.step()
    assert watch.shape == SHAPES[2]
    watch.begin(*(ask(f"short {number}", 5, 12) for number in range(9)))
    watch.wait_for(("long", 0))
    watch.step()
    watch.step()
    assert watch.shape == SHAPES[0]
    watch.run()
    assert len(watch.ended_at) == 10


def test_what_made_room_can_be_ended_and_cancelled(watch):
    watch.begin(ask("many", 5, 90, samples=8), ask("other", 6, 90))
    while not watch.sampler._prompts.aside:
        watch.step()
    (_, ended), (_, other), *_ = [*watch.sampler._prompts.aside]
    watch.sampler.end(RequestId("many"), ended)
    watch.wait_for(*(("many", index) for index in range(8) if index != ended))
    assert ("many", ended) not in watch.ended_at and other != ended
    watch.begin(ask("again", 5, 90, samples=8))
    while not watch.sampler._prompts.aside:
        watch.step()
    watch.sampler.cancel([RequestId("again"), RequestId("other")])
    assert not watch.step() and not any(watch.sampler._requests())


@pytest.mark.parametrize("position", [1, 15, 16, 17, 32, 40, 64])
def test_rows_move_bit_by_bit_and_a_piece_at_a_time(tiny, monkeypatch, position):
    monkeypatch.setattr(rows, "PIECE", 16)
    made = rows.Rows(tiny.params, tiny.config, lambda size: CacheShape(256 // size, size) if size > 1 else SHAPES[0])
    moved, take = [], decode.take_piece
    monkeypatch.setattr(decode, "take_piece", lambda *given, size: moved.append(size) or take(*given, size=size))
    made.reshape(CacheShape(2, 128))
    made.cache = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(1).normal(size=leaf.shape), leaf.dtype), made.cache
    )
    sample = RunningSample(request=ask("r", position, 9), index=0, adapter=0, stops=frozenset(), num_drawn=1)
    made.slots.place(sample, 1)
    before = jax.device_get(made.cache)
    made.reshape(CacheShape(4, 64), [1])
    assert made.slots.live == {0: sample} and sum(moved) == -(-position // 16) * 16
    for ours, theirs in ((made.cache.k, before.k), (made.cache.v, before.v)):
        np.testing.assert_array_equal(ours[:, 0, :, :position], theirs[:, 1, :, :position])


@pytest.mark.parametrize(("row", "room"), [(512, 512), (512, 2048), (512, 128)])
def test_a_prompt_goes_into_slots_without_another_copy(tiny, row, room):
    cache, prompt = (
        jax.eval_shape(lambda dims=dims: prefill.empty_keys(tiny.params, tiny.config, *dims))
        for dims in ((4, row), (1, room))
    )
    number, slot_S = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    taken = decode.insert.lower(cache, prompt, number, slot_S, number).compile().memory_analysis()
    assert taken.alias_size_in_bytes == 2 * 4 * cache.k.size
    assert taken.temp_size_in_bytes < 0.05 * 2 * 4 * prompt.k.size
