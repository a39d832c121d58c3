"""Prompt scores: log-probabilities, top-k, given targets and alternative tokens.

Legend: T tokens of a chunk, P positions of a window, Q targets per position, J alternatives, D
embed, V vocab, K top-k.

Row i has the scores of token i of the prompt, which are computed from the hidden state of token
i - 1. Token 0 has none. Each chunk scores its own tokens, one window of logits at a time, so its
scores depend on no later token. A prompt that begins with the chunks of a cached prompt therefore
reuses their scores together with their keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax.devices import fetch
from skyrl_tx.backends.jax.sample import draw
from skyrl_tx.backends.jax.sample.draw import uniform
from skyrl_tx.backends.jax.sample.logit_blocks import LogitBlocks
from skyrl_tx.backends.jax.sample.programs import take_adapter
from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.contract.arrays import Float32Array, Int64Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import PromptResult, TopK
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams

WINDOW = 256
"""The maximum number of positions whose logits exist at the same time."""

NOT_COMPUTED = -99999.0
"""The SDK's fill value in rows of top-k (tinker/types/sample_response.py)."""

SKIP = -1
"""A target that asks for no score."""

MIN_TARGETS = 32
"""Targets computed per position, including the next token. Requests for more use other shapes."""


@struct.dataclass
class ScoreWindow:
    """Scores of P positions; zero where not requested."""

    target_PQ: jax.Array
    topk_token_PK: jax.Array
    topk_logprob_PK: jax.Array
    alt_token_PJ: jax.Array
    alt_logprob_PJ: jax.Array


