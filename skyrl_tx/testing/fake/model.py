"""The fake model: a table of next-token logits with a low-rank adapter.

The base model counts: token i is followed by token i + 1 (the last token by 0) with probability
1/2, and by each of the other V - 1 tokens with probability 1 / (2 (V - 1)). The adapter adds
`(alpha / r) B A[:, i]` to the logits after token i, so that losses have real gradients.

Benchmarks use the fake model to measure the server alone, so a token must not take long. Tests that
open data of earlier releases compare tokens, so they must not change.

Shapes: T tokens, V vocabulary, R rank, K targets of one position.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from typing_extensions import override

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, SamplingParams
from skyrl_tx.contract.results import PromptResult, SampleDelta, TopK
from skyrl_tx.contract.samples import OpenSample
from skyrl_tx.contract.state_files import ALPHA, CONFIG_FILE, FILES, PREFIX, STEP, adapter_config

Floats = NDArray[np.float64]

_MODULE = f"{PREFIX}table"
_FIRST, _SECOND = "first.", "second."
"""Prefixes of moments in files.

They differ from `state_files`, because stored data has these prefixes.
"""
_FORMER_GRADIENT = "gradient."
"""The prefix of gradients in files of releases up to 0.2."""
_NO_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One array per matrix of an adapter: its weights, gradients or moments."""

    a_RV: Floats
    b_VR: Floats

    @classmethod
    def zeros_like(cls, other: "Pair") -> "Pair":
        """Return zeros in the shape of another pair."""
        return cls(np.zeros_like(other.a_RV), np.zeros_like(other.b_VR))

    def __add__(self, other: "Pair") -> "Pair":
        return Pair(self.a_RV + other.a_RV, self.b_VR + other.b_VR)

    @property
    def norm(self) -> float:
        """The global L2 norm."""
        return float(np.sqrt((self.a_RV**2).sum() + (self.b_VR**2).sum()))


def fresh_adapter(spec: LoraSpec, vocab_size: int) -> Pair:
    """Return a new adapter: A is drawn from the seed and B is zero, so it changes nothing yet."""
    draw = np.random.default_rng(spec.seed % 2**64)
    return Pair(draw.standard_normal((spec.rank, vocab_size)), np.zeros((vocab_size, spec.rank)))


def logits(tokens: NDArray[np.int32], adapter: Pair | None, vocab_size: int) -> Floats:
    """Return the logits of the next token after each token, [T, V]."""
    logits_TV = np.zeros((len(tokens), vocab_size))
    logits_TV[np.arange(len(tokens)), (tokens + 1) % vocab_size] = np.log(vocab_size - 1)
    if adapter is not None:
        # One row at a time, because a matrix product may round a row differently in another batch,
        # and the trainer and the sampler must agree.
        for row_V, hidden_R in zip(logits_TV, np.ascontiguousarray(adapter.a_RV.T[tokens]), strict=True):
            row_V += (ALPHA / len(hidden_R)) * (adapter.b_VR @ hidden_R)
    return logits_TV


def log_softmax(logits_TV: Floats) -> Floats:
    """Return log-probabilities over the last axis."""
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True))


