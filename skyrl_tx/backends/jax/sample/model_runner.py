"""Run the sampling programs: owns the adapter pool and the KV cache, and calls the jitted programs.

Legend: S rows (of a slice, or first tokens of one prompt), T tokens of a chunk.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.compiler import Compiler, Program
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import fetch, is_distributed
from skyrl_tx.backends.jax.mesh import count_replicas
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.draw import DrawnTokens
from skyrl_tx.backends.jax.sample.layer_views import separate_layers, should_separate_layers
from skyrl_tx.backends.jax.sample.logit_adjustment import make_adjustment
from skyrl_tx.backends.jax.sample.programs import RowBatch, SliceResult
from skyrl_tx.backends.jax.sample.prompt_scores import PromptScores
from skyrl_tx.backends.jax.sample.row_inputs import (
    FIRST_ROWS,
    ProgramShapes,
    RowInputs,
    iter_copy_arguments,
    make_draw_params,
)
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, BlockTableRow, RunningSample, get_max_tokens
from skyrl_tx.backends.jax.sample.sampler_pool import LOWEST_RANK, SamplerPool
from skyrl_tx.backends.jax.sample.slice_parts import PlannedPart, SliceDivider, estimate_compilation_cost
from skyrl_tx.backends.jax.sample.slice_rows import (
    ComparedRows,
    DispatchedSlice,
    RowCounts,
    SlicePart,
    SliceRows,
    make_noise,
)
from skyrl_tx.backends.jax.shapes import (
    FIRST_CHUNK,
    MAX_PROMPTS_TOGETHER,
    PrefillShapes,
    SampleMemory,
    get_tile_size,
    iter_ascending,
    next_power_of_two,
)
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers.cache_state import BlockTable, Cache, DecodeSliceCache
from skyrl_tx.layers.kv_cache import MIN_SEGMENT_SIZE
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig, describe_cache, make_empty_cache


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next chunk of a prompt, after its first `start` positions."""

    table: BlockTableRow
    tokens: Int32Array
    start: int
    adapter: int
    """The adapter slot."""
    scores: PromptScores | None = None