class ScoreKind(NamedTuple):
    """The scores that a request asks for. Prompts share scores of the same kind only."""

    has_topk: bool
    first: int
    """The first scored token."""

    @classmethod
    def from_request(cls, request: SampleRequest) -> "ScoreKind | None":
        """Return the kind of a request's scores, or None if it asks for none."""
        options = request.options
        return cls(options.topk > 0, _get_first_scored(request)) if options.wants_prompt else None


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The scores of a chunk by the first token of each window, and its last hidden state [1, D]."""

    windows: Mapping[int, ScoreWindow]
    last_1D: jax.Array


ScoredChunks = Mapping[int, ScoredChunk]
"""The scored chunks of a prompt by their first token, in order."""


def are_reusable(options: PromptOptions) -> bool:
    """Return whether the requested scores depend on nothing but the prompt and the sampler."""
    return options.target_tokens is None and options.alt_tokens_k == 0


@partial(jax.jit, static_argnames=("max_topk", "max_alt"))  # limits of the backend, as requests have many values
def score_window(
    params: DecoderParams,
    pool: Adapter | None,
    adapter: jax.Array,
    before_1D: jax.Array,
    hidden_TD: jax.Array,
    start: jax.Array,
    position: jax.Array,
    target_PQ: jax.Array,
    seed_2: jax.Array,
    temperature: jax.Array,
    wants_topk: jax.Array,
    num_alt: jax.Array,
    *,
    max_topk: int,
    max_alt: int,
) -> ScoreWindow:
    """Score P tokens: targets and top-k at temperature 1, alternatives at `temperature`.

    The first one is token `position` of the prompt and token `start` of the chunk. `hidden_TD` has
    the hidden states of the chunk, and `before_1D` has the one of the token before the chunk.
    """
    P = target_PQ.shape[0]
    hidden_PD = jax.lax.dynamic_slice_in_dim(jnp.concatenate([before_1D, hidden_TD[:-1]]), start, P)
    logits_PV = models.logits(params, hidden_PD, take_adapter(pool, adapter))
    blocks = LogitBlocks.from_logits(logits_PV, jnp.ones(P))
    highest_P, log_total_P = blocks.highest_S, blocks.log_total_S
    topk_token_PK, topk_logprob_PK = draw.find_top_k(
        blocks, blocks.normalize(), logits_PV.shape[1], max_topk, wants_topk
    )

    # Draw alternatives.
    alt_token_JP, alt_logprob_JP = jnp.zeros((max_alt, P), jnp.int32), jnp.zeros((max_alt, P), jnp.float32)
    if max_alt:
        alternatives = partial(_draw_alternatives, logits_PV, position, seed_2, temperature, num_alt)
        none = alt_token_JP, alt_logprob_JP
        alt_token_JP, alt_logprob_JP = jax.lax.cond(num_alt > 0, alternatives, lambda *kept: kept, *none)

    return ScoreWindow(
        target_PQ=jnp.take_along_axis(logits_PV, target_PQ, axis=-1) - highest_P[:, None] - log_total_P[:, None],
        topk_token_PK=topk_token_PK,
        topk_logprob_PK=topk_logprob_PK,
        alt_token_PJ=alt_token_JP.T,
        alt_logprob_PJ=alt_logprob_JP.T,
    )


def _draw_alternatives(
    logits_PV: jax.Array,
    position: jax.Array,
    seed_2: jax.Array,
    temperature: jax.Array,
    num_alt: jax.Array,
    token_JP: jax.Array,
    logprob_JP: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draw the first `num_alt` of J tokens at each position, with their log-probabilities.

    The random numbers of a token depend on the position of the token before it.
    """
    P = logits_PV.shape[0]
    blocks = LogitBlocks.from_logits(logits_PV, jnp.broadcast_to(temperature, P))
    seed_P2, before_P = jnp.broadcast_to(seed_2, (P, 2)), position - 1 + jnp.arange(P, dtype=jnp.int32)

    def draw_one(j: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index_P = jnp.broadcast_to(draw.PROMPT_INDEX - j.astype(jnp.uint32), P)
        number_P = uniform(draw.make_keys(seed_P2, index_P, before_P))
        token_P = jnp.where(temperature > 0, blocks.pick(number_P), blocks.most_likely())
        return drawn[0].at[j].set(token_P), drawn[1].at[j].set(blocks.get_logprob(token_P))

    return jax.lax.fori_loop(0, num_alt, draw_one, (token_JP, logprob_JP))


class PromptScores:
    """Collects the scores that `request.options` asks for, chunk by chunk."""

    def __init__(self, params: DecoderParams, request: SampleRequest, *, max_topk: int, max_alt: int) -> None:
        self._params = params
        self._request = request
        self._seed_2 = draw.split_seed(request.params.seed)
        self._max_topk = max_topk
        self._max_alt = max_alt
        self._target_TQ = _pad_targets(request)
        self._num_tokens = request.prompt.size
        self._first = _get_first_scored(request)
        self._chunks: dict[int, ScoredChunk] = {}
        self._on_device: list[int] = []  # the chunks whose scores are not in host memory yet

    def reuse(self, chunks: ScoredChunks, num_tokens: int) -> None:
        """Take the scores of the first `num_tokens` tokens, all in whole chunks, from a cached prompt."""
        self._chunks = {start: chunk for start, chunk in chunks.items() if start < num_tokens}

    def add(self, pool: Adapter | None, adapter: int, hidden_TD: jax.Array, last_1D: jax.Array, start: int) -> None:
        """Score the tokens of the next chunk, which starts at token `start`, in windows of a few shapes.

        `hidden_TD` may be padded. `last_1D` is the hidden state of the last token of the chunk.
        """
        # The first token of a prompt has no score, so it may follow any hidden state.
        before_1D = self._chunks[max(self._chunks)].last_1D if start else last_1D
        limits = {"max_topk": self._max_topk, "max_alt": self._max_alt}
        score = partial(score_window, self._params, pool, np.int32(adapter), before_1D, hidden_TD, **limits)

        options, window = self._request.options, min(WINDOW, hidden_TD.shape[0])
        needed = self._first if are_reusable(options) else 1
        temperature, num_alt = np.float32(self._request.params.temperature), np.int32(options.alt_tokens_k)
        requested = self._seed_2, temperature, np.bool_(options.topk > 0), num_alt

        # Skip windows of padding, and those before the first scored token.
        windows: dict[int, ScoreWindow] = {}
        for begin in range(0, hidden_TD.shape[0], window):
            position = start + begin
            if position >= self._num_tokens or position + window <= needed:
                continue

            target_PQ = self._target_TQ[position : position + window]
            target_PQ = np.pad(target_PQ, ((0, window - target_PQ.shape[0]), (0, 0)))

            windows[position] = score(np.int32(begin), np.int32(position), target_PQ, *requested)
        self._chunks[start] = ScoredChunk(windows, last_1D)
        self._on_device.append(start)

    def fetch(self) -> ScoredChunks:
        """Return all chunks, with the requested scores in host memory. Reused chunks are not copied."""
        windows = fetch({start: self._chunks[start].windows for start in self._on_device})
        for start, own in windows.items():
            trimmed = {position: self._trim(position, window) for position, window in own.items()}
            self._chunks[start] = ScoredChunk(trimmed, self._chunks[start].last_1D)
        self._on_device.clear()
        return self._chunks

    def _trim(self, position: int, window: ScoreWindow) -> ScoreWindow:
        """Copy the part of a window that requests of this kind need."""
        options, num_tokens = self._request.options, self._num_tokens - position
        num_targets = 1 if options.target_tokens is None else 1 + options.target_tokens.shape[1]
        num_topk = self._max_topk if options.topk else 0
        return ScoreWindow(
            target_PQ=window.target_PQ[:num_tokens, :num_targets].copy(),
            topk_token_PK=window.topk_token_PK[:num_tokens, :num_topk].copy(),
            topk_logprob_PK=window.topk_logprob_PK[:num_tokens, :num_topk].copy(),
            alt_token_PJ=window.alt_token_PJ[:num_tokens, : options.alt_tokens_k].copy(),
            alt_logprob_PJ=window.alt_logprob_PJ[:num_tokens, : options.alt_tokens_k].copy(),
        )

    def make_result(self) -> PromptResult:
        """Return the scores after all chunks were added. A prompt of one token has none."""
        options, num_tokens = self._request.options, self._num_tokens
        target_TQ = np.zeros(self._target_TQ.shape, np.float32)
        topk, alt_tokens = (_make_empty_topk(num_tokens, k) for k in (options.topk, options.alt_tokens_k))

        # Copy the windows.
        for chunk in self.fetch().values():
            for position, window in chunk.windows.items():
                num, num_targets = window.target_PQ.shape
                own = slice(position, position + num)
                target_TQ[own, :num_targets] = window.target_PQ
                topk.token_ids[own] = window.topk_token_PK[:, : options.topk]
                topk.logprobs[own] = window.topk_logprob_PK[:, : options.topk]
                alt_tokens.token_ids[own], alt_tokens.logprobs[own] = window.alt_token_PJ, window.alt_logprob_PJ

        # Clear the tokens before the last `last_n`, and the first token, which has no score.
        logprobs, unscored = target_TQ[:, 0].copy(), slice(self._first)
        logprobs[unscored], topk.token_ids[unscored], topk.logprobs[unscored] = np.nan, 0, NOT_COMPUTED
        return PromptResult(
            logprobs=logprobs if options.logprobs else None,
            topk=topk if options.topk else None,
            targets=_select_given_targets(target_TQ[1:], options.target_tokens),
            alt_tokens=_drop_first(alt_tokens) if options.alt_tokens_k else None,
        )


def _get_first_scored(request: SampleRequest) -> int:
    last_n = request.options.last_n
    return 1 if last_n is None else max(1, request.prompt.size - last_n)


def _pad_targets(request: SampleRequest) -> np.ndarray:
    """Return the targets, int32 [T, Q]: the token itself, then the given targets, then padding."""
    given = request.options.target_tokens
    num_given = 0 if given is None else given.shape[1]
    padded = np.zeros((request.prompt.size, max(next_power_of_two(1 + num_given), MIN_TARGETS)), np.int32)
    padded[:, 0] = request.prompt
    if given is not None:
        padded[1 : 1 + given.shape[0], 1 : 1 + num_given] = np.maximum(given, 0)
    return padded


def _make_empty_topk(num_tokens: int, k: int) -> TopK:
    return TopK(token_ids=np.zeros((num_tokens, k), np.int32), logprobs=np.zeros((num_tokens, k), np.float32))


def _drop_first(topk: TopK) -> TopK:
    return TopK(token_ids=topk.token_ids[1:], logprobs=topk.logprobs[1:])


def _select_given_targets(target_TQ: Float32Array, given: Int64Array | None) -> Float32Array | None:
    if given is None:
        return None
    num_rows, num_targets = given.shape
    return np.where(given == SKIP, np.float32(0.0), target_TQ[:num_rows, 1 : 1 + num_targets])
