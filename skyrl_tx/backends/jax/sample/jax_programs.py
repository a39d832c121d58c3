"""Sampling on the devices: the adapter pool, the prompt buffers, the KV cache, and calls of the jitted programs.

Legend: S rows (KV cache slots, or first tokens of one prompt), T tokens of a chunk.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from skyrl_tx.backends.jax.sample.running import BASE, PromptKV, RunningSample
from skyrl_tx.backends.jax.shapes import KVLayout, PrefillShapes, ascending, next_power, tiles
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers import held
from skyrl_tx.layers.held import Cache
from skyrl_tx.layers.kv_cache import SEGMENT
from skyrl_tx.models import DecoderParams, ModelConfig, empty_cache

MAX_INT32 = 2**31 - 1

TRANSFER = 256
"""Positions that one copy between device and host moves."""

FIRST_ROWS = 8
"""First tokens that one call draws."""

Rows = Mapping[int, RunningSample]
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

    def decode(self, samples: Rows, adapters: Sequence[int], num_steps: int) -> Drawn:
        """Run `num_steps` decode steps of all slots.

        `samples` are by slot. `adapters` are the adapter slots of each tile of slots, or of each slot. Raises
        BackendLost if the cache is lost.
        """
        batch = slot_batch(samples, self._layout.num_slots, adapters)
        longest = max(sample.position for sample in samples.values())
        any_adapter = any(sample.adapter != BASE for sample in samples.values())
        return self._run_slice(batch, adapters, num_steps, self._read_length(longest), any_adapter)

    def _run_slice(
        self, batch: SlotBatch, adapters: Sequence[int], num_steps: int, read_length: int, any_adapter: bool
    ) -> Drawn:
        params, pool = self._params, self.pool.adapters(any_used=any_adapter)
        if self._is_one_cpu:
            self._by_layer = params = self._by_layer or programs.by_layer(params, self._model)
            pool = self.pool.gathered(adapters) if any_adapter else None
        with self._detect_loss():
            self._cache, drawn = programs.decode_slice(
                params,
                self._model,
                pool,
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
        by_tile, by_slot = [BASE] * len(tiles(num_slots)), [BASE] * num_slots
        batch = slot_batch({}, num_slots, by_tile)
        for read_length in ascending(self._read_length, length):
            for adapters, any_adapter in ((by_tile, False), (by_tile, True), (by_slot, True)):
                each = replace(batch, adapter_G=jnp.asarray(adapters, jnp.int32))
                self._run_slice(each, adapters, 1, read_length, any_adapter)


def draw_params(samples: Rows, num_rows: int) -> DrawParams:
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


def slot_batch(samples: Rows, num_slots: int, adapters: Sequence[int]) -> SlotBatch:
    """Return the inputs of the next decode slice."""
    return SlotBatch(
        token_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.last_token),
        position_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.position),
        num_drawn_S=_column(samples, num_slots, np.int32, 0, lambda sample: sample.num_drawn),
        adapter_G=jnp.asarray(adapters, jnp.int32),
        draws=draw_params(samples, num_slots),
        wants_topk=jnp.asarray(any(sample.request.options.sample_topk > 0 for sample in samples.values())),
    )


def _column(
    samples: Rows, num_rows: int, dtype: type[np.generic], fill: float, value: Callable[[RunningSample], float]
) -> jax.Array:
    column = np.full(num_rows, fill, dtype)
    for row, sample in samples.items():
        column[row] = value(sample)
    return jnp.asarray(column)
