"""Scored prompts that share chunks have the bits of prompts that share nothing, and the scores of the trainer.

`test_prefill.py` and `test_kept_states.py` test on fake programs which prompts share chunks.
"""

import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import PromptResult
from tests.support.fast_jit import fast_jit
from tests.support.sample_requests import BLUE, RED, make_prompt, make_request, run
from tests.support.tiny import (
    DENSE,
    HYBRID,
    LATENTS,
    TINY_CONFIG,
    TinyModel,
    load_model,
    make_model_runner,
    tiny_directory,
)

PREFIX, NUM_ANSWERS = 96, 16
STD = 0.1
"""The standard deviation of weights, see `test_state.py`."""


@pytest.fixture(
    scope="module",
    params=[
        DENSE,
        pytest.param(HYBRID, marks=pytest.mark.slow),
        pytest.param(LATENTS, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return load_model(tiny_directory(request.param, STD))


def start(model: TinyModel, prefix_cache_tokens: int) -> SampleScheduler:
    config = TINY_CONFIG.model_copy(update={"prefix_cache_tokens": prefix_cache_tokens})
    runner = make_model_runner(model.params, model.config, config)
    scheduler = SampleScheduler(runner, config, runner.memory, ())
    scheduler.load(RED, model.adapter(1))
    scheduler.load(BLUE, model.adapter(2))
    return scheduler


def make_group(**options: int) -> list[SampleRequest]:
    """Return requests as `compute_logprobs` sends them, for answers of different lengths to one prompt.

    The prefix is the last whole chunk of the first prompt, so a model with states keeps one there.
    """
    prefix = make_prompt(PREFIX)
    prompts = [np.concatenate([prefix, make_prompt(10 + 3 * n, seed=n + 1)]) for n in range(NUM_ANSWERS)]
    scores = PromptOptions(logprobs=True, **options)
    return [make_request(f"{n}", prompt, sampler=RED, max_tokens=1, options=scores) for n, prompt in enumerate(prompts)]


def score_with_trainer(model: TinyModel, tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's log-probability of every token after the first."""

    @fast_jit
    def compute(params, token_1T, adapter):
        hidden_1TD = models.forward(params, model.config, token_1T[:, :-1], adapter)
        return models.target_logprobs(params, hidden_1TD, token_1T[:, 1:], adapter)[0]

    length = PREFIX + 10 + 3 * NUM_ANSWERS
    padded_1T = np.pad(tokens, (0, length - tokens.size))[None]
    return np.asarray(compute(model.params, padded_1T, model.adapter(1)))[: tokens.size - 1]


def assert_equal_bits(found: PromptResult, expected: PromptResult) -> None:
    assert found.logprobs is not None and expected.logprobs is not None
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    assert (found.topk is None) == (expected.topk is None)
    if found.topk is not None and expected.topk is not None:
        assert found.topk.token_ids.tobytes() == expected.topk.token_ids.tobytes()
        assert found.topk.logprobs.tobytes() == expected.topk.logprobs.tobytes()


def test_a_group_has_the_bits_of_single_requests_and_the_scores_of_the_trainer(model):
    requests, cold = make_group(), start(model, prefix_cache_tokens=0)
    results = run(start(model, prefix_cache_tokens=16384), *requests)
    assert list(results.cache_hits.values()) == [0] + [PREFIX] * (NUM_ANSWERS - 1)

    for request in requests:
        alone = run(cold, request)
        assert results.bits[request.request_id, 0] == alone.bits[request.request_id, 0]
        found, expected = results.prompt(request.request_id), alone.prompt(request.request_id)
        assert_equal_bits(found, expected)
        trained = score_with_trainer(model, request.prompt)
        np.testing.assert_allclose(found.logprobs[1:], trained, atol=1e-5)


@pytest.mark.parametrize("options", [{"topk": 3}, {"last_n": 25, "topk": 2}, {"last_n": 9}])
def test_other_kinds_of_scores_share_too(options):
    """A prompt, an equal one, and one with another answer. Each is scored with two samplers."""
    model, (first, *_, last) = load_model(tiny_directory(DENSE, STD)), make_group(**options)
    warm, cold = start(model, prefix_cache_tokens=16384), start(model, prefix_cache_tokens=0)
    for name, prompt in (("first", first.prompt), ("equal", first.prompt), ("last", last.prompt)):
        mine, other = (
            make_request(f"{sampler} {name}", prompt, sampler=sampler, max_tokens=1, options=first.options)
            for sampler in (RED, BLUE)
        )
        found, expected = (run(scheduler, mine, other) for scheduler in (warm, cold))
        for request in (mine, other):
            assert_equal_bits(found.prompt(request.request_id), expected.prompt(request.request_id))
        assert found.prompt(mine.request_id).logprobs.tobytes() != found.prompt(other.request_id).logprobs.tobytes()
