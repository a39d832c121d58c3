"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire. The jitted half: decode.py.

A step computes some chunks of prompts, then decodes one slice of all slots; requests join and leave in between.
Programs depend on shapes alone, and a sample's numbers on its own request: the decode batch has all slots always, free
ones included.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.buckets import ascending, next_power
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.decode import SliceRows
from skyrl_tx.backends.jax.memory import SampleRoom, sample_room
from skyrl_tx.backends.jax.prefill import Prefill, Prefiller, empty_keys
from skyrl_tx.backends.jax.sample_rows import draw_params, slice_rows, tokens_of
from skyrl_tx.backends.jax.sampler_pool import SamplerPool
from skyrl_tx.backends.jax.sampling import Drawn
from skyrl_tx.backends.jax.slots import BASE, CacheShape, RunningSample, Slots, cache_shape, max_tokens, num_cached
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.results import PromptResult, SampleDelta
from skyrl_tx.layers.kv_cache import SEGMENT, KeyValues
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig

log = logging.getLogger(__name__)

FIRST_ROWS = (1, 8, 64)  # samples whose first tokens are drawn at once; more take turns


@dataclass(slots=True)
class Lane:
    """Requests in order of arrival; the prompt of at most one is computed in part."""

    waiting: dict[RequestId, SampleRequest] = field(default_factory=dict[RequestId, SampleRequest])
    current: Prefill | None = None

    def forget(self, request_id: RequestId) -> None:
        """Of no effect when it is not here."""
        self.waiting.pop(request_id, None)
        if self.current is not None and self.current.request.request_id == request_id:
            self.current = None


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt's keys and values [L, 1, K, C, H], and those of its samples that wait for a slot."""

    request: SampleRequest
    keys: KeyValues
    samples: deque[RunningSample]