class ModelRunner:
    """Runs the model on the devices for the scheduler."""

    def __init__(
        self,
        params: DecoderParams,
        model: ModelConfig,
        config: JaxConfig,
        memory: SampleMemory,
        *,
        num_adapter_slots: int,
        pool_rank: int = LOWEST_RANK,
        compiler: Compiler[Hashable] | None = None,
    ) -> None:
        """Allocate the sampler pool. One of the adapter slots is for the base model.

        `params` may be shapes until `set_params`. With a compiler, `queue_usual` and `precompile`
        compile programs in parallel.
        """
        assert config.max_sampler_adapters is not None
        self._compiler = compiler
        self._platform = next(iter(params.embed.sharding.device_set)).platform
        self.set_params(params)
        self._model = model
        self.vocab_size = model.vocab_size
        self._config = config
        self.memory = memory
        """The memory for keys and values of prompts and samples."""
        self._by_layer: DecoderParams | None = None  # a copy with separate layers, made for the first decode slice
        self._is_single_cpu = not params.layout.is_sharded and self._platform == "cpu"
        # With bfloat16 weights there is no guarantee that bits are independent of other samples.
        self._merges = not self._is_single_cpu and params.embed.dtype != jnp.float32
        self._max_adapters = 1 + config.max_sampler_adapters  # of one slice, including the base model
        self._num_shards = params.layout.num_shards("batch")
        self.prompts_of_shard = MAX_PROMPTS_TOGETHER if self._merges and self._num_shards == 1 else 1
        """The maximum number of prompts that a shard computes at the same time."""

        # The row counts of decode slices
        self._counts = self._make_row_counts()

        # The adapters of the samplers. On a single CPU device, bits must not depend on other adapters.
        max_samplers, exact = config.max_sampler_adapters, self._is_single_cpu
        self.pool = SamplerPool(
            model, max_samplers, params.layout, num_slots=num_adapter_slots, rank=pool_rank, separates_ranks=exact
        )

        # The programs of decode slices on a single CPU device
        cost = estimate_compilation_cost(model)
        self._divider = SliceDivider(
            self._counts, self._choose_read_length, self.pool.get_rank, compiler, self._make_rows_program, cost
        )

        # The inputs of slices and the cache.
        self._inputs, self._adjusted_inputs = (RowInputs(config.decode_slice_tokens) for _ in range(2))
        self._last_R = programs.make_last_tokens(params, self._counts.all[-1])
        self.runs_ahead = bool(config.async_decoding) and not self._is_single_cpu
        """Whether a slice may be dispatched before the previous slice is read."""
        self.prefers_few_rows = self._is_single_cpu
        """Whether a slice with fewer rows takes much less time."""
        self.cache: Cache = describe_cache(self._params, model, memory.num_pages, memory.num_states, memory.page)
        """The KV cache. It consists of shapes until it is allocated."""

    # Weights and cache

    def set_params(self, params: DecoderParams) -> None:
        """Use these weights, or their shapes."""
        self._params = separate_layers(params) if should_separate_layers(self._platform, params.layout) else params

    def allocate_cache(self, memory: SampleMemory) -> None:
        """Allocate an empty cache for all shards."""
        self.memory = memory
        self.cache = make_empty_cache(self._params, self._model, memory.num_pages, memory.num_states, memory.page)

    def computing(self) -> AbstractContextManager[None]:
        """Return a context for prefill and decode. On CPU, no likely program is compiled meanwhile."""
        if self._compiler is None or not self._is_single_cpu:
            return nullcontext()
        return self._compiler.computing()

    def copy(self, pages: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]], shard: int = 0) -> None:
        """Copy pages and states of a shard, given as (source, target) pairs.

        Raises BackendLost if the cache is lost.
        """
        for arguments in iter_copy_arguments(pages, states, shard, self._num_shards):
            with programs.detect_loss(self.cache):
                self.cache = programs.copy(self.cache, *arguments, layout=self._params.layout)

    @property
    def _shapes(self) -> ProgramShapes:
        return ProgramShapes(self._params, self._model, self._config, self.memory, self.cache)

    # Prompts

    def make_scores(self, request: SampleRequest) -> PromptScores:
        """Return empty scores for a request that asks for prompt scores."""
        limit = self._config.max_topk_logprobs
        return PromptScores(self._params, request, max_topk=limit, max_alt=limit)

    def _count_prefill_rows(self, num_prompts: int) -> int:
        """Return the number of rows of a prefill: all that each shard may use, or one for each shard.

        With at most half of the rows in use, computing the prompts one after another is cheaper.
        """
        return self._num_shards * (self.prompts_of_shard if num_prompts > self.prompts_of_shard // 2 else 1)

    def prefill(self, chunks: Sequence[PromptChunk], padded: int) -> list[jax.Array]:
        """Compute up to `prompts_of_shard` chunks on each shard, padded to `padded` tokens.

        Writes keys and values into the pages of the prompts, and returns the hidden state of the
        last token of each chunk. Raises BackendLost if the cache is lost.
        """
        num_rows = self._count_prefill_rows(len(chunks))
        if num_rows == 1 and len(chunks) > 1:
            return [last for chunk in chunks for last in self.prefill([chunk], padded)]

        rank = self.pool.get_rank(chunk.adapter for chunk in chunks)
        self._wait_for_program("prefill", padded, num_rows, rank)
        pool = self.pool.get_adapters(rank)

        # Assign each chunk to a row.
        tables: list[BlockTableRow | None] = [None] * num_rows
        token_BT = np.zeros((num_rows, padded), np.int32)
        adapter_B, start_B, last_B = np.zeros((3, num_rows), np.int32)
        last_B -= 1  # a row without a chunk writes nothing
        rows = [chunk.table.shard for chunk in chunks] if self._num_shards > 1 else range(len(chunks))
        for row, chunk in zip(rows, chunks, strict=True):
            size = chunk.tokens.size
            tables[row], token_BT[row, :size] = chunk.table, chunk.tokens
            adapter_B[row], start_B[row], last_B[row] = chunk.adapter, chunk.start, size - 1

        with programs.detect_loss(self.cache):
            hidden_BTD, last_hidden, self.cache = programs.prefill(
                self._params,
                self._model,
                pool,
                adapter_B,
                token_BT,
                start_B,
                last_B,
                self.cache,
                self._shapes.make_table(tables),
            )

        for row, chunk in zip(rows, chunks, strict=True):
            if chunk.scores is not None:
                hidden_TD = programs.get_row(hidden_BTD, np.int32(row), self._params.layout)
                chunk.scores.add(pool, chunk.adapter, hidden_TD, last_hidden[row], chunk.start)
        return [last_hidden[row] for row in rows]

    def draw_first(self, last_hidden: jax.Array, samples: Sequence[RunningSample]) -> DrawnTokens:
        """Draw the first tokens of samples of one request from the last hidden state of its prompt.

        The result has one step, N = 1, and its first rows are the samples in order. The same
        program draws for any number of samples, because different programs round differently.
        """
        adapter, wants_topk = samples[0].adapter, np.bool_(samples[0].request.options.sample_topk > 0)
        self._wait_for_program("first token", rank := self.pool.get_rank([adapter]))
        pool = self.pool.get_adapters(rank)
        logits_1V = programs.compute_first_logits(self._params, pool, np.int32(adapter), last_hidden)
        raw_logits = [logits_1V] if samples[0].reports_raw and samples[0].adjuster is not None else []
        if (adjuster := samples[0].adjuster) is not None:  # the first tokens of all samples have the same adjustment
            logits_1V = programs.adjust_first_logits(logits_1V, make_adjustment({0: adjuster}, 1, self.vocab_size))

        drawn = [
            programs.draw_first(
                logits_1V,
                make_draw_params(dict(enumerate(samples[start : start + FIRST_ROWS])), FIRST_ROWS),
                wants_topk,
                *raw_logits,
                max_topk=self._config.max_topk_logprobs,
            )
            for start in range(0, len(samples), FIRST_ROWS)
        ]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[None], *fetch(drawn))

    # Samples

    def dispatch(self, samples: Sequence[RunningSample], num_steps: int) -> DispatchedSlice:
        """Start up to `num_steps` decode steps of these samples, without waiting for the devices.

        If this runner `runs_ahead`, the tokens of the last slice need not have been read. The
        samples may be adjusted, see `RunningSample.is_adjusted`: then all of them are, all their
        tokens have been read, and `num_steps` is 1. Raises BackendLost if the cache is lost.
        """
        cache, is_adjusted = self.cache, samples[0].is_adjusted
        assert (all(sample.is_adjusted == is_adjusted for sample in samples) and num_steps == 1) or not is_adjusted
        if self._is_single_cpu:
            parts = self._divider.divide(samples, num_steps, self.memory.num_pages * self.memory.page)
            dispatched = [self._dispatch_rows(part.rows, num_steps, part.length) for part in parts]
        else:
            dispatched = [self._dispatch_rows(self._arrange(samples), num_steps)]
        return DispatchedSlice(dispatched, lambda: programs.detect_loss(cache))

    def _arrange(self, samples: Sequence[RunningSample]) -> SliceRows:
        rank = self.pool.get_rank(sample.adapter for sample in samples)
        num_rows = len(samples)
        if self._num_shards > 1:  # every shard has as many rows as the fullest shard needs
            num_rows = self._num_shards * max(Counter(sample.table.shard for sample in samples).values())
        count = self._counts.choose(num_rows, rank=rank, is_adjusted=samples[0].is_adjusted)
        return SliceRows.arrange(
            samples, count, merges=self._merges, num_shards=self._num_shards, max_adapters=self._max_adapters
        )

    def _make_row_counts(self) -> RowCounts:
        if self._is_single_cpu:
            directory, setup = self._config.compile_cache_dir, (self._model, self._params.kernels, self._config)
            compared = None if directory is None else ComparedRows(directory, *setup, self._params.embed.dtype.name)
            return RowCounts.for_single_cpu(self.memory.num_slots, self._decode_random_rows, compared)
        if self._merges:
            return RowCounts.for_accelerators(
                self.memory.num_rows, self._num_shards, count_replicas(self._params.layout)
            )
        return RowCounts([self.memory.num_rows])

    def _dispatch_rows(self, rows: SliceRows, num_steps: int, length: int = MIN_SEGMENT_SIZE) -> SlicePart:
        """Decode rows. A single CPU device decodes copies by layer of their first `length` positions."""
        adjusters = rows.get_adjusters()
        inputs = self._adjusted_inputs if adjusters else self._inputs  # each keeps the constants of its last slice
        table = inputs.make_table(rows, self.memory.table_pages)
        batch = inputs.make_batch(rows, from_last=not self._is_single_cpu)
        if adjusters:
            batch = replace(batch, adjustment=make_adjustment(adjusters, len(rows.samples), self.vocab_size))
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                sample.row = -1 if adjusters else row
        with programs.detect_loss(self.cache):
            if self._is_single_cpu:
                result = self._decode_on_cpu(table, batch, rows, num_steps, length)
            else:
                result = self._decode_slice(table, batch, rows, num_steps)
        return SlicePart(rows, batch.position_S, result, bool(batch.wants_topk))

    def _decode_on_cpu(
        self, table: BlockTable, batch: RowBatch, rows: SliceRows, num_steps: int, length: int
    ) -> SliceResult:
        rank = self.pool.get_rank(rows.adapters)
        self._divider.record_call(PlannedPart(rows, length, rank, is_adjusted=batch.adjustment is not None))
        max_steps = self._config.decode_slice_tokens
        pool = self.pool.gather(rows.adapters, rank) if rank else None
        opened = programs.open_rows(self.cache, table, batch.position_S, read_length=length, max_tokens=max_steps)
        live, num_run, result = self._run_decode_steps(pool, opened, batch, num_steps)
        self.cache = programs.close_rows(self.cache, live, batch.position_S, num_run, table)
        return result

    def _run_decode_steps(
        self, pool: Adapter | None, opened: DecodeSliceCache, batch: RowBatch, num_steps: int
    ) -> tuple[programs.Live, jax.Array, SliceResult]:
        params = self._by_layer = self._by_layer or programs.by_layer(self._params, self._model)
        past, topk = replace(opened, live=()), self._config.max_topk_logprobs
        return programs.run_rows(
            params, self._model, pool, past, opened.live, batch, np.int32(num_steps), max_topk=topk
        )

    def _make_rows_program(self, part: PlannedPart) -> Program:
        pool = self.pool.gather(part.rows.adapters, part.rank) if part.rank else None
        return self._shapes.make_rows_program(part, pool)

    def _decode_random_rows(self, count: int, rank: int, is_adjusted: bool) -> Any:
        """Decode random rows and return the results, with leaves [count, ...].

        The inputs of a row depend on its index alone, so results with different counts can be
        compared.
        """
        max_steps = self._config.decode_slice_tokens
        position_S = np.arange(count, dtype=np.int32) * 37 % MIN_SEGMENT_SIZE
        opened = programs.open_rows(
            self.cache,
            self._shapes.make_table([None] * count),
            position_S,
            read_length=MIN_SEGMENT_SIZE,
            max_tokens=max_steps,
        )
        opened = replace(opened, past=make_noise(opened.past), live=make_noise(opened.live))

        adapters, pool = [BASE_SLOT] * (count // get_tile_size(count)), None
        if rank:
            pool = self.pool.gather(adapters, rank)
            pool = pool.replace(rows=make_noise(pool.rows, is_same=True))  # type: ignore[attr-defined]

        batch = self._inputs.make_batch(SliceRows((None,) * count, tuple(adapters)))
        token_S, num_left_S = position_S % self._model.vocab_size, np.full(count, max_steps, np.int32)
        batch = replace(batch, position_S=position_S, token_S=token_S, num_left_S=num_left_S)
        if is_adjusted:
            batch = replace(batch, adjustment=make_adjustment({}, count, self.vocab_size))
        live, _, result = jax.device_get(self._run_decode_steps(pool, opened, batch, max_steps))
        return live, np.swapaxes(result.drawn.logprobs, 0, 1), np.swapaxes(result.drawn.tokens, 0, 1)

    def _decode_slice(self, table: BlockTable, batch: RowBatch, rows: SliceRows, num_steps: int) -> SliceResult:
        is_adjusted = batch.adjustment is not None
        self._wait_for_program(*rows.make_key(is_adjusted=is_adjusted))
        arguments, static = self._make_slice_arguments(table, batch, num_steps, any_adapter=rows.any_adapter)
        self.cache, last_R, result = programs.decode_slice(*arguments, **static)
        if not is_adjusted:  # the host reads the tokens of an adjusted slice before the next one
            self._last_R = last_R
        return result

    def _make_slice_arguments(
        self, table: BlockTable, batch: RowBatch, num_steps: int, *, any_adapter: bool
    ) -> tuple[tuple[Any, ...], dict[str, int]]:
        pool = self.pool.get_adapters(self.pool.get_rank([BASE_SLOT + any_adapter]))
        arguments = self._params, self._model, pool, self.cache, table, batch, self._last_R, np.int32(num_steps)
        static = {"max_steps": self._config.decode_slice_tokens, "max_topk": self._config.max_topk_logprobs}
        return arguments, static

    def _choose_read_length(self, longest: int) -> int:
        """Return how many KV positions a slice reads per row if its longest sample has `longest`."""
        return min(max(next_power_of_two(longest), MIN_SEGMENT_SIZE), self.memory.table_pages * self.memory.page)

    # Compilation

    def precompile(self, requests: Sequence[SampleRequest]) -> None:
        """Start to compile, in parallel, the programs that these requests are the first to need.

        A call of such a program waits for the compiler and then finds the program compiled. All
        other programs, for example for slices with multiple adapters, are compiled when they are
        first called. A CPU compiles nothing here, because its cores are needed to compute.
        """
        if self._compiler is None or self._is_single_cpu:
            return
        shapes = PrefillShapes.from_config(self._config, self.memory.max_length)
        for any_adapter in sorted({request.sampler is not None for request in requests}):
            group = [request for request in requests if (request.sampler is not None) == any_adapter]
            rank = self.pool.get_rank([BASE_SLOT + any_adapter])
            num_rows = self._count_prefill_rows(len(group))

            # Prefill, then decode slices if all samples share an adapter.
            for request in group:
                for size in shapes.iter_prompt_sizes(request.prompt.size):
                    program = partial(self._shapes.make_prefill_program, size, num_rows, self.pool.get_adapters(rank))
                    self._compiler.queue_needed(("prefill", size, num_rows, rank), program, request.cache_scope)
            num_samples = sum(request.num_samples for request in group if get_max_tokens(request) > 1)
            if num_samples and len({request.sampler for request in group}) == 1:
                count = self._counts.choose(min(num_samples, self.memory.num_rows), rank=rank)
                rows = next(SliceRows.iter_shapes(count, BASE_SLOT + any_adapter, merges=self._merges))
                program = partial(self._make_slice_program, rows)
                self._compiler.queue_needed(rows.make_key(), program, group[0].cache_scope)

    def is_compiled(self, samples: Sequence[RunningSample]) -> bool:
        """Return whether the slice of adjusted samples is compiled; if not, compile it in the background.

        Always true where `dispatch` compiles it: on a CPU, and on multiple hosts, which must agree.
        """
        if self._compiler is None or self._is_single_cpu or is_distributed():
            return True
        rows = self._arrange(samples)
        key = rows.make_key(is_adjusted=True)
        self._compiler.queue_needed(key, partial(self._make_slice_program, rows, is_adjusted=True))
        return key in self._compiler.ready

    def _make_slice_program(self, rows: SliceRows, *, is_adjusted: bool = False) -> Program:
        inputs = self._shapes.make_slice_inputs(rows, is_adjusted=is_adjusted)
        return Program(programs.decode_slice, *self._make_slice_arguments(*inputs, 1, any_adapter=rows.any_adapter))

    def _wait_for_program(self, *key: Hashable) -> None:
        """Wait for a program that is being compiled."""
        if self._compiler is not None:
            self._compiler.wait_if_pending(key)

    def queue_usual(self) -> None:
        """Begin to compile prefill programs and slices of one adapter in parallel, then other slices."""
        assert self._compiler is not None
        for size, slot, number in self._iter_chunk_shapes(BASE_SLOT + 1):
            num_rows, rank = self._num_shards * number, self.pool.get_rank([slot])
            program = partial(self._shapes.make_prefill_program, size, num_rows, self.pool.get_adapters(rank))
            self._compiler.queue_needed(("prefill", size, num_rows, rank), program)
        for rows, _ in self._iter_slice_shapes(BASE_SLOT + 1):
            if rows.groups is None:
                self._compiler.queue_needed(rows.make_key(), partial(self._make_slice_program, rows))
            else:
                self._compiler.queue_likely([(rows.make_key(), self._make_slice_program(rows))])

    def queue_first_samples(self, rank: int) -> None:
        """On a CPU, compile the programs of a server's first samples while no request uses the cores.

        These are samples of the base model, and samples of an adapter of `rank`.
        """
        assert self._compiler is not None and self._is_single_cpu
        size = min(PrefillShapes.from_config(self._config, self.memory.max_length).chunk_size, FIRST_CHUNK)
        for used_rank in (0, rank):
            parts = self._divider.list_first_programs(used_rank)
            pools = [self.pool.describe(part.rows.adapters, rank) if used_rank else None for part in parts]
            pool = None if pools[0] is None else Adapter(pools[0].weights, pools[0].scale)
            likely = [
                (("prefill", size, 1, used_rank), self._shapes.make_prefill_program(size, 1, pool)),
                (("first token", used_rank), self._shapes.make_first_token_program(pool)),
            ]
            rows_programs = map(self._shapes.make_rows_program, parts, pools)
            keys = (part.key for part in parts)
            self._compiler.queue_likely([*likely, *zip(keys, rows_programs, strict=True)])

    def compile_all(self, sampler: SamplerId, *, usual_only: bool = False) -> None:
        """Run every program once, with and without the adapter of `sampler`.

        Nothing may be running. With `usual_only`, slices of multiple adapters do not run.
        """
        adapter = self.pool.get_slot(sampler)
        for size, slot, number in self._iter_chunk_shapes(adapter):
            chunk = PromptChunk(BlockTableRow([]), np.zeros(1, np.int32), 0, slot)
            self.prefill([chunk] * number, size)
        self.copy([(0, 0)], ())
        for rows, length in self._iter_slice_shapes(adapter):
            if not usual_only or rows.groups is None:
                self._dispatch_rows(rows, 1, self._choose_read_length(length))

    def _iter_chunk_shapes(self, adapter: int) -> Iterator[tuple[int, int, int]]:
        """Yield padded size, adapter slot and number of prompts of every prefill program."""
        shapes = PrefillShapes.from_config(self._config, self.memory.max_length)
        return product(shapes.iter_padded_sizes(), (BASE_SLOT, adapter), {1, self.prompts_of_shard})

    def _iter_slice_shapes(self, adapter: int) -> Iterator[tuple[SliceRows, int]]:
        """Yield empty rows in every shape of a slice, with a KV read length for each."""
        num_slots, max_positions = self.memory.num_rows, self.memory.num_pages * self.memory.page
        lengths = (
            iter_ascending(self._choose_read_length, self.memory.max_length)
            if self._is_single_cpu
            else [MIN_SEGMENT_SIZE]
        )
        for length, slot in product(lengths, (BASE_SLOT, adapter)):
            rank = self.pool.get_rank([slot])
            counts = {self._counts.choose(num, rank=rank) for num in range(1, num_slots + 1)}
            for count in sorted(counts):
                if count == min(counts) or count * self._choose_read_length(length) <= max_positions:
                    shapes = SliceRows.iter_shapes(count, slot, merges=self._merges, max_adapters=self._max_adapters)
                    yield from ((rows, length) for rows in shapes)
