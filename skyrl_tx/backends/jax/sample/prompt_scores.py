"""Prompt scores: log-probabilities, top-k, given targets and alternative tokens.

Legend: T tokens of a chunk, P positions of a window, Q targets per position, J alternatives, D
embed, V vocab, K top-k.

Row i has the scores of the token at position i + 1. Scores are computed from the hidden states of
the prompt, chunk by chunk, one window of logits at a time.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax.devices import fetch
from skyrl_tx.backends.jax.sample import draw
from skyrl_tx.backends.jax.sample.logit_blocks import LogitBlocks
from skyrl_tx.backends.jax.sample.programs import take_adapter
from skyrl_tx.backends.jax.sample.random_numbers import uniform
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


@partial(jax.jit, static_argnames=("max_topk", "max_alt"))  # limits of the backend, as requests have many values
def score_window(
    params: DecoderParams,
    pool: Adapter | None,
    adapter: jax.Array,
    hidden_TD: jax.Array,
    start: jax.Array,
    row: jax.Array,
    target_PQ: jax.Array,
    seed_2: jax.Array,
    temperature: jax.Array,
    wants_topk: jax.Array,
    num_alt: jax.Array,
    *,
    max_topk: int,
    max_alt: int,
) -> ScoreWindow:
    """Score P rows: targets and top-k at temperature 1, alternatives at `temperature`.

    The first row is row `row` of the prompt and index `start` of `hidden_TD`.
    """
    P = target_PQ.shape[0]
    hidden_PD = jax.lax.dynamic_slice_in_dim(hidden_TD, start, P)
    logits_PV = models.logits(params, hidden_PD, take_adapter(pool, adapter))
    blocks = LogitBlocks.from_logits(logits_PV, jnp.ones(P))
    highest_P, log_total_P = blocks.highest_S, blocks.log_total_S
    topk_token_PK, topk_logprob_PK = draw.find_top_k(
        blocks, blocks.normalize(), logits_PV.shape[1], max_topk, wants_topk
    )

    # Draw alternatives.
    alt_token_JP, alt_logprob_JP = jnp.zeros((max_alt, P), jnp.int32), jnp.zeros((max_alt, P), jnp.float32)
    if max_alt:
        alternatives = partial(_draw_alternatives, logits_PV, row, seed_2, temperature, num_alt)
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
    row: jax.Array,
    seed_2: jax.Array,
    temperature: jax.Array,
    num_alt: jax.Array,
    token_JP: jax.Array,
    logprob_JP: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draw the first `num_alt` of J tokens at each position, with their log-probabilities."""
    P = logits_PV.shape[0]
    blocks = LogitBlocks.from_logits(logits_PV, jnp.broadcast_to(temperature, P))
    seed_P2, row_P = jnp.broadcast_to(seed_2, (P, 2)), row + jnp.arange(P, dtype=jnp.int32)

    def draw_one(j: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index_P = jnp.broadcast_to(draw.PROMPT_INDEX - j.astype(jnp.uint32), P)
        number_P = uniform(draw.make_keys(seed_P2, index_P, row_P))
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
        self._num_rows = request.prompt.size - 1
        last_n = request.options.last_n
        self._first = 0 if last_n is None else max(0, self._num_rows - last_n)
        self._windows: dict[int, ScoreWindow] = {}  # by first row

    def add(self, pool: Adapter | None, adapter: int, hidden_TD: jax.Array, start: int) -> None:
        """Score the rows of a chunk that starts at row `start`, in windows of a few shapes."""
        options, window = self._request.options, min(WINDOW, hidden_TD.shape[0])
        needed = 0 if _wants_every_row(options) else self._first
        temperature, num_alt = np.float32(self._request.params.temperature), np.int32(options.alt_tokens_k)
        requested = temperature, np.bool_(options.topk > 0), num_alt

        for begin in range(0, hidden_TD.shape[0], window):
            row = start + begin
            if row >= self._num_rows or row + window <= needed:
                continue

            target_PQ = self._target_TQ[row : row + window]
            target_PQ = np.pad(target_PQ, ((0, window - target_PQ.shape[0]), (0, 0)))

            self._windows[row] = score_window(
                self._params,
                pool,
                np.int32(adapter),
                hidden_TD,
                np.int32(begin),
                np.int32(row),
                target_PQ,
                self._seed_2,
                *requested,
                max_topk=self._max_topk,
                max_alt=self._max_alt,
            )

    def make_result(self) -> PromptResult:
        """Return the scores after all chunks were added. A prompt of one token has none."""
        options, num_rows = self._request.options, self._num_rows
        target_TQ = np.zeros(self._target_TQ.shape, np.float32)
        topk, alt_tokens = (
            _make_empty_topk(num_rows + 1, options.topk),
            _make_empty_topk(num_rows, options.alt_tokens_k),
        )

        # Copy the windows. Row i scores the token at position i + 1.
        for row, window in fetch(self._windows).items():
            num = min(window.target_PQ.shape[0], num_rows - row)
            own, scored = slice(row, row + num), slice(row + 1, row + num + 1)
            target_TQ[own] = window.target_PQ[:num]
            topk.token_ids[scored] = window.topk_token_PK[:num, : options.topk]
            topk.logprobs[scored] = window.topk_logprob_PK[:num, : options.topk]
            alt_tokens.token_ids[own] = window.alt_token_PJ[:num, : options.alt_tokens_k]
            alt_tokens.logprobs[own] = window.alt_logprob_PJ[:num, : options.alt_tokens_k]

        # Clear the rows before the last `last_n`, and the first token, which has no score.
        logprobs = np.append(np.float32(np.nan), target_TQ[:, 0])
        unscored = slice(self._first + 1)
        logprobs[unscored], topk.token_ids[unscored], topk.logprobs[unscored] = np.nan, 0, NOT_COMPUTED
        return PromptResult(
            logprobs=logprobs if options.logprobs else None,
            topk=topk if options.topk else None,
            targets=_select_given_targets(target_TQ, options.target_tokens),
            alt_tokens=alt_tokens if options.alt_tokens_k else None,
        )


def _wants_every_row(options: PromptOptions) -> bool:
    return options.target_tokens is not None or options.alt_tokens_k > 0


def _pad_targets(request: SampleRequest) -> np.ndarray:
    """Return the targets, int32 [rows, Q]: the next token, then the given targets, then padding."""
    given = request.options.target_tokens
    num_given = 0 if given is None else given.shape[1]
    padded = np.zeros((request.prompt.size - 1, max(next_power_of_two(1 + num_given), MIN_TARGETS)), np.int32)
    padded[:, 0] = request.prompt[1:]
    if given is not None:
        padded[: given.shape[0], 1 : 1 + num_given] = np.maximum(given, 0)
    return padded


def _make_empty_topk(num_tokens: int, k: int) -> TopK:
    return TopK(token_ids=np.zeros((num_tokens, k), np.int32), logprobs=np.zeros((num_tokens, k), np.float32))


def _select_given_targets(target_TQ: Float32Array, given: Int64Array | None) -> Float32Array | None:
    if given is None:
        return None
    num_rows, num_targets = given.shape
    return np.where(given == SKIP, np.float32(0.0), target_TQ[:num_rows, 1 : 1 + num_targets])
