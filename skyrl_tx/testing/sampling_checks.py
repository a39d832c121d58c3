"""Samples of a backend and what it reports about prompts, a part of `BackendSuite`.

Distributions are compared with those of the trainer, which computes the log-probability of every token.
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
    """Agreement with the trainer, drawing, stops, parts of requests, and results about prompts."""

    tolerance = 1e-5
    highest_temperature = 100.0
    """At which all tokens are about equally likely; lower it if you refuse such a temperature by name."""
    filters: Mapping[str, float] = MappingProxyType({"top_k": 3, "top_p": 0.8})
    """Those of the test that log-probabilities are before any filter. Empty if yours are after them, by a setting."""

    # Agreement of trainer and sampler

    def test_trainer_and_sampler_logprobs_agree(self, driver: BackendDriver) -> None:
        """The logprobs of sampled tokens and of the prompt equal those of `forward`."""
        model_id = driver.model(steps=2)
        options = PromptOptions(logprobs=True)
        request = driver.sample_request(driver.sampler(model_id), options=options)
        self._check_agreement(driver, model_id, request)

    def test_a_fresh_model_equals_the_base_model(self, driver: BackendDriver) -> None:
        """B is zero, so the trainer of a fresh adapter gives the logprobs of the base model's samples."""
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
        [result] = driver.backend.forward(driver.batch([scored]))
        np.testing.assert_allclose(sampled, result.logprobs, rtol=0, atol=self.tolerance)

    # Sampling

    def test_samples_depend_on_the_seed_only(self, driver: BackendDriver) -> None:
        """Samples of one request differ; another request in the batch changes nothing."""
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
        """Temperature 0, top-k 1 and a very small top-p draw the same tokens."""
        ways = (
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, temperature=0.0),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_k=1),
            SamplingParams(seed=1, max_tokens=6, eos_stops=False, top_p=1e-6),
        )
        drawn = [driver.draw(driver.sample_request(None, params=params))[0].tokens for params in ways]
        assert drawn[0] == drawn[1] == drawn[2]

    def test_a_sample_ends_at_max_tokens_or_after_a_stop_token(self, driver: BackendDriver) -> None:
        """The sample includes the stop token."""
        long = driver.draw(driver.sample_request(None))[0]
        assert (len(long.tokens), long.stop_reason) == (8, "length")
        stop = long.tokens[3]
        params = SamplingParams(seed=7, max_tokens=8, eos_stops=False, stop_token_ids=(stop,))
        short = driver.draw(driver.sample_request(None, params=params))[0]
        assert short.stop_reason == "stop"
        assert short.tokens == long.tokens[: long.tokens.index(stop) + 1]

    def test_no_delta_follows_the_cancellation_of_a_request(self, driver: BackendDriver) -> None:
        """Other requests continue."""
        gone, stays = driver.sample_request(None), driver.sample_request(None)
        driver.backend.begin_sample(PreparedSampleBatch(requests=(gone, stays)))
        driver.backend.cancel_sample([gone.request_id, gone.request_id])
        ids = set()
        while new := driver.backend.step_sample():
            ids |= {delta.request_id for delta in new}
        assert ids == {stays.request_id}
        assert driver.backend.step_sample() == []

    def test_no_delta_follows_the_end_of_a_sample(self, driver: BackendDriver) -> None:
        """The other samples of the request continue."""
        params = SamplingParams(seed=7, max_tokens=60, eos_stops=False)
        request = driver.sample_request(None, num_samples=3, params=params)
        driver.backend.begin_sample(PreparedSampleBatch(requests=(request,)))
        deltas = driver.backend.step_sample()
        driver.backend.end_sample(request.request_id, 1)
        driver.backend.end_sample(request.request_id, 1)
        driver.backend.end_sample(driver.sample_request(None).request_id, 0)
        while new := driver.backend.step_sample():
            assert all(delta.index != 1 for delta in new)
            deltas += new
        ended = {delta.index for delta in deltas if delta.stop_reason == "length"}
        assert ended >= {0, 2}

    def test_samples_do_not_depend_on_the_parts_of_a_request(self, driver: BackendDriver) -> None:
        """A part may arrive while another is running. Cancelling the request cancels all parts."""
        request = driver.sample_request(None, num_samples=5, options=PromptOptions(logprobs=True))
        whole = driver.draw(request)
        rest = replace(request, first_index=2, num_samples=3, options=PromptOptions())
        parts = [PreparedSampleBatch(requests=(part,)) for part in (replace(request, num_samples=2), rest)]
        driver.backend.begin_sample(parts[0])
        deltas = driver.backend.step_sample()
        driver.backend.begin_sample(parts[1])
        while new := driver.backend.step_sample():
            deltas += new
        for index, expected in enumerate(whole):
            drawn = drawn_of(deltas, request.request_id, index)
            assert drawn.tokens == expected.tokens
            assert drawn.logprobs == pytest.approx(expected.logprobs, abs=self.tolerance)
        assert [delta.index for delta in deltas if delta.prompt is not None] == [0]
        for part in parts:
            driver.backend.begin_sample(part)
        driver.backend.cancel_sample([request.request_id])
        assert driver.backend.step_sample() == []

    def test_prompts_are_cached_for_one_scope_only(self, driver: BackendDriver) -> None:
        """A prompt of one scope is no hit in another one, and the samples are equal."""
        expected = driver.draw(driver.sample_request(None))
        for scope in ("ann", "bob"):
            request = driver.sample_request(None, cache_scope=scope)
            deltas = driver.run_samples(request)
            assert all(delta.prompt is None or delta.prompt.cache_hit_tokens == 0 for delta in deltas), scope
            assert [drawn_of(deltas, request.request_id, 0)] == expected

    def test_a_later_part_needs_no_first_part(self, driver: BackendDriver) -> None:
        """As after a restart of the engine, when the first samples have ended."""
        request = driver.sample_request(None, num_samples=4)
        whole = driver.draw(request)
        part = replace(driver.sample_request(None, num_samples=2), first_index=2)
        deltas = driver.run_samples(part)
        assert {delta.index for delta in deltas} == {2, 3}
        assert [drawn_of(deltas, part.request_id, index).tokens for index in (2, 3)] == [
            each.tokens for each in whole[2:]
        ]

    def test_samples_beyond_the_slots_wait(self, driver: BackendDriver) -> None:
        """An eighth more samples than slots arrive, and more with a cancelled request; all are computed."""
        num_samples = min(driver.capabilities.sample_slots, 64) + 3
        params = SamplingParams(seed=5, max_tokens=6, eos_stops=False)
        drawn = driver.draw(driver.sample_request(None, num_samples=num_samples, params=params))
        assert [len(each.tokens) for each in drawn] == [6] * num_samples
        alone = replace(driver.sample_request(None, params=params), first_index=num_samples - 1)
        deltas = driver.run_samples(alone)
        assert drawn_of(deltas, alone.request_id, num_samples - 1).tokens == drawn[-1].tokens

    def test_end_tokens_stop_a_sample_unless_they_are_turned_off(self, driver: BackendDriver) -> None:
        """At a temperature at which all tokens are about equally likely, some of many are an end token."""
        ends = set(driver.capabilities.eos_token_ids)
        temperature = self.highest_temperature
        params = SamplingParams(seed=3, max_tokens=48, temperature=temperature, eos_stops=False)
        whole = driver.draw(driver.sample_request(None, num_samples=48, params=params))
        stopped = driver.draw(driver.sample_request(None, num_samples=48, params=replace(params, eos_stops=True)))
        num_stopped = 0
        for one, other in zip(whole, stopped, strict=True):
            place = next((i for i, token in enumerate(one.tokens) if token in ends), None)
            num_stopped += place is not None
            assert other.tokens == (one.tokens if place is None else one.tokens[: place + 1])
            is_last = place is None
            assert other.stop_reason == ("length" if is_last else "stop")
        assert num_stopped > 0 or not ends or driver.capabilities.vocab_size > 1024

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
    def test_logprobs_of_samples_are_at_the_temperature(self, driver: BackendDriver, temperature: float) -> None:
        """Before any filter; greedy ones are at temperature 1. So are those of the likeliest tokens."""
        model_id = driver.model(steps=1)
        num_best = min(2, driver.capabilities.max_topk_logprobs)
        params = SamplingParams(seed=1, max_tokens=5, temperature=temperature, eos_stops=False)
        params = replace(params, **self.filters)
        options = PromptOptions(sample_topk=num_best)
        request = driver.sample_request(driver.sampler(model_id), params=params, options=options)
        deltas = driver.run_samples(request)
        drawn = drawn_of(deltas, request.request_id, 0)
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
            assert all(each is not None and each.logprobs.dtype == np.float32 for each in best)
            found = np.concatenate([each.logprobs for each in best if each is not None])
            np.testing.assert_allclose(found, -np.sort(-rows, axis=1)[:, :num_best], rtol=0, atol=near)

    @pytest.mark.parametrize(
        ("top_k", "top_p", "temperature"), [(-1, 1.0, 1.0), (4, 1.0, 1.5), (-1, 0.7, 1.0), (4, 0.6, 1.5)]
    )
    def test_tokens_follow_the_filtered_distribution(
        self, driver: BackendDriver, top_k: int, top_p: float, temperature: float
    ) -> None:
        """First top-k, then top-p of what is left; 5 standard deviations of each frequency, rare tokens as one."""
        params = SamplingParams(
            seed=9, max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, eos_stops=False
        )
        request = driver.sample_request(None, num_samples=200, params=params)
        drawn = [each.tokens[0] for each in driver.draw(request)]
        row = _scale_to_temperature(driver.distributions(driver.model(), request.prompt)[-1], temperature)
        expected = _filter_distribution(np.exp(row), top_k, top_p)
        found = np.bincount(drawn, minlength=len(expected)) / len(drawn)
        assert not found[expected == 0].any(), "a token that the filters remove was drawn"
        is_rare = expected < 0.02  # their counts are not normal
        found, expected = (np.append(each[~is_rare], each[is_rare].sum()) for each in (found, expected))
        bound = 5 * np.sqrt(expected * (1 - expected) / len(drawn)) + 1 / len(drawn)
        assert (np.abs(found - expected) <= bound).all()

    # Results about prompts

    def test_prompt_results_are_those_of_the_trainer(self, driver: BackendDriver) -> None:
        """At temperature 1, whatever the request's; `last_n` limits log-probabilities and likeliest tokens."""
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
            [found] = [
                delta.prompt
                for delta in driver.run_samples(replace(request, prompt=read_only(prompt)))
                if delta.prompt is not None
            ]
            self._check_prompt(found, rows, prompt, last_n, count)
            if options.target_tokens is not None:
                own = np.take_along_axis(rows, np.maximum(targets, 0), axis=1)
                assert found.targets is not None and found.targets.dtype == np.float32
                np.testing.assert_allclose(
                    found.targets, np.where(targets < 0, 0.0, own), rtol=0, atol=20 * self.tolerance
                )

    def _check_prompt(
        self, found: PromptResult, rows: Floats, prompt: np.ndarray, last_n: int | None, count: int
    ) -> None:
        length, near = len(prompt), 20 * self.tolerance
        start = 1 if last_n is None else max(1, length - last_n)
        assert found.logprobs is not None and found.logprobs.shape == (length,)
        assert np.isnan(found.logprobs[:start]).all()
        own = rows[np.arange(length - 1), prompt[1:]]
        np.testing.assert_allclose(found.logprobs[start:], own[start - 1 :], rtol=0, atol=near)
        if count:
            assert found.topk is not None and found.topk.logprobs.shape == (length, count)
            assert (found.topk.token_ids[:start] == 0).all() and (found.topk.logprobs[:start] == -99999.0).all()
            best = -np.sort(-rows, axis=1)[start - 1 :, :count]
            np.testing.assert_allclose(found.topk.logprobs[start:], best, rtol=0, atol=near)
            named = np.take_along_axis(rows[start - 1 :], found.topk.token_ids[start:], axis=1)
            np.testing.assert_allclose(named, best, rtol=0, atol=near)

    def test_alternative_tokens_are_drawn_at_each_prompt_position(self, driver: BackendDriver) -> None:
        """With log-probabilities at the request's temperature, and equal ones for an equal seed."""
        count = min(3, driver.capabilities.max_alt_tokens)
        if not count:
            return
        params = SamplingParams(seed=1, max_tokens=1, temperature=2.0, top_k=1, eos_stops=False)
        request = driver.sample_request(None, params=params, options=PromptOptions(alt_tokens_k=count))
        twice = [driver.run_samples(request)[0].prompt for _ in range(2)]
        alternatives = [each.alt_tokens for each in twice if each is not None and each.alt_tokens is not None]
        assert len(alternatives) == 2
        np.testing.assert_array_equal(alternatives[0].token_ids, alternatives[1].token_ids)
        rows = _scale_to_temperature(driver.distributions(driver.model(), request.prompt)[:-1], 2.0)
        own = np.take_along_axis(rows, alternatives[0].token_ids, axis=1)
        assert own.shape == (request.prompt.size - 1, count)
        np.testing.assert_allclose(alternatives[0].logprobs, own, rtol=0, atol=20 * self.tolerance)

    def test_tokens_have_text_or_there_is_no_tokenizer(self, driver: BackendDriver) -> None:
        """The engine looks for stop strings in it."""
        with contextlib.suppress(UserError):
            assert isinstance(driver.backend.text_of([3, 1, 2]), str)


def _scale_to_temperature(logprobs: Floats, temperature: float) -> Floats:
    """Return log-probabilities at another temperature than 1."""
    scaled = logprobs / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


def _filter_distribution(probabilities: Floats, top_k: int, top_p: float) -> Floats:
    """Return the distribution after top-k, then top-p, see `SamplingParams`."""
    order = np.argsort(-probabilities, kind="stable")[: top_k if top_k > 0 else None]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before < top_p * probabilities[order].sum()] if top_p < 1 else order
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result
