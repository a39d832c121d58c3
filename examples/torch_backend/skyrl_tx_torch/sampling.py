"""Draws tokens from logits and computes log-probabilities of prompts, in float64 with numpy on the host.

Shapes: T tokens, V vocabulary, K targets or top tokens of a position.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_tx.contract.arrays import Float32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample
from skyrl_tx_torch.model import Model

Floats = NDArray[np.float64]
_NOT_COMPUTED = -99999.0
_CHUNK = 256


def decode(model: Model, sample: OpenSample, num_tokens: int, prompt: PromptResult | None) -> SampleDelta:
    """Draw at most `num_tokens` tokens of a sample. The state of a sample is its next logits and its KV cache."""
    # Draw the tokens one after another.
    tokens: list[int] = []
    rows: list[Floats] = []
    logits_V, cache = sample.state
    first = sample.num_drawn
    for position in range(first, first + min(num_tokens, sample.num_left)):
        if position:
            last = tokens[-1] if tokens else sample.last_token
            logits_V, cache = model.extend(torch.tensor([last], device=model.device), cache)
        row_V = log_softmax(logits_V.double().cpu().numpy(), sample.request.params.temperature)
        rows.append(row_V)
        tokens.append(choose(row_V, sample.request.params, sample.uniform(position)))
        if tokens[-1] in sample.stops:
            break

    # Add their log-probabilities.
    sample.state = logits_V, cache
    logprobs_TV, count = np.stack(rows), sample.request.options.sample_topk
    logprobs = logprobs_TV[np.arange(len(tokens)), tokens].astype(np.float32)
    topk = likeliest(logprobs_TV, count) if count else None
    return sample.take(np.array(tokens, np.int32), logprobs, topk, prompt)


def log_softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return log-probabilities at a temperature, as defined by `SampleDelta`."""
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / (temperature or 1.0)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def choose(logprobs_V: Floats, params: SamplingParams, uniform: float) -> int:
    """Return the token that a uniform number in [0, 1) draws after top-k and top-p, as defined by `SamplingParams`."""
    if np.isnan(logprobs_V).any():
        return 0  # the model has diverged; its log-probabilities are NaN as well
    if params.temperature == 0:
        return int(np.argmax(logprobs_V))
    order, weights = np.arange(logprobs_V.size), np.exp(logprobs_V)
    if params.top_k > 0 or params.top_p < 1:
        order = np.argsort(-logprobs_V, kind="stable")[: params.top_k if params.top_k > 0 else None]
        weights = weights[order]
        until = np.cumsum(weights)
        if params.top_p < 1:
            weights = np.where(until - weights < params.top_p * until[-1], weights, 0.0)
            weights[0] = max(weights[0], np.finfo(np.float64).tiny)
    until = np.cumsum(weights)
    return int(order[min(np.searchsorted(until, uniform * until[-1], side="right"), np.flatnonzero(weights)[-1])])


def likeliest(logprobs_TV: Floats, count: int) -> TopK:
    """Return the top tokens of each row. Among equal log-probabilities the lower id comes first."""
    ids = np.argsort(-logprobs_TV, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(logprobs_TV, ids, axis=1)
    return TopK(token_ids=ids.astype(np.int32), logprobs=values.astype(np.float32))


def describe_prompt(model: Model, request: SampleRequest) -> PromptResult:
    """Return the log-probabilities of the prompt that a request asks for. The caller has applied the adapter."""
    # Prepare empty results.
    options, prompt = request.options, request.prompt
    length = prompt.size
    if not options.wants_prompt:
        return PromptResult()
    start = 1 if options.last_n is None else max(1, length - options.last_n)
    logprobs = np.full(length, np.nan, np.float32)
    topk = _empty(length, options.topk, _NOT_COMPUTED)
    alternatives = _empty(length - 1, options.alt_tokens_k, 0.0)
    given = options.target_tokens
    targets: Float32Array | None = None if given is None else np.zeros(given.shape, np.float32)

    # Fill them, one chunk of positions at a time.
    hidden_TD = model.compute_hidden(torch.from_numpy(prompt.copy()).to(model.device)) if length > 1 else None
    for begin in range(0, length - 1, _CHUNK):
        assert hidden_TD is not None
        rows = np.arange(begin, min(begin + _CHUNK, length - 1))
        logits_TV = model.logits(hidden_TD[begin : rows[-1] + 1]).double().cpu().numpy()
        row_TV = log_softmax(logits_TV)
        logprobs[rows + 1] = row_TV[np.arange(rows.size), prompt[rows + 1]]
        if options.topk:
            best = likeliest(row_TV, options.topk)
            topk.token_ids[rows + 1], topk.logprobs[rows + 1] = best.token_ids, best.logprobs
        if given is not None and targets is not None:
            values = np.take_along_axis(row_TV, np.maximum(given[rows], 0), axis=1)
            targets[rows] = np.where(given[rows] < 0, 0.0, values)
        if options.alt_tokens_k:
            _draw_alternatives(alternatives, request, rows, logits_TV)

    # Positions before `last_n` were not requested.
    logprobs[:start], topk.token_ids[:start], topk.logprobs[:start] = np.nan, 0, _NOT_COMPUTED
    return PromptResult(
        logprobs=logprobs if options.logprobs else None,
        topk=topk if options.topk else None,
        targets=targets,
        alt_tokens=alternatives if options.alt_tokens_k else None,
    )


def _draw_alternatives(into: TopK, request: SampleRequest, rows: Sequence[int] | Any, logits_TV: Floats) -> None:
    temperature = request.params.temperature
    params = SamplingParams(seed=0, temperature=temperature)  # without filters
    for position, row_V in zip(rows, log_softmax(logits_TV, temperature), strict=True):
        draw = np.random.default_rng([request.params.seed % 2**64, int(position), 1])
        for index in range(into.token_ids.shape[1]):
            token = choose(row_V, params, draw.random())
            into.token_ids[position, index], into.logprobs[position, index] = token, row_V[token]


def _empty(num_rows: int, count: int, fill: float) -> TopK:
    return TopK(token_ids=np.zeros((num_rows, count), np.int32), logprobs=np.full((num_rows, count), fill, np.float32))
