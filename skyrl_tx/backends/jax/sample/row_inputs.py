"""The inputs of programs by row, made of samples.

What a sample never changes, such as its temperature, is kept from one slice to the next while the rows have the same
samples. The arrays are those of numpy, which a call of a program copies faster than JAX makes arrays of its own.

Legend: S rows, N steps, M pages of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.sample.draw import DrawParams, seed_words
from skyrl_tx.backends.jax.sample.pages import KVTable
from skyrl_tx.backends.jax.sample.programs import RowBatch
from skyrl_tx.backends.jax.sample.rows import Rows
from skyrl_tx.backends.jax.sample.running import RunningSample
from skyrl_tx.layers.held import Table

MAX_INT32 = 2**31 - 1

ByRow = Mapping[int, RunningSample]
"""The sample of each row that has one."""


class RowInputs:
    """Makes the inputs of decode slices."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._samples: tuple[RunningSample | None, ...] = ()
        self._by_row: dict[int, RunningSample] = {}
        self._draws = draw_params({}, 0)

    def of(self, rows: Rows) -> RowBatch:
        """Return the inputs of the next slice of these rows."""
        num_rows = len(rows.samples)
        if num_rows != len(self._samples) or not all(map(is_, rows.samples, self._samples)):
            self._samples, self._by_row = rows.samples, rows.by_row()
            self._draws = draw_params(self._by_row, num_rows)
        return row_batch(self._by_row, num_rows, rows.adapters, self._max_steps, self._draws)


def row_batch(
    samples: ByRow, num_rows: int, adapters: Sequence[int], max_steps: int, draws: DrawParams | None = None
) -> RowBatch:
    """Return the inputs of the next decode slice, of up to `max_steps`; `draws` are known from the slice before."""
    return RowBatch(
        **_progress(samples, num_rows),
        given_SN=_given(samples, num_rows, max_steps),
        adapter_G=_as_input(adapters, np.int32),
        draws=draw_params(samples, num_rows) if draws is None else draws,
        wants_topk=_as_input(any(sample.request.options.sample_topk > 0 for sample in samples.values())),
    )


def draw_params(samples: ByRow, num_rows: int) -> DrawParams:
    """Return the sampling parameters of each row; rows without a sample are greedy and unfiltered."""
    seed_S2 = np.zeros((num_rows, 2), np.uint32)
    for row, sample in samples.items():
        seed_S2[row] = seed_words(sample.request.params.seed)
    return DrawParams(
        seed_S2=_as_input(seed_S2),
        index_S=_column(samples, num_rows, np.uint32, 0, lambda sample: sample.index),
        temperature_S=_column(samples, num_rows, np.float32, 0.0, lambda sample: sample.request.params.temperature),
        top_k_S=_column(samples, num_rows, np.int32, 0, lambda sample: min(sample.request.params.top_k, MAX_INT32)),
        top_p_S=_column(samples, num_rows, np.float32, 1.0, lambda sample: sample.request.params.top_p),
    )


def block_table(tables: Sequence[KVTable | None], num_pages: int) -> Table:
    """Return the block table of rows, `num_pages` wide; None is a row without a prompt or sample."""
    page_SM = np.zeros((len(tables), num_pages), np.int32)
    for row, table in enumerate(tables):
        if table is not None:
            page_SM[row, : len(table.pages)] = table.pages
    state_S = [0 if table is None else table.state for table in tables]
    return Table(_as_input(page_SM), _as_input(state_S, np.int32))


def _as_input(values: Any, dtype: type[np.generic] | None = None) -> Any:
    """Return an array of numpy, as a call of a program takes it in place of one of JAX."""
    return np.asarray(values, dtype)


def _progress(samples: ByRow, num_rows: int) -> dict[str, Any]:
    """Return how far each sample is: what changes with each slice."""
    token_S, position_S, num_drawn_S = np.zeros((3, num_rows), np.int32)
    for row, sample in samples.items():
        token_S[row], position_S[row] = sample.last_token, sample.position
        num_drawn_S[row] = sample.num_drawn - sample.num_again
    return {"token_S": token_S, "position_S": position_S, "num_drawn_S": num_drawn_S}


def _given(samples: ByRow, num_rows: int, max_steps: int) -> Any:
    given_SN = np.full((num_rows, max_steps), -1, np.int32)
    for row, sample in samples.items():
        if sample.num_again:
            given = sample.tokens_again()[:max_steps]
            given_SN[row, : given.size] = given
    return given_SN


def _column(
    samples: ByRow, num_rows: int, dtype: type[np.generic], fill: float, value: Callable[[RunningSample], float]
) -> Any:
    column = np.full(num_rows, fill, dtype)
    for row, sample in samples.items():
        column[row] = value(sample)
    return column
