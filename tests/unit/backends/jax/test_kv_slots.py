"""Running samples, KV cache slots and layouts, without a device."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.sample.draw import Drawn
from skyrl_tx.backends.jax.sample.kv_slots import Slots
from skyrl_tx.backends.jax.sample.running import RunningSample
from skyrl_tx.backends.jax.shapes import KVLayout, SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams


def running(max_tokens: int = 5, stops: frozenset[int] = frozenset(), topk: int = 0, adapter: int = 0) -> RunningSample:
    request = SampleRequest(
        request_id=RequestId("r"),
        sampler=None,
        prompt=np.arange(4, dtype=np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=max_tokens),
        options=PromptOptions(sample_topk=topk),
    )
    return RunningSample(request=request, index=0, adapter=adapter, stops=stops)


def drawn(*tokens: int) -> Drawn:
    return Drawn(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        topk_tokens=np.tile(np.array(tokens, np.int32)[:, None], 3),
        topk_logprobs=np.zeros((len(tokens), 3), np.float32),
    )


def test_a_sample_ends_at_max_tokens():
    sample = running()
    first = sample.take_drawn(drawn(7))
    assert (first.tokens.tolist(), first.stop_reason, sample.position, sample.num_left) == ([7], None, 4, 4)
    second = sample.take_drawn(drawn(8, 9))
    assert (second.stop_reason, sample.position, sample.last_token) == (None, 6, 9)
    last = sample.take_drawn(drawn(10, 11, 12, 13))
    assert (last.tokens.tolist(), last.logprobs.tolist(), last.stop_reason) == ([10, 11], [0.0, -1.0], "length")


def test_a_stop_token_ends_a_sample_and_takes_precedence_over_max_tokens():
    sample = running(max_tokens=3, stops=frozenset({9}))
    delta = sample.take_drawn(drawn(7, 8, 9, 9))
    assert (delta.tokens.tolist(), delta.stop_reason) == ([7, 8, 9], "stop")
    late = running(max_tokens=2, stops=frozenset({9})).take_drawn(drawn(7, 8, 9))
    assert (late.tokens.tolist(), late.stop_reason) == ([7, 8], "length")


def test_topk_is_cut_like_the_tokens():
    delta = running(max_tokens=2, topk=2).take_drawn(drawn(7, 8, 9))
    assert delta.topk is not None and delta.topk.token_ids.tolist() == [[7, 7], [8, 8]]
    assert running().take_drawn(drawn(7)).topk is None


def test_slots_are_occupied_and_released():
    slots = Slots(3)
    sample = running()
    slots.occupy(sample, 1)
    assert (slots.free, slots.live) == ([0, 2], {1: sample})
    slots.release(1)
    assert slots.free == [0, 1, 2]


def test_tiles_use_a_single_adapter_while_other_tiles_are_free():
    slots = Slots(12)
    for adapter in (1, 2, 1, 0):
        slots.occupy(running(adapter=adapter), slots.free_for(adapter)[0])
    assert [(slot, sample.adapter) for slot, sample in slots.live.items()] == [(0, 1), (1, 1), (4, 2), (8, 0)]
    assert slots.adapters == [1, 2, 0]
    assert slots.free_for(2)[:3] == [5, 6, 7] and len(slots.free_for(2)) == 8
    slots.occupy(running(adapter=3), slots.free_for(3)[0])
    assert slots.adapters == [1, 1, 3, 0, 2, 0, 0, 0, 0, 0, 0, 0]


def memory(tokens: int) -> SampleMemory:
    return SampleMemory(num_slots=8, tokens=tokens, prompt_tokens=0, prefix_tokens=0, max_length=500)


@pytest.mark.parametrize(
    ("needed", "layout"), [(1, (8, 100)), (100, (8, 100)), (101, (4, 200)), (400, (2, 400)), (401, (1, 500))]
)
def test_longer_slots_are_fewer_in_the_same_memory(needed, layout):
    assert memory(800).layout_for(needed) == KVLayout(*layout)


def test_a_layout_has_at_most_the_configured_slots():
    assert memory(80_000).layout_for(9) == KVLayout(8, 500)
