"""Sampling on the devices: the adapter pool, the prompt buffers, the KV cache, and calls of the jitted programs.

Legend: S rows (KV cache slots, or first tokens of one prompt), T tokens of a chunk.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.distributed import fetch
from skyrl_tx.backends.jax.memory import num_adapter_slots, plan_sample_memory
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.adapter_pool import SamplerPool
from skyrl_tx.backends.jax.sample.draw import Drawn, DrawParams, seed_words
from skyrl_tx.backends.jax.sample.programs import SlotBatch
from skyrl_tx.backends.jax.sample.prompt_scores import PromptScores
from skyrl_tx.backends.jax.sample.rows import RowCounts, Rows
from skyrl_tx.backends.jax.sample.running import BASE, PromptKV, RunningSample
from skyrl_tx.backends.jax.shapes import KVLayout, PrefillShapes, ascending, next_power, tiles
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers import held
from skyrl_tx.layers.held import Cache, SliceCache
from skyrl_tx.layers.kv_cache import SEGMENT
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.layers.parameter import INITIAL_STD, pseudo_random
from skyrl_tx.models import DecoderParams, ModelConfig, empty_cache

MAX_INT32 = 2**31 - 1

TRANSFER = 256
"""Positions that one copy between device and host moves."""

FIRST_ROWS = 8
"""First tokens that one call draws."""

ByRow = Mapping[int, RunningSample]
"""The sample of each row that has one."""


class JaxPrograms:
    """The devices, as the scheduler sees them."""

    def __init__(self, params: DecoderParams, model: ModelConfig, config: JaxConfig) -> None:
        self._params = params
        self._model = model
        self._config = config
        num_slots = num_adapter_slots(config, params, model)
        self.pool = SamplerPool(model, config.max_sampler_adapters, params.layout, num_slots=num_slots)
        """The adapters of the samplers."""
        self.memory = plan_sample_memory(config, params, model)
        """The memory for keys and values of samples and prompts."""
        self._by_layer: DecoderParams | None = None  # a copy with separate layers, made for the first decode slice
        self._is_one_cpu = not params.layout.is_split and all(each.platform == "cpu" for each in params.embed.devices())
        self._layout = self.memory.layout_for(1)
        self._transfer = min(TRANSFER, self._layout.length)  # every layout's slots are at least as long
        self._shortest = min(SEGMENT, self._layout.length)
        self._counts = RowCounts(config.sample_slots, self._bits_of)
        self._cache: Cache | None = None

    # Prompts

    def allocate_prompt(self, length: int) -> PromptKV:
        """Return an empty prompt buffer."""
        return PromptKV(empty_cache(self._params, self._model, 1, length), length)

    def copy_prompt(self, prompt: PromptKV, length: int, state: Any = None) -> PromptKV:
        """Return a copy of a prompt buffer, cut or extended to `length` positions, with its own state or a kept one."""
        data = prompt.data if state is None else held.with_state(prompt.data, state)
        return PromptKV(programs.copy_prompt(data, length=length), length)

    def copy_state(self, prompt: PromptKV) -> Any:
        """Return a copy of a prompt's state of fixed size, to keep."""
        return programs.copy_state(held.state_of(prompt.data))

    def scores(self, request: SampleRequest) -> PromptScores:
        """Return empty scores for a request that asks for them."""
        limit = self._config.max_topk_logprobs
        return PromptScores(self._params, request, max_topk=limit, max_alt=limit)

    def extend(
        self,
        prompt: PromptKV,
        tokens: Int32Array,
        start: int,
        *,
        padded: int,
        adapter: int,
        scores: PromptScores | None,
    ) -> jax.Array:
        """Compute a chunk of a prompt, padded to `padded` tokens, after its first `start` positions.

        Writes the keys into `prompt` and returns the hidden state of the chunk's last token.
        """
        pool = self.pool.adapters(any_used=adapter != BASE)
        hidden_TD, last_1D, prompt.data = programs.extend(
            self._params,
            self._model,
            pool,
            np.int32(adapter),
            np.pad(tokens, (0, padded - tokens.size)),
            np.int32(start),
            np.int32(tokens.size - 1),
            prompt.data,
        )
        if scores is not None:
            scores.add(pool, adapter, hidden_TD, start)
        return last_1D

    def draw_first(self, last_hidden: jax.Array, samples: Sequence[RunningSample]) -> Drawn:
        """Draw the first token of samples of one request from its prompt's last hidden state.

        N is 1, and the first rows are the samples in order. One program draws for any number of samples, because
        programs round differently: a sample's row has the same bits with any others.
        """
        adapter, wants_topk = samples[0].adapter, np.bool_(samples[0].request.options.sample_topk > 0)
        pool = self.pool.adapters(any_used=adapter != BASE)
        logits_1V = programs.first_logits(self._params, pool, np.int32(adapter), last_hidden)
        drawn = [
            programs.draw_first(
                logits_1V,
                draw_params(dict(enumerate(samples[start : start + FIRST_ROWS])), FIRST_ROWS),
                wants_topk,
                max_topk=self._config.max_topk_logprobs,
            )
            for start in range(0, len(samples), FIRST_ROWS)
        ]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[None], *fetch(drawn))

    # The KV cache

    def allocate_cache(self, layout: KVLayout) -> None:
        """Replace the KV cache by an empty one."""
        self._cache = None  # freed before the next is allocated
        self._layout = layout
        self._cache = empty_cache(self._params, self._model, layout.num_slots, layout.length)

    @property
    def cache(self) -> Cache:
        """The KV cache."""
        assert self._cache is not None
        return self._cache

    def insert(self, prompt: PromptKV, num_tokens: int, slots: Sequence[int]) -> None:
        """Copy the first `num_tokens` positions of a prompt into slots. Raises BackendLost if the cache is lost."""
        num_slots = self._layout.num_slots
        slot_S = np.full(num_slots, num_slots, np.int32)
        slot_S[: len(slots)] = slots
        with self._detect_loss():
            self._cache = programs.insert(self.cache, prompt.data, np.int32(num_tokens), slot_S, np.int32(len(slots)))

    def read_slot(self, slot: int, num_positions: int) -> list[tuple[int, Cache]]:
        """Return a copy of a slot's first positions on the host: blocks of equal size, with their first positions."""
        size = self._transfer
        last = max(num_positions - size, 0)  # the last block ends at the last position, so it fits into any slot
        return [
            (start, fetch(programs.read_positions(self.cache, np.int32(slot), np.int32(start), size=size)))
            for start in (*range(0, last, size), last)
        ]

    def write_slot(self, saved: list[tuple[int, Cache]], slot: int) -> None:
        """Write what `read_slot` returned into a slot of the current cache."""
        for start, block in saved:
            self._cache = programs.write_positions(self.cache, block, np.int32(slot), np.int32(start))

    def decode(self, samples: ByRow, adapters: Sequence[int], num_steps: int) -> Drawn:
        """Run `num_steps` decode steps of these samples, or of all slots, and return the tokens by slot.

        `samples` are by slot. `adapters` are the adapter slots of each tile of slots, or of each slot. Raises
        BackendLost if the cache is lost.
        """
        num_slots, any_adapter = self._layout.num_slots, any(sample.adapter != BASE for sample in samples.values())
        read_length = self._read_length(max(sample.position for sample in samples.values()))
        if not self._is_one_cpu:
            batch = slot_batch(samples, num_slots, adapters, self._config.decode_slice_tokens)
            return self._run_slice(batch, num_steps, read_length, any_adapter)
        rows = Rows.arrange(samples, self._counts.least(len(samples), any_adapter=any_adapter))
        drawn = self._run_rows(rows, samples, num_steps, read_length, any_adapter)
        row_S = rows.of_slots(num_slots)
        return jax.tree.map(lambda leaf: leaf[:, row_S], drawn)

    def _run_rows(
        self, rows: Rows, samples: Mapping[int, RunningSample], num_steps: int, read_length: int, any_adapter: bool
    ) -> Drawn:
        """Decode on one CPU device: only the rows, with copies of weights and cache by layer."""
        max_steps = self._config.decode_slice_tokens
        batch = slot_batch(rows.by_row(samples), len(rows.slots), rows.adapters, max_steps)
        pool = self.pool.gathered(rows.adapters) if any_adapter else None
        slot_S = rows.index(self._layout.num_slots)
        opened = programs.open_rows(self.cache, slot_S, batch.position_S, read_length=read_length, max_tokens=max_steps)
        live, drawn = self._run_opened(pool, opened, batch, num_steps)
        with self._detect_loss():
            self._cache = programs.close_rows(self.cache, live, batch.position_S, np.int32(num_steps), slot_S)
            return jax.device_get(drawn)

    def _run_opened(
        self, pool: Adapter | None, opened: SliceCache, batch: SlotBatch, num_steps: int
    ) -> tuple[programs.Live, Drawn]:
        self._by_layer = params = self._by_layer or programs.by_layer(self._params, self._model)
        past, topk = replace(opened, live=()), self._config.max_topk_logprobs
        return programs.run_rows(
            params, self._model, pool, past, opened.live, batch, np.int32(num_steps), max_topk=topk
        )

    def _bits_of(self, count: int, any_adapter: bool) -> Any:
        """Return what a slice computes of random rows, whose numbers depend on the row alone: leaves [count, ...]."""
        max_steps = self._config.decode_slice_tokens
        position_S = np.arange(count, dtype=np.int32) * 37 % self._shortest
        open_rows = partial(held.open_rows, read_length=self._shortest, max_tokens=max_steps)
        shapes = jax.eval_shape(open_rows, self.cache, position_S, position_S)
        opened = replace(
            shapes, past=noise(shapes.past), live=noise(shapes.live), start_S=position_S, num_recent=np.int32(0)
        )
        adapters, pool = [BASE] * len(tiles(count)), None
        if any_adapter:
            pool = self.pool.gathered(adapters)
            one = noise(jax.tree.map(lambda leaf: leaf[:1], pool.rows))
            same = jax.tree.map(lambda leaf, own: jnp.broadcast_to(own, leaf.shape), pool.rows, one)
            pool = pool.replace(rows=same)  # type: ignore[attr-defined]
        batch = slot_batch({}, count, adapters, max_steps)
        batch = replace(batch, position_S=position_S, token_S=position_S % self._model.vocab_size)
        live, drawn = jax.device_get(self._run_opened(pool, opened, batch, max_steps))
        return live, np.swapaxes(drawn.logprobs, 0, 1), np.swapaxes(drawn.tokens, 0, 1)

    def _run_slice(self, batch: SlotBatch, num_steps: int, read_length: int, any_adapter: bool) -> Drawn:
        """Decode all slots."""
        with self._detect_loss():
            self._cache, drawn = programs.decode_slice(
                self._params,
                self._model,
                self.pool.adapters(any_used=any_adapter),
                self.cache,
                batch,
                np.int32(num_steps),
                read_length=read_length,
                max_steps=self._config.decode_slice_tokens,
                max_topk=self._config.max_topk_logprobs,
            )
            return fetch(drawn)

    def _read_length(self, longest: int) -> int:
        """Return the KV read length of a slice before which the longest live sample has `longest` positions."""
        return min(max(next_power(longest), SEGMENT), self._layout.length)

    @contextmanager
    def _detect_loss(self) -> Generator[None]:
        """Raise BackendLost for a failure after which the cache, which programs update in place, is gone."""
        cache = self.cache
        try:
            yield
        except Exception as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
                raise BackendLost(f"decoding failed and destroyed the KV cache: {error}") from error
            raise

    # Compilation

    def compile_all(self, sampler: SamplerId) -> None:
        """Run every program once, with and without the adapter of `sampler`.

        Nothing may be running. Leaves an empty KV cache.
        """
        shapes = PrefillShapes.of(self._config, self.memory.max_length)
        for adapter in (BASE, self.pool.slot_of(sampler)):
            self._compile_prefill(shapes, adapter)
        for length in ascending(lambda size: self.memory.layout_for(size).length, self.memory.max_length):
            self.allocate_cache(self.memory.layout_for(length))
            for size in shapes.buffer_lengths():
                self.insert(self.allocate_prompt(size), 0, ())
            self.write_slot(self.read_slot(0, 1), 0)
            self._compile_decode(length)

    def _compile_prefill(self, shapes: PrefillShapes, adapter: int) -> None:
        for length in shapes.buffer_lengths():
            prompt = self.allocate_prompt(length)
            for size in shapes.padded_sizes():
                self.extend(prompt, np.zeros(1, np.int32), 0, padded=size, adapter=adapter, scores=None)
            state = self.copy_state(prompt)
            for other in shapes.buffer_lengths():
                self.copy_prompt(prompt, other, state)

    def _compile_decode(self, length: int) -> None:
        num_slots = self._layout.num_slots
        for read_length in ascending(self._read_length, length):
            for is_by_tile, any_adapter in ((True, False), (True, True), (False, True)):
                counts = [num_slots]
                if self._is_one_cpu:
                    counts = {self._counts.least(num, any_adapter=any_adapter) for num in range(1, num_slots + 1)}
                for count in sorted(counts):
                    adapters = (BASE,) * (len(tiles(count)) if is_by_tile else count)
                    if self._is_one_cpu:
                        self._run_rows(Rows((None,) * count, adapters), {}, 1, read_length, any_adapter)
                    else:
                        batch = slot_batch({}, count, adapters, self._config.decode_slice_tokens)
                        self._run_slice(batch, 1, read_length, any_adapter)


