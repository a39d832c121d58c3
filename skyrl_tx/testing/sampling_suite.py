"""What every backend promises of samples: the part of `BackendSuite` that needs no training."""

from dataclasses import replace

import pytest

from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.testing.backend_bench import Bench, drawn_of


class SamplingSuite:
    """Guarantees of sampling; see `BackendSuite` for the fixture `bench`."""

    tolerance = 1e-5

    def test_one_seed_gives_one_output(self, bench: Bench) -> None:
        """Samples of one request differ; another request in the batch changes nothing."""
        sampler = bench.sampler(bench.model(steps=1))
        request = bench.sample_request(sampler, num_samples=3)
        first, again = bench.draw(request), bench.draw(request, bench.sample_request(None, num_samples=2))
        assert [drawn.tokens for drawn in first] == [drawn.tokens for drawn in again]
        assert len({drawn.tokens for drawn in first}) > 1
        for drawn, other in zip(first, again, strict=True):
            assert drawn.logprobs == pytest.approx(other.logprobs, abs=self.tolerance)
        params = SamplingParams(seed=8, max_tokens=8, eos_stops=False)
        assert bench.draw(bench.sample_request(sampler, num_samples=3, params=params)) != first

    def test_greedy_is_the_limit_of_truncation(self, bench: Bench) -> None:
        """Temperature 0, the likeliest token alone, and the smallest nucleus draw the same tokens."""
        ways = (
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, temperature=0.0),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_k=1),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_p=1e-6),
        )
        drawn = [bench.draw(bench.sample_request(None, params=params))[0].tokens for params in ways]
        assert drawn[0] == drawn[1] == drawn[2]

    def test_a_sample_ends_at_its_length_or_after_its_stop_token(self, bench: Bench) -> None:
        """The stop token stays, once."""
        long = bench.draw(bench.sample_request(None))[0]
        assert (len(long.tokens), long.stop_reason) == (8, "length")
        stop = long.tokens[3]
        params = SamplingParams(seed=7, max_tokens=8, eos_stops=False, stop_token_ids=(stop,))
        short = bench.draw(bench.sample_request(None, params=params))[0]
        assert short.stop_reason == "stop"
        assert short.tokens == long.tokens[: long.tokens.index(stop) + 1]

    def test_a_cancelled_sample_says_nothing_more(self, bench: Bench) -> None:
        """Others go on."""
        gone, stays = bench.sample_request(None), bench.sample_request(None)
        bench.backend.begin_sample(PreparedSampleBatch(requests=(gone, stays)))
        bench.backend.cancel_sample([gone.request_id, gone.request_id])
        ids = set()
        while new := bench.backend.step_sample():
            ids |= {delta.request_id for delta in new}
        assert ids == {stays.request_id}
        assert bench.backend.step_sample() == []

    def test_an_ended_sample_says_nothing_more(self, bench: Bench) -> None:
        """The others of its request go on to their ends."""
        params = SamplingParams(seed=7, max_tokens=60, eos_stops=False)
        request = bench.sample_request(None, num_samples=3, params=params)
        bench.backend.begin_sample(PreparedSampleBatch(requests=(request,)))
        deltas = bench.backend.step_sample()
        bench.backend.end_sample(request.request_id, 1)
        bench.backend.end_sample(request.request_id, 1)
        bench.backend.end_sample(bench.sample_request(None).request_id, 0)
        while new := bench.backend.step_sample():
            assert all(delta.index != 1 for delta in new)
            deltas += new
        ended = {delta.index for delta in deltas if delta.stop_reason == "length"}
        assert ended >= {0, 2}

    def test_a_request_in_parts_draws_what_the_whole_draws(self, bench: Bench) -> None:
        """A part may come while the others run; to cancel the request cancels all of them."""
        request = bench.sample_request(None, num_samples=5, options=PromptOptions(logprobs=True))
        whole = bench.draw(request)
        rest = replace(request, first_index=2, num_samples=3, options=PromptOptions())
        parts = [PreparedSampleBatch(requests=(part,)) for part in (replace(request, num_samples=2), rest)]
        bench.backend.begin_sample(parts[0])
        deltas = bench.backend.step_sample()
        bench.backend.begin_sample(parts[1])
        while new := bench.backend.step_sample():
            deltas += new
        for index, expected in enumerate(whole):
            drawn = drawn_of(deltas, request.request_id, index)
            assert drawn.tokens == expected.tokens
            assert drawn.logprobs == pytest.approx(expected.logprobs, abs=self.tolerance)
        assert [delta.index for delta in deltas if delta.prompt is not None] == [0]
        for part in parts:
            bench.backend.begin_sample(part)
        bench.backend.cancel_sample([request.request_id])
        assert bench.backend.step_sample() == []
