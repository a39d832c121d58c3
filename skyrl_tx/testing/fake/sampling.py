"""Sampling from the fake model, one sample and one decode slice at a time.

Benchmarks use the fake model to measure the server alone, so a token must not take long. Tests that
open data of earlier releases compare tokens, so they must not change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample
from skyrl_tx.testing.fake.bigram import Floats, Pair, log_softmax, logits

_NO_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of the next token."""

    logprobs_V: Floats
    """Log-probabilities at the temperature, before filters. Greedy uses temperature 1."""
    tokens: NDArray[np.intp]
    """The tokens that remain after the filters, likeliest first."""
    until: Floats
    """The probability of each remaining token and of all before it. The last one is 1."""

    def draw(self, entropy: Sequence[int]) -> int:
        """Draw one token. Equal `entropy` gives the same token."""
        # The same number as default_rng(entropy).random(), which takes longer
        number = (np.random.PCG64(_split_words(entropy)).random_raw() >> 11) * 2.0**-53
        return int(self.tokens[np.searchsorted(self.until, number, side="right")])


def decode(sample: OpenSample, adapter: Pair | None, vocab_size: int, slice_tokens: int) -> SampleDelta:
    """Draw up to `slice_tokens` tokens of a sample, or fewer if it ends."""
    request, params = sample.request, sample.request.params
    # The first sample of a request also reports about the prompt.
    is_first = sample.num_drawn == 0 and sample.index == 0
    prompt = describe_prompt(request, adapter, vocab_size) if is_first else None
    # Draw tokens until the sample ends.
    tokens: list[int] = []
    logprobs: list[float] = []
    rows: list[Floats] = []
    adjuster = sample.adjuster if sample.is_adjusted else None
    num_steps = 1 if adjuster else min(slice_tokens, sample.num_left)
    filters = (params.temperature, params.top_k, params.top_p, params.active_controls.min_p)
    for position in range(sample.num_drawn, sample.num_drawn + num_steps):
        previous = tokens[-1] if tokens else sample.last_token
        if adapter is None and adjuster is None:
            distribution = _make_base_distribution(previous, vocab_size, filters)
        else:
            logits_V = logits(np.array([previous], np.int32), adapter, vocab_size)[0]
            distribution = make_distribution(adjuster.adjust(logits_V) if adjuster else logits_V, *filters)

        tokens.append(distribution.draw((params.seed % 2**64, sample.index, position)))
        reported_V = distribution.logprobs_V
        if params.raw_logprobs:
            reported_V = log_softmax(logits(np.array([previous], np.int32), adapter, vocab_size)[0])
        logprobs.append(reported_V[tokens[-1]])
        rows.append(reported_V)
        if tokens[-1] in sample.stops:
            break
    # Look up the likeliest tokens.
    count = request.options.sample_topk
    topk = top(np.stack(rows), count) if count else None
    return sample.take(np.array(tokens, np.int32), np.array(logprobs, np.float32), topk, prompt)


def make_distribution(
    logits_V: Floats, temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> Distribution:
    """Return the distribution of a token. A model that has diverged gives token 0."""
    logprobs_V = log_softmax(logits_V / (temperature or 1.0))
    weights = np.exp(logprobs_V)
    if math.isnan(weights[0]):
        return Distribution(logprobs_V, np.array([0]), np.ones(1))  # the log-probabilities are NaN as well
    if temperature == 0:
        return Distribution(logprobs_V, np.array([np.argmax(logprobs_V)]), np.ones(1))

    # Min-p.
    if min_p:
        weights = np.where(weights < min_p * weights.max(), 0.0, weights)
    # Top-k.
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    weights = weights[order]

    # Top-p of the remaining tokens: the likeliest ones until their sum reaches top_p, but at least
    # one.
    if top_p < 1:
        weights = weights[np.cumsum(weights) - weights < top_p * weights.sum()]
    until = np.cumsum(weights / weights.sum())
    return Distribution(logprobs_V, order[: len(until)], until / until[-1])


@lru_cache(maxsize=4096)
def _make_base_distribution(token: int, vocab_size: int, filters: tuple[float, int, float, float]) -> Distribution:
    """Return the distribution after one token, without an adapter."""
    return make_distribution(logits(np.array([token], np.int32), None, vocab_size)[0], *filters)


def _split_words(entropy: Sequence[int]) -> NDArray[np.uint32]:
    """Return words of 32 bits, as numpy splits the numbers of a seed."""
    words: list[int] = []
    for number in entropy:
        words += [number % 2**32, number >> 32] if number >= 2**32 else [number]
    return np.array(words, np.uint32)


def describe_prompt(request: SampleRequest, adapter: Pair | None, vocab_size: int) -> PromptResult:
    """Return the requested results about the prompt.

    Row i of the logits predicts position i + 1.
    """
    options, prompt, length = request.options, request.prompt, len(request.prompt)
    if not options.wants_prompt:
        return PromptResult()
    logits_TV = logits(prompt[:-1], adapter, vocab_size)
    logprobs_TV = log_softmax(logits_TV)
    start = 1 if options.last_n is None else max(1, length - options.last_n)
    logprobs = topk = targets = alt_tokens = None

    if options.logprobs:
        logprobs = np.full(length, np.nan, np.float32)
        logprobs[start:] = logprobs_TV[np.arange(length - 1), prompt[1:]][start - 1 :]
    if options.topk:
        likeliest = top(logprobs_TV[start - 1 :], options.topk)
        ids = np.zeros((length, options.topk), np.int32)
        values = np.full((length, options.topk), _NO_LOGPROB, np.float32)
        ids[start:], values[start:] = likeliest.token_ids, likeliest.logprobs
        topk = TopK(token_ids=ids, logprobs=values)
    if options.target_tokens is not None:
        values = np.take_along_axis(logprobs_TV, np.maximum(options.target_tokens, 0), axis=1)
        targets = np.where(options.target_tokens < 0, 0.0, values).astype(np.float32)
    if options.alt_tokens_k:
        alt_tokens = _draw_alternatives(logits_TV, options.alt_tokens_k, request.params)
    return PromptResult(logprobs=logprobs, topk=topk, targets=targets, alt_tokens=alt_tokens)


def top(logprobs_TV: Floats, count: int) -> TopK:
    """Return the likeliest tokens of each row. Of equally likely tokens, the lower id is first."""
    ids = np.argsort(-logprobs_TV, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(logprobs_TV, ids, axis=1)
    return TopK(token_ids=ids.astype(np.int32), logprobs=values.astype(np.float32))


def _draw_alternatives(logits_TV: Floats, count: int, params: SamplingParams) -> TopK:
    ids = np.zeros((len(logits_TV), count), np.int32)
    values = np.zeros((len(logits_TV), count), np.float32)
    for position, logits_V in enumerate(logits_TV):
        distribution = make_distribution(logits_V, params.temperature)
        for k in range(count):
            token = distribution.draw((params.seed % 2**64, k, position, 1))
            ids[position, k], values[position, k] = token, distribution.logprobs_V[token]
    return TopK(token_ids=ids, logprobs=values)