def draw_params(samples: ByRow, num_rows: int) -> DrawParams:
    """Return the sampling parameters of each row; rows without a sample are greedy and unfiltered."""
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


def noise(shapes: Any) -> Any:
    """Return numbers of deviation 1 in the shapes. They depend on the leaf and their index in it, not on its size."""
    leaves, tree = jax.tree.flatten(shapes)
    found = (
        (pseudo_random(leaf.shape, n, jnp.float32) / INITIAL_STD).astype(leaf.dtype) for n, leaf in enumerate(leaves)
    )
    return jax.tree.unflatten(tree, found)


def slot_batch(samples: ByRow, num_slots: int, adapters: Sequence[int], max_steps: int) -> SlotBatch:
    """Return the inputs of the next decode slice, of up to `max_steps`."""
    given_SN = np.full((num_slots, max_steps), -1, np.int32)
    for row, sample in samples.items():
        given = sample.tokens_again()[:max_steps]
        given_SN[row, : given.size] = given
    return SlotBatch(
        token_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.last_token),
        position_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.position),
        num_drawn_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.num_drawn - sample.num_again),
        given_SN=jnp.asarray(given_SN),
        adapter_G=jnp.asarray(adapters, jnp.int32),
        draws=draw_params(samples, num_slots),
        wants_topk=jnp.asarray(any(sample.request.options.sample_topk > 0 for sample in samples.values())),
    )


def _column(
    samples: ByRow, num_rows: int, dtype: type[np.generic], fill: float, value: Callable[[RunningSample], float]
) -> jax.Array:
    column = np.full(num_rows, fill, dtype)
    for row, sample in samples.items():
        column[row] = value(sample)
    return jnp.asarray(column)