class Sampler:
    """Everything that is being sampled, and the frozen adapters it is sampled from."""

    def __init__(
        self, params: DecoderParams, model_config: ModelConfig, config: JaxConfig, eos_token_ids: Collection[int]
    ) -> None:
        self._params = params
        self._model = model_config
        self._config = config
        self._eos = frozenset(eos_token_ids)
        self._pool = SamplerPool(model_config, config.max_sampler_adapters, params.layout)
        self.room: SampleRoom = sample_room(config, params, model_config)
        """What the device has for samples and for prompts."""
        self.max_length = longest_sample(model_config, config, self.room)
        """Prompt and new tokens that one sample may have."""
        self._prefiller = Prefiller(
            params, model_config, config, self._pool, max_length=self.max_length, prefix_tokens=self.room.prefix_tokens
        )
        self._layers: DecoderParams | None = None  # each by itself: a copy, made when there is something to decode
        self._is_one_cpu = not params.layout.is_split and all(each.platform == "cpu" for each in params.embed.devices())
        self._shape = self._shape_for(1)
        self._cache = self._empty_cache()
        self._slots = Slots(self._shape.num_slots)
        self._scored = Lane()  # of one new token: they need no slot and pass the others
        self._prompts = Lane()
        self._prefilled: deque[PrefilledPrompt] = deque()

    def load(self, sampler: SamplerId, adapter: Adapter) -> None:
        """Copy an adapter of any padded rank; of no effect when it is there. Raises CapacityError."""
        self._pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free an adapter's slot. Idempotent."""
        assert not any(request.sampler == sampler for request in self._requests()), f"{sampler} is in use"
        self._prefiller.prefixes.drop(sampler)
        self._pool.drop(sampler)

    def begin(self, batch: PreparedSampleBatch) -> None:
        """Queue prompts; none of them when one is refused with UserError."""
        for request in batch.requests:
            if num_cached(request) > self.max_length:
                raise UserError(
                    f"prompt of {request.prompt.size} tokens and max_tokens {max_tokens(request)} make "
                    f"{num_cached(request)}, more than the {self.max_length} that one sample may have here"
                )
        for request in batch.requests:
            lane = self._scored if max_tokens(request) == 1 else self._prompts
            lane.waiting[request.request_id] = request

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget requests wherever they are. Unknown ids are of no effect."""
        gone = frozenset(request_ids)
        for request_id in gone:
            self._scored.forget(request_id)
            self._prompts.forget(request_id)
        self._prefilled = deque(prompt for prompt in self._prefilled if prompt.request.request_id not in gone)
        for slot, sample in self._slots.live.items():
            if sample.request.request_id in gone:
                self._slots.release(slot)

    def end(self, request_id: RequestId, index: int) -> None:
        """Forget one sample, whether it has a slot or waits for one. An unknown one is of no effect."""
        kept: deque[PrefilledPrompt] = deque()
        for prompt in self._prefilled:
            if prompt.request.request_id == request_id:
                samples = deque(sample for sample in prompt.samples if sample.index != index)
                prompt = replace(prompt, samples=samples)
            if prompt.samples:
                kept.append(prompt)
        self._prefilled = kept
        for slot, sample in self._slots.live.items():
            if (sample.request.request_id, sample.index) == (request_id, index):
                self._slots.release(slot)

    def step(self) -> list[SampleDelta]:
        """Compute what fits of prompts, then decode one slice; empty when there is nothing to do.

        A delta without tokens stands for a step in which no prompt came to its end and nothing was decoded.
        Raises BackendLost when a failure took the cache along.
        """
        deltas = self._admit() + self._decode()
        under_way = [lane.current.request for lane in (self._scored, self._prompts) if lane.current is not None]
        if not deltas and under_way:
            return [_empty_delta(under_way[0])]
        return deltas

    def _requests(self) -> Iterator[SampleRequest]:
        """All requests that have not ended."""
        for lane in (self._scored, self._prompts):
            yield from lane.waiting.values()
            if lane.current is not None:
                yield lane.current.request
        for prompt in self._prefilled:
            yield prompt.request
        for sample in self._slots.live.values():
            yield sample.request

    def _admit(self) -> list[SampleDelta]:
        """Compute prompts in order of arrival, within a budget: running samples shall not wait for long.

        A prompt that takes several steps leaves half of them to those behind it that can be computed whole.
        """
        deltas: list[SampleDelta] = []
        self._fill_slots()
        for lane in (self._scored, self._prompts):
            budget = self._config.prefill_tokens
            if (current := lane.current) is not None:
                lane.current = None
                share = budget // 2 if lane.waiting else budget
                budget -= self._compute(current, share, lane, deltas)
            while budget > 0 and (request := self._next(lane, budget)) is not None:
                del lane.waiting[request.request_id]
                budget -= self._compute(request, budget, lane, deltas)
        return deltas

    def _next(self, lane: Lane, budget: int) -> SampleRequest | None:
        """Return the request whose prompt is next: the oldest, or while one is under way the oldest that is short."""
        for request in lane.waiting.values():
            if lane.current is None or request.prompt.size <= budget:
                return request if lane is self._scored or self._can_place(request) else None
        return None

    def _can_place(self, request: SampleRequest) -> bool:
        """Whether a sample of the request can have a slot now.

        The cache must have the shape that suits the longest of the running samples and this one. It is given another
        shape once nothing runs: until then a longer request waits, and so does a shorter one when the longest has left.
        """
        if self._prefilled:
            return False
        current = [] if self._prompts.current is None else [self._prompts.current.request]
        placed = [*current, *(sample.request for sample in self._slots.live.values())]
        wanted = self._shape_for(max(num_cached(each) for each in [request, *placed]))
        if wanted != self._shape and not placed:
            self._reshape(wanted)
        return wanted == self._shape and bool(self._slots.free)

    def _reshape(self, shape: CacheShape) -> None:
        del self._cache  # before there is another
        self._shape, self._slots = shape, Slots(shape.num_slots)
        self._cache = self._empty_cache()

    def _shape_for(self, needed: int) -> CacheShape:
        num_slots, tokens = self._config.sample_slots, self.room.tokens
        return cache_shape(needed, num_slots=num_slots, max_tokens=tokens, max_length=self.max_length)

    def _empty_cache(self) -> KeyValues:
        return empty_keys(self._params, self._model, self._shape.num_slots, self._shape.length)

    def _compute(self, prompt: SampleRequest | Prefill, budget: int, lane: Lane, deltas: list[SampleDelta]) -> int:
        """Compute a prompt as far as the budget goes, at least a chunk; return how many tokens that were.

        A failure ends this request alone, since nothing that others use was changed.
        """
        num_tokens = 0
        request = prompt.request if isinstance(prompt, Prefill) else prompt
        try:
            prefill = prompt if isinstance(prompt, Prefill) else self._prefiller.begin(prompt)
            while not prefill.is_done and num_tokens < budget:
                num_tokens += self._prefiller.advance(prefill)
            if prefill.is_done:
                deltas += self._draw_first(prefill)
            else:
                lane.current = prefill
        except Exception as error:
            log.exception("prefill of request %s failed", request.request_id)
            deltas.append(_empty_delta(request, error=f"the prompt could not be computed: {error}"))
        self._fill_slots()
        return num_tokens

    def _draw_first(self, prefill: Prefill) -> list[SampleDelta]:
        """Draw the first token of every sample; those that go on wait for slots."""
        request, slot = prefill.request, self._pool.place_of(prefill.request.sampler)
        adapters = self._pool.adapters(any_used=slot != BASE)
        about_prompt = prefill.scores.result() if prefill.scores else None
        if prefill.num_spared:
            about_prompt = PromptResult(cache_hit_tokens=prefill.num_spared)
        stops = frozenset(request.params.stop_token_ids) | (self._eos if request.params.eos_stops else frozenset())
        samples = [
            RunningSample(request=request, index=index, adapter=slot, stops=stops)
            for index in range(request.num_samples)
        ]
        deltas: list[SampleDelta] = []
        num_rows = min(rows for rows in FIRST_ROWS if rows >= min(len(samples), FIRST_ROWS[-1]))
        for start in range(0, len(samples), num_rows):
            by_row = dict(enumerate(samples[start : start + num_rows]))
            drawn = decode.draw_first(
                self._params,
                adapters,
                np.int32(slot),
                prefill.last_1D,
                draw_params(by_row, num_rows),
                np.bool_(request.options.sample_topk > 0),
                max_topk=self._config.max_topk_logprobs,
            )
            drawn = jax.tree.map(lambda leaf: leaf[None], jax.device_get(drawn))
            for row, sample in by_row.items():
                deltas.append(sample.take(tokens_of(drawn, row, 1), about_prompt if sample.index == 0 else None))
        going = deque(sample for sample in samples if sample.stop_reason is None)
        if going:
            self._prefilled.append(PrefilledPrompt(request, prefill.keys, going))
        return deltas

    def _fill_slots(self) -> None:
        """Insert computed prompts for as many of their samples as there are free slots."""
        while self._prefilled:
            prompt = self._prefilled[0]
            taken = self._slots.free_for(prompt.samples[0].adapter)[: len(prompt.samples)]
            if not taken:
                return
            num_slots = len(self._slots)
            slot_S = np.full(num_slots, num_slots, np.int32)
            slot_S[: len(taken)] = taken
            size = np.int32(prompt.request.prompt.size)
            with self._cache_at_risk():
                self._cache = decode.insert(self._cache, prompt.keys, size, slot_S, np.int32(len(taken)))
            for slot in taken:
                self._slots.place(prompt.samples.popleft(), slot)
            if not prompt.samples:
                self._prefilled.popleft()

    def _decode(self) -> list[SampleDelta]:
        """Decode one slice of all slots, and free those whose samples have ended."""
        live = self._slots.live
        if not live:
            return []
        num_steps = min(self._config.decode_slice_tokens, max(sample.num_left for sample in live.values()))
        longest = max(sample.position for sample in live.values())
        any_adapter = any(sample.adapter != BASE for sample in live.values())
        drawn = self._run_slice(slice_rows(self._slots), num_steps, self._stretch(longest), any_adapter)
        deltas: list[SampleDelta] = []
        for slot, sample in live.items():
            deltas.append(sample.take(tokens_of(drawn, slot, num_steps)))
            if sample.stop_reason is not None:
                self._slots.release(slot)
        return deltas

    def _run_slice(self, rows: SliceRows, num_steps: int, stretch: int, any_adapter: bool) -> Drawn:
        params, adapters = self._params, self._pool.adapters(any_used=any_adapter)
        if self._is_one_cpu:
            self._layers = params = self._layers or decode.by_layer(params, self._model)
            adapters = self._pool.gathered(np.asarray(rows.adapter_G).tolist()) if any_adapter else None
        with self._cache_at_risk():
            self._cache, drawn = decode.decode_slice(
                params,
                self._model,
                adapters,
                self._cache,
                rows,
                np.int32(num_steps),
                stretch=stretch,
                length=self._config.decode_slice_tokens,
                max_topk=self._config.max_topk_logprobs,
            )
            return jax.device_get(drawn)

    def _stretch(self, longest: int) -> int:
        """Return how much of the cache is read when that many positions are in use as a slice begins."""
        return min(max(next_power(longest), SEGMENT), self._shape.length)

    def rehearse(self, sampler: SamplerId) -> None:
        """Run every program that samples run in once, on nothing, so that none is compiled later.

        The sampler is one that is loaded. Nothing may be running.
        """
        assert not any(self._requests())
        for each in (None, sampler):
            self._prefiller.rehearse(each)
        for length in ascending(lambda size: self._shape_for(size).length, self.max_length):
            self._reshape(self._shape_for(length))
            nowhere_S = np.full(len(self._slots), len(self._slots), np.int32)
            for room in self._prefiller.rooms():
                prompt = self._prefiller.empty(room)
                self._cache = decode.insert(self._cache, prompt, np.int32(0), nowhere_S, np.int32(0))
            by_tile = slice_rows(self._slots)
            by_slot = replace(by_tile, adapter_G=jnp.asarray([BASE] * len(self._slots), jnp.int32))
            for stretch in ascending(self._stretch, length):
                for rows, any_adapter in ((by_tile, False), (by_tile, True), (by_slot, True)):
                    self._run_slice(rows, 1, stretch, any_adapter)
        self._reshape(self._shape_for(1))

    @contextmanager
    def _cache_at_risk(self) -> Iterator[None]:
        """Tell a failure that took the cache, which is updated in place, from one that left it whole."""
        try:
            yield
        except Exception as error:
            if self._cache.k.is_deleted():
                raise BackendLost(f"decoding failed and took the key/value cache along: {error}") from error
            raise


def longest_sample(model_config: ModelConfig, config: JaxConfig, room: SampleRoom) -> int:
    """Return how many tokens, prompt included, one sample may have."""
    context = model_config.max_context_length
    return min(context, config.max_context_length or context, room.tokens)


def _empty_delta(request: SampleRequest, *, error: str | None = None) -> SampleDelta:
    return SampleDelta(
        request_id=request.request_id,
        index=0,
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        error=error,
    )
