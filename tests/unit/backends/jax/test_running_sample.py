"""The records of running samples, without a device."""

import numpy as np

from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.backends.jax.sample.running_sample import MAX_STOPS, RunningSample
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampleDelta, TopK


def make_running_sample(
    max_tokens: int = 5, stops: frozenset[int] = frozenset(), topk: int = 0, adapter: int = 0
) -> RunningSample:
    request = SampleRequest(
        request_id=RequestId("r"),
        sampler=None,
        prompt=np.arange(4, dtype=np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=max_tokens),
        options=PromptOptions(sample_topk=topk),
    )
    return RunningSample(request=request, index=0, adapter=adapter, stops=stops)


def make_drawn_tokens(*tokens: int) -> DrawnTokens:
    return DrawnTokens(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        topk_tokens=np.tile(np.array(tokens, np.int32)[:, None], 3),
        topk_logprobs=np.zeros((len(tokens), 3), np.float32),
    )


def make_slice_results(*tokens: int) -> tuple[Int32Array, Float32Array]:
    """Return tokens and log-probabilities of a slice."""
    return np.array(tokens, np.int32), -np.arange(len(tokens), dtype=np.float32)


def take(sample: RunningSample, *tokens: int, is_stopped: bool = False) -> SampleDelta | None:
    """Let a sample take the tokens of its next decode steps."""
    start, sample.position = sample.position, sample.length_after(len(tokens))
    return sample.take_slice(start, *make_slice_results(*tokens), is_stopped)


def test_a_sample_ends_at_max_tokens():
    sample = make_running_sample()
    first = sample.take_first(make_drawn_tokens(7), None)
    assert (first.tokens.tolist(), first.stop_reason, sample.position, sample.num_left) == ([7], None, 4, 4)
    second = take(sample, 8, 9)
    assert second is not None and (second.stop_reason, sample.position, sample.next_token) == (None, 6, 9)
    last = take(sample, 10, 11)
    assert last is not None and sample.position == sample.end
    assert (last.tokens.tolist(), last.logprobs.tolist(), last.stop_reason) == ([10, 11], [0.0, -1.0], "length")


def test_a_stop_token_ends_a_sample_and_takes_precedence_over_max_tokens():
    sample = make_running_sample(max_tokens=3, stops=frozenset({9}))
    sample.take_first(make_drawn_tokens(7), None)
    delta = take(sample, 8, 9, is_stopped=True)
    assert delta is not None and (delta.tokens.tolist(), delta.stop_reason) == ([8, 9], "stop")
    first = make_running_sample(max_tokens=3, stops=frozenset({9})).take_first(make_drawn_tokens(9), None)
    assert (first.tokens.tolist(), first.stop_reason) == ([9], "stop")


def test_more_stop_tokens_than_programs_know_are_found_on_the_host():
    sample = make_running_sample(max_tokens=9, stops=frozenset(range(20, 20 + MAX_STOPS + 1)))
    sample.take_first(make_drawn_tokens(7), None)
    delta = take(sample, 8, 20, 9, 9)
    assert delta is not None and (delta.tokens.tolist(), delta.stop_reason) == ([8, 20], "stop")


def test_topk_is_cut_like_the_tokens():
    assert make_running_sample(max_tokens=3).take_first(make_drawn_tokens(7), None).topk is None
    sample = make_running_sample(max_tokens=5, topk=2)
    first = sample.take_first(make_drawn_tokens(6), None)
    assert first.topk is not None and first.topk.token_ids.tolist() == [[6, 6]]
    take(sample, 7)
    sample.preempt()
    topk = TopK(token_ids=np.array([[7, 7], [8, 8]], np.int32), logprobs=np.zeros((2, 2), np.float32))
    delta = sample.take_slice(4, *make_slice_results(7, 8), False, topk)
    assert delta is not None and delta.topk is not None and delta.topk.token_ids.tolist() == [[8, 8]]


def test_steps_go_on_before_their_tokens_are_read():
    sample = make_running_sample(max_tokens=9)
    sample.take_first(make_drawn_tokens(7), None)
    sample.position += 4
    assert sample.num_replayed == 0 and (sample.end, sample.length_after(9)) == (12, 12)
    assert sample.take_slice(4, *make_slice_results(1, 2, 3, 4), False) is not None
    assert sample.next_token == 4


def test_a_preempted_sample_takes_its_steps_again():
    sample = make_running_sample(max_tokens=9)
    sample.take_first(make_drawn_tokens(7), None)
    take(sample, 8, 9, 10)
    assert (sample.position, sample.kv_length(4), sample.length_after(4)) == (7, 11, 11)
    sample.preempt()
    assert (sample.position, sample.next_token, sample.end) == (4, 7, 12)
    assert sample.get_replayed_tokens().tolist() == [8, 9, 10]
    assert (sample.kv_length(4), sample.length_after(4), sample.length_after(100)) == (11, 8, 12)
    assert take(sample, 8, 9) is None
    delta = take(sample, 10, 11)
    assert delta is not None and delta.tokens.tolist() == [11] and sample.position == 8
