"""Samples on the host to the device's rows, and the rows' results back.

Legend: S decode slots (rows), N steps of a slice, K top-k.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.decode import SliceRows
from skyrl_tx.backends.jax.sampling import Drawn, DrawParams
from skyrl_tx.backends.jax.slots import DrawnTokens, RunningSample, Slots
from skyrl_tx.contract.results import TopK

MAX_INT32 = 2**31 - 1

Samples = Mapping[int, RunningSample]
"""The sample of each row that has one."""


def seed_words(seed: int) -> np.ndarray:
    """Return a seed of up to 64 bits as uint32 [2], high word first."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def draw_params(samples: Samples, num_rows: int) -> DrawParams:
    """Return how each row draws; rows without a sample are greedy and ask for no filter."""
    seed_S2 = np.zeros((num_rows, 2), np.uint32)
    for row, sample in samples.items():
        seed_S2[row] = seed_words(sample.request.params.seed)
    return DrawParams(
        seed_S2=jnp.asarray(seed_S2),
        index_S=_column(samples, num_rows, np.uint32, 0, lambda sample: sample.index),
        temperature_S=_column(samples, num_rows, np.float32, 0.0, lambda sample: sample.request.params.temperature),
        top_k_S=_column(samples, num_rows, np.int32, 0, lambda sample: min(sample.request.params.top_k, MAX_INT32)),
        top_p_S=_column(samples, num_rows, np.float32, 1.0, lambda sample: sample.request.params.top_p),
    )


def slice_rows(slots: Slots) -> SliceRows:
    """Return what each slot does in the next slice."""
    samples, num_rows = slots.live, len(slots)
    return SliceRows(
        token_S=_column(samples, num_rows, np.int32, 0, lambda sample: sample.last_token),
        position_S=_column(samples, num_rows, np.int32, 0, lambda sample: sample.position),
        num_drawn_S=_column(samples, num_rows, np.int32, 0, lambda sample: sample.num_drawn),
        adapter_G=jnp.asarray(slots.adapters, jnp.int32),
        draws=draw_params(samples, num_rows),
        wants_topk=jnp.asarray(any(sample.request.options.sample_topk > 0 for sample in samples.values())),
    )


def tokens_of(drawn: Drawn, row: int, num_steps: int) -> DrawnTokens:
    """Return one row's part of what was drawn and fetched, whose leaves are [N, S] and [N, S, K]."""

    def part(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf)[:num_steps, row]

    topk = TopK(token_ids=part(drawn.topk_token_SK), logprobs=part(drawn.topk_logprob_SK))
    return DrawnTokens(token_N=part(drawn.token_S), logprob_N=part(drawn.logprob_S), topk=topk)


def _column(
    samples: Samples, num_rows: int, dtype: type[np.generic], fill: float, value: Callable[[RunningSample], float]
) -> jax.Array:
    column = np.full(num_rows, fill, dtype)
    for row, sample in samples.items():
        column[row] = value(sample)
    return jnp.asarray(column)
