"""Build the inputs of programs by row from samples, or without samples, to compile a program before it runs.

Values that a sample never changes, such as its temperature, are kept from slice to slice while the
rows hold the same samples. The arrays are NumPy arrays, because a program call copies them faster
than JAX can create arrays.

Legend: S rows, N steps, M pages of a row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.compiler import Program
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.draw import DrawParams, split_seed
from skyrl_tx.backends.jax.sample.logit_adjustment import make_adjustment
from skyrl_tx.backends.jax.sample.programs import RowBatch
from skyrl_tx.backends.jax.sample.running_sample import MAX_STOPS, BlockTableRow, RunningSample
from skyrl_tx.backends.jax.sample.slice_parts import PlannedPart
from skyrl_tx.backends.jax.sample.slice_rows import SliceRows
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.layers.cache_state import BlockTable, Cache
from skyrl_tx.layers.lora import Adapter, RowSlots
from skyrl_tx.models import DecoderParams, ModelConfig

MAX_INT32 = 2**31 - 1

FIRST_ROWS = 8
"""How many first tokens one call draws."""

MAX_COPIES = 256
"""The maximum number of pages, and of states, that one call copies.

It is large enough for a full cache in which all samples take a page for the same slice.
"""

ByRow = Mapping[int, RunningSample]
"""The sample of each row that has one."""


class RowInputs:
    """Builds the inputs of decode slices."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._rows: tuple[RunningSample | None, ...] | None = None
        self._pages = _PageArray()

    def make_batch(self, rows: SliceRows, *, from_last: bool = False) -> RowBatch:
        """Return the inputs of the next slice of these rows.

        With `from_last`, samples that were in the last slice take their last token from its result
        on the devices.
        """
        if self._rows is None or len(rows.samples) != len(self._rows) or not all(map(is_, rows.samples, self._rows)):
            self._cache_constants(rows)
        return RowBatch(
            **self._make_progress(from_last),
            stop_SX=self._stop_SX,
            slots=_make_slots(rows),
            draws=self._draws,
            wants_topk=self._wants_topk,
        )

    def make_table(self, rows: SliceRows, num_pages: int) -> BlockTable:
        """Return the block table of the rows, with `num_pages` columns."""
        tables = [None if sample is None else sample.table for sample in rows.samples]
        return BlockTable(self._pages.update(tables, num_pages), _make_states(tables))

    def _cache_constants(self, rows: SliceRows) -> None:
        """Build the values that the samples never change."""
        self._rows, by_row, num_rows = rows.samples, rows.get_samples_by_row(), len(rows.samples)
        self._index, self._samples = np.array(list(by_row), np.int32), list(by_row.values())
        self._size = np.array([sample.size for sample in self._samples], np.int32)
        self._end = np.array([sample.end for sample in self._samples], np.int32)
        self._draws, self._stop_SX = make_draw_params(by_row, num_rows), _make_stops(by_row, num_rows)
        self._wants_topk = _as_input(any(sample.request.options.sample_topk > 0 for sample in self._samples))

    def _make_progress(self, from_last: bool) -> dict[str, Any]:
        """Return the values that change with each slice: how far each sample is."""
        assert self._rows is not None
        num_rows, samples, index = len(self._rows), self._samples, self._index
        token_S, position_S, num_drawn_S, num_left_S = np.zeros((4, num_rows), np.int32)
        source_S, given_SN = np.full(num_rows, -1, np.int32), np.full((num_rows, self._max_steps), -1, np.int32)

        # Positions and counts.
        position = np.array([sample.position for sample in samples], np.int32)
        num_drawn = position - self._size + 1
        position_S[index], num_drawn_S[index], num_left_S[index] = position, num_drawn, self._end - position

        # Last tokens: on the devices, or from the host.
        num_read = np.array([sample.num_drawn for sample in samples], np.int32)
        row = np.array([sample.row if from_last else -1 for sample in samples], np.int32)
        source_S[index] = row
        for n in np.flatnonzero(row < 0):
            token_S[index[n]] = samples[n].next_token

        # Tokens that were drawn before a preemption.
        for n in np.flatnonzero(num_read > num_drawn):
            given = samples[n].get_replayed_tokens()[: self._max_steps]
            given_SN[index[n], : given.size] = given

        return {
            "token_S": token_S,
            "source_S": source_S,
            "position_S": position_S,
            "num_drawn_S": num_drawn_S,
            "num_left_S": num_left_S,
            "given_SN": given_SN,
        }


