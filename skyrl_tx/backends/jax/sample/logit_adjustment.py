"""Change the logits of rows before tokens are drawn: constraints, logit bias and penalties.

The host knows the tokens of each sample. It computes the changes of the next token and sends them
to the device, see `LogitAdjuster`.

Legend: S rows, V vocab, W words of 32 tokens, B entries of a logit bias.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx.contract.logit_adjuster import LogitAdjuster, count_words
from skyrl_tx.contract.requests import MAX_LOGIT_BIAS, SamplingControls

_HIGHEST = np.float32(1e38)
"""The largest logit of an allowed token: extreme penalties must not give infinity."""
_LOWEST_PENALTY = 1e-37
"""The lowest repetition penalty: devices replace smaller float32 numbers by 0."""


@struct.dataclass
class LogitAdjustment:
    """The changes of the next logits of each row. The defaults of a row change nothing."""

    allowed_SW: jax.Array  # uint32: a bit per token that may be drawn
    bias_token_SB: jax.Array  # int32, padded with V
    bias_SB: jax.Array  # float32
    seen_SW: jax.Array  # uint32: a bit per token of the prompt or the sample
    repetition_S: jax.Array  # float32
    count_SV: jax.Array  # uint16: how often the sample has the token
    frequency_S: jax.Array  # float32
    presence_S: jax.Array  # float32


def list_controls(*, is_distributed: bool) -> frozenset[str]:
    """Return the names of the supported controls.

    The engine makes constraints, and the messages to other hosts do not contain them.
    """
    names = frozenset(field.name for field in fields(SamplingControls))
    return names - {"constraint"} if is_distributed else names


def adjust_logits(logits_SV: jax.Array, adjustment: LogitAdjustment) -> jax.Array:
    """Return the changed logits, float32 [S, V]."""
    S, V = logits_SV.shape
    row_S1 = jnp.arange(S)[:, None]
    logits_SV = logits_SV.at[row_S1, adjustment.bias_token_SB].add(adjustment.bias_SB, mode="drop")

    # Penalties.
    repetition_S1, seen_SV = adjustment.repetition_S[:, None], _unpack_bits(adjustment.seen_SW, V)
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    count_SV = adjustment.count_SV.astype(jnp.float32)
    penalty_SV = adjustment.frequency_S[:, None] * count_SV + adjustment.presence_S[:, None] * (count_SV > 0)
    logits_SV = jnp.clip(jnp.where(seen_SV, repeated_SV, logits_SV) - penalty_SV, -_HIGHEST, _HIGHEST)

    return jnp.where(_unpack_bits(adjustment.allowed_SW, V), logits_SV, -jnp.inf)


def make_adjustment(adjusters: Mapping[int, LogitAdjuster], num_rows: int, vocab_size: int) -> LogitAdjustment:
    """Return the changes of the next logits of these rows. All other rows keep their logits."""
    allowed_SW = np.full((num_rows, count_words(vocab_size)), 2**32 - 1, np.uint32)
    seen_SW, count_SV = np.zeros_like(allowed_SW), np.zeros((num_rows, vocab_size), np.uint16)
    bias_token_SB = np.full((num_rows, MAX_LOGIT_BIAS), vocab_size, np.int32)
    bias_SB = np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32)
    frequency_S, presence_S, repetition_S = np.array([[0], [0], [1]], np.float32).repeat(num_rows, axis=1)

    for row, adjuster in adjusters.items():
        controls = adjuster.controls
        allowed_SW[row] = 0
        adjuster.fill_allowed(allowed_SW[row])
        if num := len(controls.logit_bias):
            bias_token_SB[row, :num], bias_SB[row, :num] = zip(*controls.logit_bias, strict=True)
        if adjuster.seen_W is not None:
            seen_SW[row] = adjuster.seen_W
        if adjuster.count_V is not None:
            count_SV[row] = adjuster.count_V
        frequency_S[row], presence_S[row] = controls.frequency_penalty, controls.presence_penalty
        repetition_S[row] = max(controls.repetition_penalty, _LOWEST_PENALTY)

    arrays: dict[str, Any] = {
        "allowed_SW": allowed_SW,
        "bias_token_SB": bias_token_SB,
        "bias_SB": bias_SB,
        "seen_SW": seen_SW,
        "repetition_S": repetition_S,
        "count_SV": count_SV,
        "frequency_S": frequency_S,
        "presence_S": presence_S,
    }
    return LogitAdjustment(**arrays)


def _unpack_bits(words_SW: jax.Array, num_tokens: int) -> jax.Array:
    """Return a bool per token [S, V]."""
    bit_SWI = words_SW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bit_SWI.reshape(words_SW.shape[0], -1)[:, :num_tokens] > 0
