"""The records of running samples, without a device."""

import numpy as np

from skyrl_tx.backends.jax.sample.draw import Drawn
from skyrl_tx.backends.jax.sample.running import RunningSample
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


def test_a_preempted_sample_takes_its_steps_again():
    sample = running(max_tokens=9)
    sample.take_drawn(drawn(7))
    sample.take_drawn(drawn(8, 9, 10))
    assert (sample.position, sample.kv_length(4), sample.length_after(4)) == (7, 11, 11)
    sample.preempt()
    assert (sample.position, sample.last_token, sample.num_steps_left) == (4, 7, 8)
    assert sample.tokens_again().tolist() == [8, 9, 10]
    assert (sample.kv_length(4), sample.length_after(4), sample.length_after(100)) == (11, 8, 12)
    assert sample.take_drawn(drawn(8, 9)) is None
    delta = sample.take_drawn(drawn(10, 11))
    assert delta is not None and delta.tokens.tolist() == [11] and sample.position == 8