def compute_gradient(
    tokens: NDArray[np.int32], targets_TK: NDArray[np.int32], d_logprobs_TK: Floats, logprobs_TV: Floats, adapter: Pair
) -> Pair:
    """Return the adapter's gradient, given d loss / d log-probability of each target."""
    d_logits_TV = -np.exp(logprobs_TV) * d_logprobs_TK.sum(axis=1, keepdims=True)
    np.add.at(d_logits_TV, (np.arange(len(tokens))[:, None], targets_TK), d_logprobs_TK)
    d_logits_TV *= ALPHA / len(adapter.a_RV)
    d_a_VR = np.zeros_like(adapter.a_RV.T)
    np.add.at(d_a_VR, tokens, d_logits_TV @ adapter.b_VR)
    return Pair(np.ascontiguousarray(d_a_VR.T), d_logits_TV.T @ adapter.a_RV.T[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The optimizer state of AdamW: first and second moments, and the number of steps."""

    first: Pair
    second: Pair
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a model. It is immutable, so every change creates a new state."""

    weights: Pair
    moments: Moments
    gradient: Pair | None = None

    @classmethod
    def make_untrained(cls, weights: Pair) -> "State":
        """Return a state with these weights, a fresh optimizer and no gradient."""
        zeros = Pair.zeros_like(weights)
        return cls(weights=weights, moments=Moments(first=zeros, second=zeros, step=0))

    def take_step(self, params: OptimizerParams) -> tuple["State", float]:
        """Take one AdamW step as torch does. Returns the new state and the norm before clipping."""
        gradient = self.gradient or Pair.zeros_like(self.weights)
        norm = gradient.norm
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        step = self.moments.step + 1

        def update(weight: Floats, gradient: Floats, first: Floats, second: Floats) -> tuple[Floats, Floats, Floats]:
            gradient = gradient * clip
            first = params.beta1 * first + (1 - params.beta1) * gradient
            second = params.beta2 * second + (1 - params.beta2) * gradient**2
            scale = np.sqrt(second / (1 - params.beta2**step)) + params.eps
            decayed = weight * (1 - params.learning_rate * params.weight_decay)
            return decayed - params.learning_rate * (first / (1 - params.beta1**step)) / scale, first, second

        first, second = self.moments.first, self.moments.second
        a, first_a, second_a = update(self.weights.a_RV, gradient.a_RV, first.a_RV, second.a_RV)
        b, first_b, second_b = update(self.weights.b_VR, gradient.b_VR, first.b_VR, second.b_VR)
        moments = Moments(first=Pair(first_a, first_b), second=Pair(second_a, second_b), step=step)
        return State(weights=Pair(a, b), moments=moments), norm


@dataclass(frozen=True, slots=True)
class FakeSnapshot(Snapshot):
    """A state, and which of its parts were captured."""

    state: State
    parts: frozenset[StatePart]

    @override
    def write(self, directory: Path) -> None:
        state = self.state
        config = adapter_config("table", len(state.weights.a_RV), ["table"])
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        _write(directory, StatePart.WEIGHTS, _name_arrays(state.weights))
        if StatePart.OPTIMIZER in self.parts:
            moments = state.moments
            arrays = _name_arrays(moments.first, _FIRST) | _name_arrays(moments.second, _SECOND)
            _write(directory, StatePart.OPTIMIZER, arrays | {STEP: np.array([moments.step])})
        if StatePart.GRADIENT in self.parts:
            arrays = {} if state.gradient is None else _name_arrays(state.gradient)
            _write(directory, StatePart.GRADIENT, arrays)

    @classmethod
    def read(cls, directory: Path, vocab_size: int) -> "FakeSnapshot":
        """Read the files of `write`. Raises UserError for other files."""
        parts = frozenset(part for part, name in FILES.items() if (directory / name).exists())
        try:
            weights = _make_pair(load_file(directory / FILES[StatePart.WEIGHTS]))
            if weights.a_RV.shape[1] != vocab_size:
                raise UserError(
                    f"weights are of a vocabulary of {weights.a_RV.shape[1]} tokens; the base model has {vocab_size}"
                )
            state = State.make_untrained(weights)

            # Read the optimizer and the gradient if the snapshot has them.
            if StatePart.OPTIMIZER in parts:
                arrays = load_file(directory / FILES[StatePart.OPTIMIZER])
                first, second = _make_pair(arrays, _FIRST), _make_pair(arrays, _SECOND)
                state = replace(state, moments=Moments(first=first, second=second, step=int(arrays[STEP][0])))
            if StatePart.GRADIENT in parts and (arrays := load_file(directory / FILES[StatePart.GRADIENT])):
                is_former = all(name.startswith(_FORMER_GRADIENT) for name in arrays)
                state = replace(
                    state, gradient=_make_pair(arrays, _FORMER_GRADIENT) if is_former else _make_pair(arrays)
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"weights cannot be read: {error}") from error
        return cls(state, parts)

    def restore(self, spec: ModelSpec, parts: Collection[StatePart]) -> State:
        """Return the state of a model restored from `parts`.

        Raises UserError if a part is missing.
        """
        missing = [part.value for part in StatePart if part in parts and part not in self.parts]
        if missing:
            raise UserError(f"the checkpoint holds no {' and no '.join(missing)}")
        rank = len(self.state.weights.a_RV)
        if rank != spec.lora.rank:
            raise UserError(f"the checkpoint is of rank {rank}, the model of rank {spec.lora.rank}")
        if StatePart.WEIGHTS not in parts:
            return State.make_untrained(fresh_adapter(spec.lora, self.state.weights.a_RV.shape[1]))
        state = State.make_untrained(self.state.weights)
        if StatePart.OPTIMIZER in parts:
            state = replace(state, moments=self.state.moments)
        return replace(state, gradient=self.state.gradient if StatePart.GRADIENT in parts else None)


def _name_arrays(pair: Pair, prefix: str = f"{_MODULE}.") -> dict[str, Floats]:
    return {f"{prefix}lora_A.weight": pair.a_RV, f"{prefix}lora_B.weight": pair.b_VR}


def _make_pair(arrays: dict[str, Floats], prefix: str = f"{_MODULE}.") -> Pair:
    return Pair(arrays[f"{prefix}lora_A.weight"], arrays[f"{prefix}lora_B.weight"])


def _write(directory: Path, part: StatePart, arrays: Mapping[str, NumberArray]) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, directory / FILES[part])


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