class _PageArray:
    """The pages of rows.

    The array of the last slice is reused, because a row seldom takes a new page.
    """

    def __init__(self) -> None:
        self._tables: list[BlockTableRow | None] = []
        self._lengths: list[int] = []
        self._page_SM = np.zeros((0, 0), np.int32)

    def update(self, tables: list[BlockTableRow | None], num_pages: int) -> Any:
        lengths = [0 if table is None else len(table.pages) for table in tables]
        if self._page_SM.shape == (len(tables), num_pages) and all(map(is_, tables, self._tables)):
            changed = [row for row, pair in enumerate(zip(lengths, self._lengths, strict=True)) if pair[0] != pair[1]]
            self._page_SM = self._page_SM.copy()  # devices may still read the array of the last slice
        else:
            changed, self._page_SM = range(len(tables)), np.zeros((len(tables), num_pages), np.int32)
        for row in changed:
            if table := tables[row]:
                self._page_SM[row, : lengths[row]] = table.pages
        self._tables, self._lengths = tables, lengths
        return self._page_SM


def make_draw_params(samples: ByRow, num_rows: int) -> DrawParams:
    """Return the sampling parameters of each row. Rows without a sample are greedy and unfiltered."""
    seed_S2 = np.zeros((num_rows, 2), np.uint32)
    for row, sample in samples.items():
        seed_S2[row] = split_seed(sample.request.params.seed)

    return DrawParams(
        seed_S2=_as_input(seed_S2),
        index_S=_make_column(samples, num_rows, np.uint32, 0, lambda sample: sample.index),
        temperature_S=_make_column(
            samples, num_rows, np.float32, 0.0, lambda sample: sample.request.params.temperature
        ),
        top_k_S=_make_column(
            samples, num_rows, np.int32, 0, lambda sample: min(sample.request.params.top_k, MAX_INT32)
        ),
        top_p_S=_make_column(samples, num_rows, np.float32, 1.0, lambda sample: sample.request.params.top_p),
        min_p_S=_make_column(
            samples, num_rows, np.float32, 0.0, lambda sample: sample.request.params.active_controls.min_p
        ),
        raw_S=_make_column(samples, num_rows, np.bool_, False, lambda sample: sample.reports_raw),
    )


def make_block_table(tables: list[BlockTableRow | None], num_pages: int) -> BlockTable:
    """Return the block table of rows, with `num_pages` columns.

    None is a row without a prompt or sample.
    """
    return BlockTable(_PageArray().update(tables, num_pages), _make_states(tables))


def iter_copy_arguments(
    pages: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]], shard: int, num_shards: int
) -> Iterator[list[Any]]:
    """Yield the arguments of each `programs.copy` call, without the cache."""
    for first in range(0, max(len(pages), len(states)), MAX_COPIES):
        arguments: list[Any] = []
        for pairs in (pages[first : first + MAX_COPIES], states[first : first + MAX_COPIES]):
            pair_RN2, num_R = np.zeros((num_shards, MAX_COPIES, 2), np.int32), np.zeros(num_shards, np.int32)
            pair_RN2[shard, : len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2)
            num_R[shard] = len(pairs)
            arguments += [pair_RN2, num_R]
        yield arguments


def _make_states(tables: Iterable[BlockTableRow | None]) -> Any:
    return _as_input([0 if table is None else table.state for table in tables], np.int32)


