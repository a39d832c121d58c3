"""What a request asks about its prompt: log-probabilities, top-k, given targets, alternative tokens.

Legend: T tokens of a chunk, P positions of a window, Q targets of each, J alternatives, D embed, V vocab.

Row i speaks of the token at position i + 1. All comes from the prompt's hidden states, chunk by chunk, one window of
logits at a time.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx import models
from skyrl_tx.backends.jax import sampling
from skyrl_tx.backends.jax.blocks import Blocks
from skyrl_tx.backends.jax.buckets import next_power
from skyrl_tx.backends.jax.decode import take_adapter
from skyrl_tx.backends.jax.sample_rows import seed_words
from skyrl_tx.contract.arrays import Float32Array, Int64Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import PromptResult, TopK
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams

WINDOW = 256  # positions whose logits exist at once
NOT_COMPUTED = -99999.0  # the SDK's filler in rows of top-k (tinker/types/sample_response.py)
SKIP = -1
FEW_TARGETS = 32  # scored of each position, the next token included; of more there are other shapes


@struct.dataclass
class Window:
    """Scores of P positions; what was not asked for is zeros."""

    target_PQ: jax.Array
    topk_token_PK: jax.Array
    topk_logprob_PK: jax.Array
    alt_token_PJ: jax.Array
    alt_logprob_PJ: jax.Array


@partial(jax.jit, static_argnames=("max_topk", "max_alt"))  # the backend's limits: of a request's own there are many
def score_window(
    params: DecoderParams,
    pool: Adapter | None,
    place: jax.Array,
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
) -> Window:
    """Score P rows: targets and top-k at temperature 1, `num_alt` draws at the request's own.

    The first is row number `row` of the prompt, and `start` of these hidden states.
    """
    P = target_PQ.shape[0]
    hidden_PD = jax.lax.dynamic_slice_in_dim(hidden_TD, start, P)
    logits_PV = models.logits(params, hidden_PD, take_adapter(pool, place))
    blocks = Blocks.of(logits_PV, jnp.ones(P))
    highest_P, log_total_P = blocks.highest_S, blocks.log_total_S
    topk_token_PK, topk_logprob_PK = sampling.top(blocks, logits_PV.shape[1], max_topk, wants_topk)
    alt_token_JP, alt_logprob_JP = jnp.zeros((max_alt, P), jnp.int32), jnp.zeros((max_alt, P), jnp.float32)
    if max_alt:
        alternatives = partial(_draw_alternatives, logits_PV, row, seed_2, temperature, num_alt)
        none = alt_token_JP, alt_logprob_JP
        alt_token_JP, alt_logprob_JP = jax.lax.cond(num_alt > 0, alternatives, lambda *kept: kept, *none)
    return Window(
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
    """Draw the first `num_alt` of J tokens at each position, and their log-probabilities."""
    P = logits_PV.shape[0]
    blocks = Blocks.of(logits_PV, jnp.broadcast_to(temperature, P))
    seed_P2, row_P = jnp.broadcast_to(seed_2, (P, 2)), row + jnp.arange(P, dtype=jnp.int32)

    def draw_one(j: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index_P = jnp.broadcast_to(sampling.PROMPT_INDEX - j.astype(jnp.uint32), P)
        number_P = sampling.uniform(sampling.keys(seed_P2, index_P, row_P))
        token_P = jnp.where(temperature > 0, blocks.pick(number_P), blocks.likeliest())
        return drawn[0].at[j].set(token_P), drawn[1].at[j].set(blocks.logprob(token_P))

    return jax.lax.fori_loop(0, num_alt, draw_one, (token_JP, logprob_JP))


class PromptScores:
    """The answer to `request.options` about a prompt, gathered chunk by chunk."""

    def __init__(self, params: DecoderParams, request: SampleRequest, *, max_topk: int, max_alt: int) -> None:
        self._params = params
        self._request = request
        self._seed_2 = seed_words(request.params.seed)
        self._max_topk = max_topk
        self._max_alt = max_alt
        self._target_TQ = _targets(request)
        self._num_rows = request.prompt.size - 1
        last_n = request.options.last_n
        self._first = 0 if last_n is None else max(0, self._num_rows - last_n)
        self._windows: dict[int, Window] = {}  # by its first row

    def add(self, pool: Adapter | None, place: int, hidden_TD: jax.Array, start: int) -> None:
        """Score the rows from `start` on, whose hidden states these are; in windows, of which few shapes exist."""
        options, window = self._request.options, min(WINDOW, hidden_TD.shape[0])
        needed = 0 if _wants_every_row(options) else self._first
        for begin in range(0, hidden_TD.shape[0], window):
            row = start + begin
            if row >= self._num_rows or row + window <= needed:
                continue
            target_PQ = self._target_TQ[row : row + window]
            self._windows[row] = score_window(
                self._params,
                pool,
                np.int32(place),
                hidden_TD,
                np.int32(begin),
                np.int32(row),
                np.pad(target_PQ, ((0, window - target_PQ.shape[0]), (0, 0))),
                self._seed_2,
                np.float32(self._request.params.temperature),
                np.bool_(options.topk > 0),
                np.int32(options.alt_tokens_k),
                max_topk=self._max_topk,
                max_alt=self._max_alt,
            )

    def result(self) -> PromptResult:
        """Return the answer, once all chunks were added."""
        return _result(_join(self._windows, self._num_rows), self._request.options, self._first, self._num_rows)


def _wants_every_row(options: PromptOptions) -> bool:
    return options.target_tokens is not None or options.alt_tokens_k > 0


def _targets(request: SampleRequest) -> np.ndarray:
    """Return int32 [rows, Q]: the next token, then the given targets; Q of few different numbers."""
    given = request.options.target_tokens
    num_given = 0 if given is None else given.shape[1]
    padded = np.zeros((request.prompt.size - 1, max(next_power(1 + num_given), FEW_TARGETS)), np.int32)
    padded[:, 0] = request.prompt[1:]
    if given is not None:
        padded[: given.shape[0], 1 : 1 + num_given] = np.maximum(given, 0)
    return padded


def _join(windows: dict[int, Window], num_rows: int) -> Window | None:
    if not windows:
        return None

    def join(*parts: np.ndarray) -> np.ndarray:
        joined = np.zeros((num_rows, *parts[0].shape[1:]), parts[0].dtype)
        for row, part in zip(windows, parts, strict=True):
            joined[row : row + part.shape[0]] = part[: num_rows - row]
        return joined

    return jax.tree.map(join, *jax.device_get(list(windows.values())))


def _result(rows: Window | None, options: PromptOptions, first: int, num_rows: int) -> PromptResult:
    """Lay the rows out as the contract says; `rows` None: the prompt is one token, of which nothing is known."""
    logprobs = np.full(num_rows + 1, np.nan, np.float32)
    topk = TopK(
        token_ids=np.zeros((num_rows + 1, options.topk), np.int32),
        logprobs=np.full((num_rows + 1, options.topk), NOT_COMPUTED, np.float32),
    )
    alt_tokens = TopK(
        token_ids=np.zeros((num_rows, options.alt_tokens_k), np.int32),
        logprobs=np.zeros((num_rows, options.alt_tokens_k), np.float32),
    )
    if rows is not None:
        asked = slice(first, num_rows)
        logprobs[first + 1 :] = rows.target_PQ[asked, 0]
        topk.token_ids[first + 1 :] = rows.topk_token_PK[asked, : options.topk]
        topk.logprobs[first + 1 :] = rows.topk_logprob_PK[asked, : options.topk]
        alt_tokens.token_ids[:] = rows.alt_token_PJ[:num_rows, : options.alt_tokens_k]
        alt_tokens.logprobs[:] = rows.alt_logprob_PJ[:num_rows, : options.alt_tokens_k]
    return PromptResult(
        logprobs=logprobs if options.logprobs else None,
        topk=topk if options.topk else None,
        targets=_given_targets(rows, options.target_tokens),
        alt_tokens=alt_tokens if options.alt_tokens_k else None,
    )


def _given_targets(rows: Window | None, asked: Int64Array | None) -> Float32Array | None:
    if asked is None or rows is None:
        return None if asked is None else np.zeros(asked.shape, np.float32)
    num_rows, num_targets = asked.shape
    return np.where(asked == SKIP, np.float32(0.0), rows.target_PQ[:num_rows, 1 : 1 + num_targets])
