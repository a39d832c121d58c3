"""Sampling from the fake model, one sample and one decode slice at a time.

Benchmarks use the fake model to measure the server alone, so a token must not take long. Tests that
open data of earlier releases compare tokens, so they must not change.
"""

import math
from functools import lru_cache

import numpy as np

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample
from skyrl_tx.testing.fake.bigram import Floats, Pair, log_softmax, logits

_NO_LOGPROB = -99999.0


def decode(sample: OpenSample, adapter: Pair | None, vocab_size: int, slice_tokens: int) -> SampleDelta:
    """Draw up to `slice_tokens` tokens of a sample, or fewer if it ends."""
    request, params = sample.request, sample.request.params
    # The first sample of a request also reports about the prompt.
    is_first = sample.num_drawn == 0 and sample.index == 0
    prompt = describe_prompt(request, adapter, vocab_size) if is_first else None
    # Draw tokens until the sample ends.
    tokens: list[int] = []
    rows: list[Floats] = []
    adjuster = sample.adjuster if sample.is_adjusted else None
    num_steps = 1 if adjuster else min(slice_tokens, sample.num_left)
    for position in range(sample.num_drawn, sample.num_drawn + num_steps):
        previous = tokens[-1] if tokens else sample.last_token
        if adapter is None and adjuster is None:
            rows.append(_base_logprobs(previous, vocab_size, params.temperature))
        else:
            logits_V = logits(np.array([previous], np.int32), adapter, vocab_size)[0]
            logits_V = adjuster.adjust(logits_V) if adjuster else logits_V
            rows.append(scaled_logprobs(logits_V, params.temperature))

        draw = np.random.default_rng([params.seed % 2**64, sample.index, position])
        tokens.append(choose(rows[-1], params, draw))
        if tokens[-1] in sample.stops:
            break
    # Look up the log-probabilities of the tokens.
    logprobs_TV, count = np.stack(rows), request.options.sample_topk
    logprobs = logprobs_TV[np.arange(len(tokens)), tokens].astype(np.float32)
    return sample.take(np.array(tokens, np.int32), logprobs, top(logprobs_TV, count) if count else None, prompt)


def scaled_logprobs(logits_V: Floats, temperature: float) -> Floats:
    """Return log-probabilities at the temperature, before filters. Greedy uses temperature 1."""
    return log_softmax(logits_V / (temperature or 1.0))


@lru_cache(maxsize=4096)
def _base_logprobs(token: int, vocab_size: int, temperature: float) -> Floats:
    """Return the log-probabilities after one token, without an adapter."""
    return scaled_logprobs(logits(np.array([token], np.int32), None, vocab_size)[0], temperature)


def choose(logprobs_V: Floats, params: SamplingParams, draw: np.random.Generator) -> int:
    """Draw one token. A model that has diverged gives token 0.

    The log-probabilities come from `scaled_logprobs`.
    """
    if params.temperature == 0:
        return int(np.argmax(logprobs_V))
    weights = np.exp(logprobs_V)
    if math.isnan(weights[0]):
        return 0  # the model has diverged; its log-probabilities are NaN as well

    # Min-p.
    if min_p := params.active_controls.min_p:
        weights = np.where(weights < min_p * weights.max(), 0.0, weights)
    # Top-k.
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = weights[order]

    # Top-p of the remaining tokens: the likeliest ones until their sum reaches top_p, but at least
    # one.
    if params.top_p < 1:
        weights = weights[np.cumsum(weights) - weights < params.top_p * weights.sum()]

    # `draw.choice` would draw the same token, but checks its arguments for longer than that.
    until = np.cumsum(weights / weights.sum())
    return int(order[np.searchsorted(until / until[-1], draw.random(), side="right")])


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
        logprobs_V = scaled_logprobs(logits_V, params.temperature)
        for k in range(count):
            draw = np.random.default_rng([params.seed % 2**64, k, position, 1])
            token = choose(logprobs_V, SamplingParams(seed=0, temperature=params.temperature), draw)
            ids[position, k], values[position, k] = token, logprobs_V[token]
    return TopK(token_ids=ids, logprobs=values)