def _make_slots(rows: SliceRows) -> RowSlots:
    groups = None if rows.groups is None else _as_input(rows.groups, np.int32)
    return RowSlots(_as_input(rows.adapters, np.int32), groups)


def _as_input(values: Any, dtype: type[np.generic] | None = None) -> Any:
    """Return a NumPy array, typed as Any because program calls accept it as a JAX array."""
    return np.asarray(values, dtype)


def _make_stops(samples: ByRow, num_rows: int) -> Any:
    """Return the stop tokens of each row. Rows with more than MAX_STOPS get none."""
    stop_SX = np.full((num_rows, MAX_STOPS), -1, np.int32)
    for row, sample in samples.items():
        if len(sample.stops) <= MAX_STOPS:
            stop_SX[row, : len(sample.stops)] = sorted(sample.stops)
    return stop_SX


def _make_column(
    samples: ByRow, num_rows: int, dtype: type[np.generic], fill: float, value: Callable[[RunningSample], float]
) -> Any:
    column = np.full(num_rows, fill, dtype)
    for row, sample in samples.items():
        column[row] = value(sample)
    return column


@dataclass(frozen=True, slots=True)
class ProgramShapes:
    """Describes the sampling programs of a runner. Arrays may be given as their shapes.

    A `pool` argument is the pool of adapters (gathered by row for `make_rows_program`), or None for
    the base model.
    """

    params: DecoderParams
    model: ModelConfig
    config: JaxConfig
    memory: SampleMemory
    cache: Cache

    def make_prefill_program(self, size: int, num_rows: int, pool: Adapter | None) -> Program:
        """Return the program of prompt chunks that are padded to `size` tokens."""
        row_B, token_BT = np.zeros(num_rows, np.int32), np.zeros((num_rows, size), np.int32)
        inputs = pool, row_B, token_BT, row_B, row_B, self.cache, self.make_table([None] * num_rows)
        return Program(programs.prefill, (self.params, self.model, *inputs), {})

    def make_first_token_program(self, pool: Adapter | None) -> Program:
        """Return the programs that draw first tokens, for samples whose logits are not adjusted."""
        sharding = self.params.embed.sharding
        last_1D = jax.ShapeDtypeStruct((1, self.model.hidden_size), jnp.float32, sharding=sharding)
        arguments = self.params, pool, last_1D, make_draw_params({}, FIRST_ROWS)
        return programs.FirstTokenProgram(programs.draw_first, arguments, {"max_topk": self.config.max_topk_logprobs})

    def make_rows_program(self, part: PlannedPart, pool: Adapter | None) -> Program:
        """Return the programs of a part of a decode slice on a single CPU device."""
        inputs = self.make_slice_inputs(part.rows, is_adjusted=part.is_adjusted)
        max_steps, max_topk = self.config.decode_slice_tokens, self.config.max_topk_logprobs
        static = {"read_length": part.length, "max_tokens": max_steps, "max_topk": max_topk}
        params, pool, cache = programs.describe_arrays((self.params, pool, self.cache))
        return programs.RowsProgram(programs.run_rows, (params, self.model, pool, cache, *inputs), static)

    def make_slice_inputs(self, rows: SliceRows, *, is_adjusted: bool) -> tuple[BlockTable, RowBatch]:
        """Return the inputs of a slice with these rows, without their samples."""
        rows, inputs = rows.without_samples(), RowInputs(self.config.decode_slice_tokens)
        table, batch = inputs.make_table(rows, self.memory.table_pages), inputs.make_batch(rows)
        if is_adjusted:
            adjustment = make_adjustment({}, len(rows.samples), self.model.vocab_size)
            batch = replace(batch, adjustment=adjustment)
        return table, batch

    def make_table(self, tables: Sequence[BlockTableRow | None]) -> BlockTable:
        """Return the block table of rows; None is a row without a prompt or sample."""
        return make_block_table(list(tables), self.memory.table_pages)
