"""Draw tokens from logits, with log-probabilities: temperature, then min-p, top-k and top-p.

Legend: S rows, N steps, V vocab, K top tokens, Z rows of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.backends.jax.sample.logit_blocks import LogitBlocks, Normalizer
from skyrl_tx.backends.jax.sample.random_numbers import fold_in, uniform
from skyrl_tx.backends.jax.sample.token_filters import redraw

PROMPT_INDEX = np.uint32(0xFFFFFFFF)
"""Tokens drawn at prompt positions use sample indices that count down from this one."""


@struct.dataclass
class DrawParams:
    """The sampling parameters of each row. They are data, so one program runs any mix of them."""

    seed_S2: jax.Array  # uint32: the 64-bit seed of the request, high word first
    index_S: jax.Array  # uint32: the index of the sample in its request
    temperature_S: jax.Array  # float32; 0 is greedy
    top_k_S: jax.Array  # int32; off if <= 0
    top_p_S: jax.Array  # float32; off if >= 1
    min_p_S: jax.Array  # float32; off if 0
    raw_S: jax.Array  # bool: report raw log-probabilities, where they differ from tempered ones


@struct.dataclass
class DrawnTokens:
    """The tokens that a program drew, before stops are applied.

    Shapes are [S] for one step of rows, [N, S] for steps, and [N] for one sample.
    """

    tokens: Any  # int32
    logprobs: Any  # float32, before filters; see `SamplingParams.raw_logprobs`
    topk_tokens: Any  # int32 [..., K], best first; K is 0 if `max_topk` is 0
    topk_logprobs: Any  # float32 [..., K]

    def row(self, row: int, num_steps: int) -> "DrawnTokens":
        """Return the first `num_steps` tokens of one row."""
        return DrawnTokens(  # `jax.tree.map` would take ten times as long
            self.tokens[:num_steps, row],
            self.logprobs[:num_steps, row],
            self.topk_tokens[:num_steps, row],
            self.topk_logprobs[:num_steps, row],
        )


def draw(
    logits_SV: jax.Array,
    params: DrawParams,
    position_S: jax.Array,
    model_logits_SV: jax.Array | None = None,
    *,
    max_topk: int = 0,
    wants_topk: jax.Array,
) -> DrawnTokens:
    """Draw each row's token number `position_S` (0 is the first new token) from float32 logits.

    If the scalar `wants_topk` is False, the top-k is not computed and is zero. Raw log-probabilities
    come from `model_logits_SV`, the logits before they were adjusted; None if they were not.
    """
    blocks = LogitBlocks.from_logits(logits_SV, params.temperature_S)

    key_S2 = make_keys(params.seed_S2, params.index_S, position_S)
    filters = params.top_k_S, params.top_p_S, params.min_p_S
    drawn_S = redraw(blocks, *filters, key_S2, blocks.pick(uniform(key_S2)))
    token_S = jnp.where(params.temperature_S > 0, drawn_S, blocks.most_likely())

    # Report the distribution that the client asked for.
    if model_logits_SV is not None:
        reported_SV = jnp.where(params.raw_S[:, None], model_logits_SV, logits_SV)
        blocks = LogitBlocks.from_logits(reported_SV, params.temperature_S)
    normalizer = blocks.normalize(params.raw_S)
    token_SK, logprob_SK = find_top_k(blocks, normalizer, logits_SV.shape[1], max_topk, wants_topk)
    return DrawnTokens(token_S, blocks.get_logprob(token_S, normalizer), token_SK, logprob_SK)


def split_seed(seed: int) -> np.ndarray:
    """Return a seed of up to 64 bits as uint32 [2], high word first."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def make_keys(seed_S2: jax.Array, index_S: jax.Array, position_S: jax.Array) -> jax.Array:
    """Return a random key per row, uint32 [S, 2].

    It depends only on seed, sample index and position.
    """
    return fold_in(fold_in(seed_S2, index_S), position_S)


def find_top_k(
    blocks: LogitBlocks, normalizer: Normalizer, num_tokens: int, max_topk: int, wants_topk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the `max_topk` most likely tokens and their log-probabilities, best first.

    Both are zero unless `wants_topk`.
    """
    shape = (blocks.num_rows, min(max_topk, num_tokens))

    def compute() -> tuple[jax.Array, jax.Array]:
        logits_SK, token_SK = blocks.find_top_k(shape[1])
        return token_SK, normalizer.get_logprobs(logits_SK)

    if shape[1] == 0:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return jax.lax.cond(wants_topk, compute, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))
