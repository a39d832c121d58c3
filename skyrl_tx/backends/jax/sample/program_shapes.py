"""Describe the sampling programs of a model runner, so that they can be compiled before they run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.compiler import Program
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.block_table import BlockTableRow
from skyrl_tx.backends.jax.sample.logit_adjustment import make_adjustment
from skyrl_tx.backends.jax.sample.programs import RowBatch
from skyrl_tx.backends.jax.sample.row_inputs import RowInputs, make_block_table, make_draw_params
from skyrl_tx.backends.jax.sample.slice_parts import PlannedPart
from skyrl_tx.backends.jax.sample.slice_rows import SliceRows
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.layers.cache_state import BlockTable, Cache
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig

FIRST_ROWS = 8
"""How many first tokens one call draws."""


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
