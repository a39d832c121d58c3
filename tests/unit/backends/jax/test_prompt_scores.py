"""Scores of prompt positions equal the scores of a full forward pass."""

from functools import partial

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.sample import prompt_scores
from skyrl_tx.backends.jax.sample.prompt_scores import NOT_COMPUTED, PromptScores
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from tests.support.fast_jit import fast_jit

BUCKET = 64
CHUNK = 32
MAX_TOPK = 4
forward = fast_jit(models.forward, static_argnames="config")


def make_request(prompt, temperature=1.0, seed=0, **options):
    return SampleRequest(
        request_id=RequestId("r"),
        sampler=None,
        prompt=prompt,
        num_samples=1,
        params=SamplingParams(seed=seed, max_tokens=1, temperature=temperature),
        options=PromptOptions(**options),
    )


@pytest.fixture
def score(tiny, monkeypatch):
    """Return a function that scores a prompt in chunks of 32 positions and windows of 16."""
    monkeypatch.setattr(prompt_scores, "WINDOW", 16)

    def run(prompt, temperature=1.0, seed=0, **options):
        request = make_request(prompt, temperature, seed, **options)
        padded = np.pad(prompt, (0, BUCKET - prompt.size))
        hidden = forward(tiny.params, tiny.config, padded[None])[0]
        scores = PromptScores(tiny.params, request, max_topk=MAX_TOPK, max_alt=32)
        for start in range(0, prompt.size, CHUNK):
            last = min(start + CHUNK, prompt.size) - 1
            scores.add(None, 0, hidden[start : start + CHUNK], hidden[last : last + 1], start)

        result = scores.make_result()
        logits = np.asarray(models.logits(tiny.params, hidden))[: prompt.size - 1]
        return result, partial(log_softmax, logits)

    return run


def log_softmax(logits, temperature=1.0):
    scaled = logits.astype(np.float64) / temperature
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


PROMPT = np.random.default_rng(5).integers(2, 256, 53, dtype=np.int32)


def test_logprobs_of_every_position_but_the_first(score):
    result, expected = score(PROMPT, temperature=0.3, logprobs=True)
    assert np.isnan(result.logprobs[0]) and result.topk is None and result.targets is None and result.alt_tokens is None
    np.testing.assert_allclose(result.logprobs[1:], expected()[np.arange(52), PROMPT[1:]], atol=1e-5)


def test_last_n_limits_the_scored_positions(score):
    result, expected = score(PROMPT, logprobs=True, topk=2, last_n=20)
    assert np.isnan(result.logprobs[:33]).all()
    np.testing.assert_allclose(result.logprobs[33:], expected()[np.arange(32, 52), PROMPT[33:]], atol=1e-5)
    assert (result.topk.token_ids[:33] == 0).all() and (result.topk.logprobs[:33] == NOT_COMPUTED).all()
    best = np.argsort(-expected()[32:], kind="stable")[:, :2]
    np.testing.assert_array_equal(result.topk.token_ids[33:], best)
    np.testing.assert_allclose(result.topk.logprobs[33:], np.take_along_axis(expected()[32:], best, -1), atol=1e-5)


def test_targets_are_scored_and_skipped_targets_are_zero(score):
    targets = np.random.default_rng(6).integers(0, 256, (52, 3), dtype=np.int64)
    targets[[0, 7, 51], [0, 1, 2]] = -1
    result, expected = score(PROMPT, target_tokens=targets, last_n=2)
    wanted = np.where(targets < 0, 0.0, np.take_along_axis(expected(), np.maximum(targets, 0), -1))
    assert result.targets.dtype == np.float32 and result.logprobs is None
    np.testing.assert_allclose(result.targets, wanted, atol=1e-5)


def test_alternatives_follow_the_distribution_at_the_request_temperature(score):
    seen = []
    for seed in range(20):
        result, expected = score(PROMPT, temperature=0.5, seed=seed, alt_tokens_k=32)
        tokens, logprobs = result.alt_tokens.token_ids, result.alt_tokens.logprobs
        assert tokens.shape == (52, 32)
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected(0.5), tokens, -1), atol=1e-4)
        seen.append(tokens[30])
    p = np.exp(expected(0.5)[30])
    counts = np.bincount(np.concatenate(seen), minlength=256)
    often = p * counts.sum() >= 8
    statistic = float(((counts - p * counts.sum())[often] ** 2 / (p * counts.sum())[often]).sum())
    assert abs(statistic - often.sum()) < 4 * np.sqrt(2 * often.sum())


def test_greedy_alternatives_are_the_most_likely_token(score):
    result, expected = score(PROMPT, temperature=0.0, alt_tokens_k=2)
    best = expected().argmax(-1)
    assert (result.alt_tokens.token_ids == best[:, None]).all()
    np.testing.assert_allclose(result.alt_tokens.logprobs[:, 1], expected().max(-1), atol=1e-5)


@pytest.mark.parametrize(("options", "num_bytes"), [({}, 4), ({"topk": 1}, 4 + 8 * MAX_TOPK)])
def test_kept_scores_have_the_bits_of_new_ones_and_are_small(tiny, options, num_bytes):
    """Requests with any number of likeliest tokens share the scores.

    On the device, a window also has 32 columns of targets.
    """

    def add(scores, prompt, start):
        hidden = forward(tiny.params, tiny.config, np.pad(prompt, (0, BUCKET - prompt.size))[None])[0]
        last = min(start + CHUNK, prompt.size) - 1
        scores.add(None, 0, hidden[start : start + CHUNK], hidden[last : last + 1], start)

    first, second, reused = (
        PromptScores(tiny.params, make_request(prompt, logprobs=True, **options), max_topk=MAX_TOPK, max_alt=32)
        for prompt in (PROMPT[:40], PROMPT, PROMPT)
    )
    for start in (0, CHUNK):
        add(first, PROMPT[:40], start)
        add(second, PROMPT, start)
    reused.reuse(first.fetch(), CHUNK)
    add(reused, PROMPT, CHUNK)

    found, expected = reused.make_result(), second.make_result()
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    if options:
        np.testing.assert_array_equal(found.topk.token_ids, expected.topk.token_ids)
        np.testing.assert_array_equal(found.topk.logprobs, expected.topk.logprobs)
    leaves = jax.tree.leaves(first.fetch()[0].windows)
    assert all(isinstance(leaf, np.ndarray) and leaf.base is None for leaf in leaves)
    assert sum(leaf.nbytes for leaf in leaves) == num_bytes * CHUNK
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(first.fetch()[CHUNK].windows)) == num_bytes * 8, "not padded"
    assert reused.fetch()[0] is first.fetch()[0] is not second.fetch()[0], "prompts share scores, and do not copy them"


def test_a_prompt_of_one_token_has_no_scores(score):
    result, _ = score(PROMPT[:1], logprobs=True, topk=1, alt_tokens_k=2, target_tokens=np.zeros((0, 3), np.int64))
    assert np.isnan(result.logprobs).tolist() == [True]
    assert result.topk.logprobs.tolist() == [[NOT_COMPUTED]]
    assert result.alt_tokens.token_ids.shape == (0, 2) and result.targets.shape == (0, 3)
