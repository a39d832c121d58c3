"""Tests of a backend's samples and of its results about prompts. A part of `BackendSuite`.

Expected distributions come from the trainer, which computes the log-probability of every token.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import PromptResult
from skyrl_tx.testing.backend_driver import BackendDriver, Floats, drawn_of, read_only


class SamplingChecks:
    """Tests of agreement with the trainer, drawing, stops, parts of requests, and prompts."""

    tolerance = 1e-5
    highest_temperature = 100.0
    """A temperature at which all tokens are about equally likely.

    Lower it if your backend refuses it.
    """
    filters: Mapping[str, float] = MappingProxyType({"top_k": 3, "top_p": 0.8})
    """The filters of the test that checks that log-probabilities are computed before filtering.

    Set it to {} if your backend has a setting to compute them after filtering.
    """

    # Agreement of trainer and sampler

    def test_trainer_and_sampler_logprobs_agree(self, driver: BackendDriver) -> None:
        """Log-probabilities of samples and of the prompt equal the results of `forward`."""
        model_id = driver.model(steps=2)
        options = PromptOptions(logprobs=True)
        request = driver.sample_request(driver.sampler(model_id), options=options)
        self._check_agreement(driver, model_id, request)

    def test_a_fresh_model_equals_the_base_model(self, driver: BackendDriver) -> None:
        """B is zero, so the trainer computes the log-probabilities of the base model."""
        request = driver.sample_request(None, options=PromptOptions(logprobs=True))
        self._check_agreement(driver, driver.model(), request)

    def _check_agreement(self, driver: BackendDriver, model_id: ModelId, request: SampleRequest) -> None:
        deltas = driver.run_samples(request)
        tokens = np.concatenate([request.prompt, *(delta.tokens for delta in deltas)]).astype(np.int32)
        prompt = deltas[0].prompt
        assert prompt is not None and prompt.logprobs is not None and np.isnan(prompt.logprobs[0])
        sampled = np.concatenate([prompt.logprobs[1:], *(delta.logprobs for delta in deltas)])
        [example] = driver.request(model_id, (len(tokens) - 1,))
        inputs = dict(example.loss_inputs) | {"target_tokens": tokens[1:]}
        scored = replace(example, tokens=tokens[:-1], loss_inputs=inputs)
        [result] = driver.forward(driver.batch([scored]))
        np.testing.assert_allclose(sampled, result.logprobs, rtol=0, atol=self.tolerance)

    # Sampling

    def test_samples_depend_on_the_seed_only(self, driver: BackendDriver) -> None:
        """Samples of one request differ, and other requests in the batch do not change them."""
        sampler = driver.sampler(driver.model(steps=1))
        request = driver.sample_request(sampler, num_samples=3)
        first, again = driver.draw(request), driver.draw(request, driver.sample_request(None, num_samples=2))
        assert [drawn.tokens for drawn in first] == [drawn.tokens for drawn in again]
        assert len({drawn.tokens for drawn in first}) > 1
        for drawn, other in zip(first, again, strict=True):
            assert drawn.logprobs == pytest.approx(other.logprobs, abs=self.tolerance)
        params = SamplingParams(seed=8, max_tokens=8, eos_stops=False)
        assert driver.draw(driver.sample_request(sampler, num_samples=3, params=params)) != first

    def test_greedy_equals_the_limits_of_top_k_and_top_p(self, driver: BackendDriver) -> None:
        """Temperature 0, top-k 1 and a very small top-p all draw the likeliest tokens."""
        variants = (
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, temperature=0.0),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_k=1),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_p=1e-6),
        )
        drawn = [driver.draw(driver.sample_request(None, params=params))[0].tokens for params in variants]
        assert drawn[0] == drawn[1] == drawn[2]

    def test_a_sample_ends_at_max_tokens_or_after_a_stop_token(self, driver: BackendDriver) -> None:
        """A stop token is the last token of its sample."""
        long = driver.draw(driver.sample_request(None))[0]
        assert (len(long.tokens), long.stop_reason) == (8, "length")
        stop = long.tokens[3]
        params = SamplingParams(seed=7, max_tokens=8, eos_stops=False, stop_token_ids=(stop,))
        short = driver.draw(driver.sample_request(None, params=params))[0]
        assert short.stop_reason == "stop"
        assert short.tokens == long.tokens[: long.tokens.index(stop) + 1]

    def test_no_delta_follows_the_cancellation_of_a_request(self, driver: BackendDriver) -> None:
        """A cancelled request gets no more deltas, and other requests continue."""
        cancelled, kept = driver.sample_request(None), driver.sample_request(None)
        driver.backend.begin_sample(PreparedSampleBatch(requests=(cancelled, kept)))
        driver.backend.cancel_sample([cancelled.request_id, cancelled.request_id])
        assert {delta.request_id for delta in driver.finish_samples()} == {kept.request_id}
        assert driver.backend.step_sample() == []

    def test_no_delta_follows_the_end_of_a_sample(self, driver: BackendDriver) -> None:
        """An ended sample gets no more deltas, and the other samples of its request continue."""
        params = SamplingParams(seed=7, max_tokens=60, eos_stops=False)
        request = driver.sample_request(None, num_samples=3, params=params)
        driver.backend.begin_sample(PreparedSampleBatch(requests=(request,)))
        deltas = driver.backend.step_sample()
        driver.backend.end_sample(request.request_id, 1)
        driver.backend.end_sample(request.request_id, 1)
        driver.backend.end_sample(driver.sample_request(None).request_id, 0)
        rest = driver.finish_samples()
        assert all(delta.index != 1 for delta in rest)
        deltas += rest
        ended = {delta.index for delta in deltas if delta.stop_reason == "length"}
        assert ended >= {0, 2}

    def test_samples_do_not_depend_on_the_parts_of_a_request(self, driver: BackendDriver) -> None:
        """Parts of a request may overlap in time, and cancelling the request cancels all parts."""
        request = driver.sample_request(None, num_samples=5, options=PromptOptions(logprobs=True))
        whole = driver.draw(request)
        rest = replace(request, first_index=2, num_samples=3, options=PromptOptions())
        parts = [PreparedSampleBatch(requests=(part,)) for part in (replace(request, num_samples=2), rest)]

        # The second part arrives while the first one is running.
        driver.backend.begin_sample(parts[0])
        deltas = driver.backend.step_sample()
        driver.backend.begin_sample(parts[1])
        deltas += driver.finish_samples()
        for index, expected in enumerate(whole):
            drawn = drawn_of(deltas, request.request_id, index)
            assert drawn.tokens == expected.tokens
            assert drawn.logprobs == pytest.approx(expected.logprobs, abs=self.tolerance)
        assert [delta.index for delta in deltas if delta.prompt is not None] == [0]

        # Cancel both parts.
        for part in parts:
            driver.backend.begin_sample(part)
        driver.backend.cancel_sample([request.request_id])
        assert driver.backend.step_sample() == []

    def test_prompts_are_cached_for_one_scope_only(self, driver: BackendDriver) -> None:
        """A prompt that was cached for one scope is not a cache hit for another scope."""
        expected = driver.draw(driver.sample_request(None))
        for scope in ("ann", "bob"):
            request = driver.sample_request(None, cache_scope=scope)
            deltas = driver.run_samples(request)
            assert all(delta.prompt is None or delta.prompt.cache_hit_tokens == 0 for delta in deltas), scope
            assert [drawn_of(deltas, request.request_id, 0)] == expected

    def test_a_later_part_needs_no_first_part(self, driver: BackendDriver) -> None:
        """After a restart, the engine requests only the samples that had not ended."""
        request = driver.sample_request(None, num_samples=4)
        whole = driver.draw(request)
        part = replace(driver.sample_request(None, num_samples=2), first_index=2)
        deltas = driver.run_samples(part)
        assert {delta.index for delta in deltas} == {2, 3}
        assert [drawn_of(deltas, part.request_id, index).tokens for index in (2, 3)] == [
            sample.tokens for sample in whole[2:]
        ]

    def test_samples_beyond_the_slots_wait(self, driver: BackendDriver) -> None:
        """More samples than slots may be queued, and all of them are computed."""
        num_samples = min(driver.capabilities.sample_slots, 64) + 3
        params = SamplingParams(seed=5, max_tokens=6, eos_stops=False)
        drawn = driver.draw(driver.sample_request(None, num_samples=num_samples, params=params))
        assert [len(sample.tokens) for sample in drawn] == [6] * num_samples
        alone = replace(driver.sample_request(None, params=params), first_index=num_samples - 1)
        deltas = driver.run_samples(alone)
        assert drawn_of(deltas, alone.request_id, num_samples - 1).tokens == drawn[-1].tokens

    def test_end_tokens_stop_a_sample_unless_they_are_turned_off(self, driver: BackendDriver) -> None:
        """If all tokens are about equally likely, some of many samples contain an end token."""
        ends = set(driver.capabilities.eos_token_ids)
        temperature = self.highest_temperature
        params = SamplingParams(seed=3, max_tokens=48, temperature=temperature, eos_stops=False)
        whole = driver.draw(driver.sample_request(None, num_samples=48, params=params))
        stopped = driver.draw(driver.sample_request(None, num_samples=48, params=replace(params, eos_stops=True)))

        # A sample is cut after its first end token.
        num_stopped = 0
        for one, other in zip(whole, stopped, strict=True):
            end = next((i for i, token in enumerate(one.tokens) if token in ends), None)
            num_stopped += end is not None
            assert other.tokens == (one.tokens if end is None else one.tokens[: end + 1])
            is_last = end is None
            assert other.stop_reason == ("length" if is_last else "stop")
        assert num_stopped > 0 or not ends or driver.capabilities.vocab_size > 1024

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
    def test_logprobs_of_samples_are_at_the_temperature(self, driver: BackendDriver, temperature: float) -> None:
        """Reported log-probabilities are computed before filters.

        Greedy samples report temperature 1.
        """
        model_id = driver.model(steps=1)
        num_best = min(2, driver.capabilities.max_topk_logprobs)
        params = SamplingParams(seed=1, max_tokens=5, temperature=temperature, eos_stops=False)
        params = replace(params, **self.filters)
        options = PromptOptions(sample_topk=num_best)
        request = driver.sample_request(driver.sampler(model_id), params=params, options=options)
        deltas = driver.run_samples(request)
        drawn = drawn_of(deltas, request.request_id, 0)

        # The trainer's distributions at the temperature.
        tokens = np.concatenate([request.prompt, np.array(drawn.tokens, np.int32)])
        rows = _scale_to_temperature(
            driver.distributions(model_id, tokens[:-1])[request.prompt.size - 1 :], temperature or 1.0
        )
        near = 20 * self.tolerance / (temperature or 1.0)
        own = rows[np.arange(len(rows)), np.array(drawn.tokens)]
        np.testing.assert_allclose(drawn.logprobs, own, rtol=0, atol=near)
        if temperature == 0:
            np.testing.assert_allclose(own, rows.max(axis=1), rtol=0, atol=near)
        if num_best:
            best = [delta.topk for delta in deltas if delta.tokens.size]
            assert all(topk is not None and topk.logprobs.dtype == np.float32 for topk in best)
            likeliest = np.concatenate([topk.logprobs for topk in best if topk is not None])
            np.testing.assert_allclose(likeliest, -np.sort(-rows, axis=1)[:, :num_best], rtol=0, atol=near)

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
    def test_raw_logprobs_of_samples_are_those_of_the_trainer(self, driver: BackendDriver, temperature: float) -> None:
        """Raw log-probabilities do not depend on the temperature, and asking for them changes no token."""
        if "raw" not in driver.capabilities.sampled_logprobs:
            pytest.skip("this backend has no raw log-probabilities")
        model_id = driver.model(steps=1)
        num_best = min(2, driver.capabilities.max_topk_logprobs)
        params = SamplingParams(seed=1, max_tokens=5, temperature=temperature, eos_stops=False)
        options = PromptOptions(sample_topk=num_best)
        tempered = driver.sample_request(driver.sampler(model_id), params=params, options=options)
        raw = driver.sample_request(tempered.sampler, params=replace(params, raw_logprobs=True), options=options)
        deltas = driver.run_samples(tempered, raw)
        others, drawn = (drawn_of(deltas, request.request_id, 0) for request in (tempered, raw))
        assert drawn.tokens == others.tokens

        # The trainer's distributions.
        tokens = np.concatenate([raw.prompt, np.array(drawn.tokens, np.int32)])
        rows = driver.distributions(model_id, tokens[:-1])[raw.prompt.size - 1 :]
        own = rows[np.arange(len(rows)), np.array(drawn.tokens)]
        np.testing.assert_allclose(drawn.logprobs, own, rtol=0, atol=20 * self.tolerance)
        assert temperature == 0 or np.abs(np.subtract(others.logprobs, drawn.logprobs)).max() > 100 * self.tolerance
        if num_best:
            best = [delta.topk for delta in deltas if delta.request_id == raw.request_id and delta.topk is not None]
            likeliest = np.concatenate([topk.logprobs for topk in best])
            np.testing.assert_allclose(
                likeliest, -np.sort(-rows, axis=1)[:, :num_best], rtol=0, atol=20 * self.tolerance
            )

    @pytest.mark.parametrize(
        ("top_k", "top_p", "temperature"), [(-1, 1.0, 1.0), (4, 1.0, 1.5), (-1, 0.7, 1.0), (4, 0.6, 1.5)]
    )
    def test_tokens_follow_the_filtered_distribution(
        self, driver: BackendDriver, top_k: int, top_p: float, temperature: float
    ) -> None:
        """Frequencies match top-k followed by top-p within 5 standard deviations.

        Rare tokens count together.
        """
        params = SamplingParams(
            seed=9, max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, eos_stops=False
        )
        request = driver.sample_request(None, num_samples=200, params=params)
        drawn = [sample.tokens[0] for sample in driver.draw(request)]
        row = _scale_to_temperature(driver.distributions(driver.model(), request.prompt)[-1], temperature)
        expected = _filter_distribution(np.exp(row), top_k, top_p)
        counted = np.bincount(drawn, minlength=len(expected)) / len(drawn)
        assert not counted[expected == 0].any(), "a token that the filters remove was drawn"
        is_rare = expected < 0.02  # their counts are not normal
        counted, expected = (
            np.append(frequencies[~is_rare], frequencies[is_rare].sum()) for frequencies in (counted, expected)
        )
        bound = 5 * np.sqrt(expected * (1 - expected) / len(drawn)) + 1 / len(drawn)
        assert (np.abs(counted - expected) <= bound).all()

    # Results about prompts

    def test_prompt_results_are_those_of_the_trainer(self, driver: BackendDriver) -> None:
        """They are at temperature 1, regardless of the request's temperature.

        `last_n` limits what is reported.
        """
        model_id, capabilities = driver.model(steps=1), driver.capabilities
        prompt, count = np.array([3, 1, 2, 3, 9, 4, 11], np.int32), min(3, capabilities.max_topk_logprobs)
        targets = np.array([[-1, 5], [0, 1], [7, 7], [2, -1], [-1, -1], [3, 10]], np.int64)
        rows = driver.distributions(model_id, prompt)[:-1]

        sampler = driver.sampler(model_id)
        for last_n in (None, 2, 100):
            options = PromptOptions(
                logprobs=True,
                last_n=last_n,
                topk=count,
                target_tokens=read_only(targets) if capabilities.offers_target_logprobs else None,
            )

            params = SamplingParams(seed=1, max_tokens=1, temperature=0.5, eos_stops=False)
            request = driver.sample_request(sampler, params=params, options=options)
            [actual] = [
                delta.prompt
                for delta in driver.run_samples(replace(request, prompt=read_only(prompt)))
                if delta.prompt is not None
            ]
            self._check_prompt(actual, rows, prompt, last_n, count)
            if options.target_tokens is not None:
                own = np.take_along_axis(rows, np.maximum(targets, 0), axis=1)
                assert actual.targets is not None and actual.targets.dtype == np.float32
                np.testing.assert_allclose(
                    actual.targets, np.where(targets < 0, 0.0, own), rtol=0, atol=20 * self.tolerance
                )

    def _check_prompt(
        self, actual: PromptResult, rows: Floats, prompt: np.ndarray, last_n: int | None, count: int
    ) -> None:
        length, near = len(prompt), 20 * self.tolerance
        start = 1 if last_n is None else max(1, length - last_n)
        assert actual.logprobs is not None and actual.logprobs.shape == (length,)
        assert np.isnan(actual.logprobs[:start]).all()
        own = rows[np.arange(length - 1), prompt[1:]]
        np.testing.assert_allclose(actual.logprobs[start:], own[start - 1 :], rtol=0, atol=near)
        if count:
            assert actual.topk is not None and actual.topk.logprobs.shape == (length, count)
            assert (actual.topk.token_ids[:start] == 0).all() and (actual.topk.logprobs[:start] == -99999.0).all()
            best = -np.sort(-rows, axis=1)[start - 1 :, :count]
            np.testing.assert_allclose(actual.topk.logprobs[start:], best, rtol=0, atol=near)
            named = np.take_along_axis(rows[start - 1 :], actual.topk.token_ids[start:], axis=1)
            np.testing.assert_allclose(named, best, rtol=0, atol=near)

    def test_alternative_tokens_are_drawn_at_each_prompt_position(self, driver: BackendDriver) -> None:
        """They are at the request's temperature, and an equal seed draws the same tokens."""
        count = min(3, driver.capabilities.max_alt_tokens)
        if not count:
            return
        params = SamplingParams(seed=1, max_tokens=1, temperature=2.0, top_k=1, eos_stops=False)
        request = driver.sample_request(None, params=params, options=PromptOptions(alt_tokens_k=count))
        twice = [driver.run_samples(request)[0].prompt for _ in range(2)]
        alternatives = [prompt.alt_tokens for prompt in twice if prompt is not None and prompt.alt_tokens is not None]
        assert len(alternatives) == 2
        np.testing.assert_array_equal(alternatives[0].token_ids, alternatives[1].token_ids)

        rows = _scale_to_temperature(driver.distributions(driver.model(), request.prompt)[:-1], 2.0)
        own = np.take_along_axis(rows, alternatives[0].token_ids, axis=1)
        assert own.shape == (request.prompt.size - 1, count)
        np.testing.assert_allclose(alternatives[0].logprobs, own, rtol=0, atol=20 * self.tolerance)

    def test_tokens_have_text_or_there_is_no_tokenizer(self, driver: BackendDriver) -> None:
        """The engine finds stop strings in the text of tokens."""
        with contextlib.suppress(UserError):
            assert isinstance(driver.backend.text_of([3, 1, 2]), str)


def _scale_to_temperature(logprobs: Floats, temperature: float) -> Floats:
    """Convert log-probabilities from temperature 1 to another temperature."""
    scaled = logprobs / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


def _filter_distribution(probabilities: Floats, top_k: int, top_p: float) -> Floats:
    """Return the distribution after top-k and then top-p, see `SamplingParams`."""
    order = np.argsort(-probabilities, kind="stable")[: top_k if top_k > 0 else None]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < top_p * probabilities[order].sum()] if top_p < 1 else order
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result
