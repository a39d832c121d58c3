"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire. The jitted half: decode.py.

A step computes some chunks of prompts, then decodes one slice of all slots; requests join and leave in between.
Programs depend on shapes alone, and a sample's numbers on its own request: the decode batch has all slots always, free
ones included. Who needs longer rows than there are waits until those who run fit beside it, or others have passed it
often enough; then some of these make room, and go on later from their tokens.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.buckets import ascending, next_power
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.decode import SliceRows
from skyrl_tx.backends.jax.lanes import Lane, PrefilledPrompt, Waiting
from skyrl_tx.backends.jax.memory import SampleRoom, sample_room, sampler_places
from skyrl_tx.backends.jax.prefill import Prefill, Prefiller
from skyrl_tx.backends.jax.rows import Rows
from skyrl_tx.backends.jax.sample_rows import draw_params, slice_rows, tokens_of
from skyrl_tx.backends.jax.sampler_pool import SamplerPool
from skyrl_tx.backends.jax.sampling import Drawn
from skyrl_tx.backends.jax.slots import BASE, CacheShape, RunningSample, cache_shape, max_tokens, num_cached
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.results import PromptResult, SampleDelta
from skyrl_tx.layers.kv_cache import SEGMENT
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig

log = logging.getLogger(__name__)

MOST_PASSED = 64  # samples that are given slots before one that waits for longer rows, at most
FEW_SLICES = 4  # that samples shall fit into shorter rows before these are made
FIRST_ROWS = (1, 8, 64)  # samples whose first tokens are drawn at once; more take turns


class Sampler:
    """Everything that is being sampled, and the frozen adapters it is sampled from."""

    def __init__(
        self, params: DecoderParams, model_config: ModelConfig, config: JaxConfig, eos_token_ids: Collection[int]
    ) -> None:
        self._params = params
        self._model = model_config
        self._config = config
        self._slice = config.decode_slice_tokens
        self._eos = frozenset(eos_token_ids)
        num_places = sampler_places(config, params, model_config)
        self._pool = SamplerPool(model_config, config.max_sampler_adapters, params.layout, num_places=num_places)
        self.room: SampleRoom = sample_room(config, params, model_config)
        """What the device has for samples and for prompts."""
        self.max_length = self.room.max_length
        """Prompt and new tokens that one sample may have."""
        self._prefiller = Prefiller(params, model_config, config, self._pool, self.room)
        self._layers: DecoderParams | None = None  # each by itself: a copy, made when there is something to decode
        self._is_one_cpu = not params.layout.is_split and all(each.platform == "cpu" for each in params.embed.devices())
        self._rows = Rows(params, model_config, self._shape_for)
        self._num_passed = 0  # samples that were given a slot before one that waits for longer rows
        self._refused: Lane | None = None  # had no room for its next prompt in this step, or in the last
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
            lane.add(request)

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget requests wherever they are. Unknown ids are of no effect."""
        gone = frozenset(request_ids)
        for request_id in gone:
            self._scored.forget(request_id)
            self._prompts.forget(request_id)
        self._prefilled = deque(prompt for prompt in self._prefilled if prompt.request.request_id not in gone)
        for slot, sample in self._rows.slots.live.items():
            if sample.request.request_id in gone:
                self._rows.slots.release(slot)

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
        self._prompts.forget_sample(request_id, index)
        for slot, sample in self._rows.slots.live.items():
            if (sample.request.request_id, sample.index) == (request_id, index):
                self._rows.slots.release(slot)

    def step(self) -> list[SampleDelta]:
        """Compute what fits of prompts, then decode one slice; empty when there is nothing to do.

        The first prompts after a pause end a step: those that came while they were computed join their first slice,
        which takes as long for one sample as for all.
        A delta without tokens stands for a step in which no prompt came to its end and nothing was decoded.
        Raises BackendLost when a failure took the cache along.
        """
        had_paused = not self._rows.slots.live
        deltas = self._admit()
        if not (had_paused and deltas):
            deltas += self._decode()
        under_way = [lane.current for lane in (self._scored, self._prompts) if lane.current is not None]
        if not deltas and under_way:
            resumed = under_way[0].resumed
            first = under_way[0].request.first_index
            return [_empty_delta(under_way[0].request, index=first if resumed is None else resumed.index)]
        return deltas

    def _requests(self) -> Iterator[SampleRequest]:
        """All requests that have not ended."""
        for lane in (self._scored, self._prompts):
            yield from (waiting.request for waiting in lane.waiting())
            if lane.current is not None:
                yield lane.current.request
        for prompt in self._prefilled:
            yield prompt.request
        for sample in self._rows.slots.live.values():
            yield sample.request

    def _admit(self) -> list[SampleDelta]:
        """Compute prompts in order of arrival, within a budget: running samples shall not wait for long.

        A prompt that takes several steps leaves half of them to those behind it that can be computed whole.
        """
        deltas: list[SampleDelta] = []
        self._leave_full_rows()
        self._fill_slots()
        first, self._refused = self._refused, None
        for lane in sorted((self._scored, self._prompts), key=lambda lane: lane is not first):
            budget = self._config.prefill_tokens
            if (current := lane.current) is not None:
                lane.current = None
                share = budget // 2 if lane.new or lane.aside else budget
                budget -= self._compute(current, share, lane, deltas)
            while budget > 0 and (waiting := self._next(lane, budget)) is not None:
                lane.take(waiting)
                budget -= self._compute(waiting, budget, lane, deltas)
        return deltas

    def _next(self, lane: Lane, budget: int) -> Waiting | None:
        """Return whose prompt is next: the oldest, or while one is under way the oldest that is short.

        One that needs longer rows than there are is passed by others, up to a bound.
        """
        is_passing = False
        for waiting in lane.waiting():
            if lane.current is not None and waiting.size > budget:
                continue
            if lane is self._scored:
                return waiting if self._has_room(lane, waiting) else None
            if self._prefilled:
                return None
            reach = waiting.reach(self._slice)
            self._fit_rows(reach)
            if reach <= self._rows.shape.length:
                if not self._rows.slots.free or not self._has_room(lane, waiting):
                    return None
                self._num_passed += waiting.num_samples if is_passing else 0
                return waiting
            if self._num_passed >= MOST_PASSED:
                return None
            is_passing = True
        return None

    def _has_room(self, lane: Lane, waiting: Waiting) -> bool:
        """Whether the keys of one more prompt have room: who has to wait for it is next, and nobody begins before."""
        if self._refused is None and not self._prefiller.has_room(waiting.size, beside=self._num_aside()):
            self._refused = lane
        return self._refused is None

    def _num_aside(self) -> int:
        """Positions that prompts have beside the rows: of those under way, and of those that wait for slots."""
        under_way = [lane.current for lane in (self._scored, self._prompts) if lane.current is not None]
        return sum(prompt.keys.k.shape[3] for prompt in (*under_way, *self._prefilled))

    def _fit_rows(self, reach: int) -> None:
        """Have rows of the shape that suits one more sample, if that may be now."""
        rows, live = self._rows, self._rows.slots.live
        wanted = rows.shape_for(reach)
        if wanted.length > rows.shape.length:
            if len(live) < wanted.num_slots or self._num_passed >= MOST_PASSED:
                longest_first = sorted(live, key=lambda slot: live[slot].num_drawn, reverse=True)
                self._reshape(wanted, longest_first[: wanted.num_slots - 1])
        elif not live or not rows.slots.free:  # rather more rows, if they are not soon too short
            under_way = self._prompts.current
            reaches = [reach, *(sample.reach(FEW_SLICES * self._slice) for sample in live.values())]
            if under_way is not None:
                reaches.append(Waiting(under_way.request, under_way.resumed).reach(self._slice))
            wanted = rows.shape_for(max(reaches))
            if wanted.length < rows.shape.length:
                self._reshape(wanted, live)

    def _leave_full_rows(self) -> None:
        """Have longer rows for those whose next slice does not fit, or let them wait for such."""
        rows, live = self._rows, self._rows.slots.live
        full = [slot for slot, sample in live.items() if sample.reach(self._slice) > rows.shape.length]
        if not full:
            return
        others = [slot for slot in live if slot not in full]
        wanted = rows.shape_for(max(live[slot].reach(self._slice) for slot in full))
        if self._num_passed >= MOST_PASSED:
            self._reshape(wanted, [*full, *others][: wanted.num_slots])
        elif len(others) < wanted.num_slots:
            self._reshape(wanted, [*others, *full][: wanted.num_slots])
        else:
            for slot in full:
                self._set_aside(slot)

    def _reshape(self, shape: CacheShape, keep: Collection[int]) -> None:
        """Lay rows out anew; samples that are not kept wait."""
        for slot in self._rows.slots.live:
            if slot not in keep:
                self._set_aside(slot)
        if shape.length > self._rows.shape.length:
            self._num_passed = 0
        self._rows.reshape(shape, keep)

    def _set_aside(self, slot: int) -> None:
        sample = self._rows.slots.live[slot]
        self._prompts.aside[sample.request.request_id, sample.index] = Waiting(sample.request, sample)
        self._rows.slots.release(slot)

    def _shape_for(self, needed: int) -> CacheShape:
        num_slots, tokens = self._config.sample_slots, self.room.tokens
        return cache_shape(needed, num_slots=num_slots, max_tokens=tokens, max_length=self.max_length)

    def _compute(self, prompt: Waiting | Prefill, budget: int, lane: Lane, deltas: list[SampleDelta]) -> int:
        """Compute a prompt as far as the budget goes, at least a chunk; return how many tokens that were.

        A failure ends this request alone, since nothing that others use was changed.
        """
        num_tokens = 0
        request = prompt.request
        try:
            prefill = prompt if isinstance(prompt, Prefill) else self._begin(prompt)
            while not prefill.is_done and num_tokens < budget:
                num_tokens += self._prefiller.advance(prefill)
            if prefill.is_done and prefill.resumed is not None:
                self._prefilled.append(PrefilledPrompt(request, prefill.keys, deque([prefill.resumed])))
            elif prefill.is_done:
                deltas += self._draw_first(prefill)
            else:
                lane.current = prefill
        except Exception as error:
            log.exception("prefill of request %s failed", request.request_id)
            deltas.append(_empty_delta(request, error=f"the prompt could not be computed: {error}"))
        self._fill_slots()
        return num_tokens

    def _begin(self, waiting: Waiting) -> Prefill:
        if waiting.resumed is None:
            return self._prefiller.begin(waiting.request, beside=self._num_aside())
        return self._prefiller.resume(waiting.resumed, beside=self._num_aside())

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
            for index in range(request.first_index, request.first_index + request.num_samples)
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
            self._rows.insert(prompt.keys, prompt.samples)
            if prompt.samples:
                return
            self._prefilled.popleft()

    def _decode(self) -> list[SampleDelta]:
        """Decode one slice of all slots, and free those whose samples have ended."""
        slots = self._rows.slots
        live = slots.live
        if not live:
            return []
        num_steps = min(self._slice, max(sample.num_left for sample in live.values()))
        longest = max(sample.position for sample in live.values())
        any_adapter = any(sample.adapter != BASE for sample in live.values())
        drawn = self._run_slice(slice_rows(slots), num_steps, self._stretch(longest), any_adapter)
        deltas: list[SampleDelta] = []
        for slot, sample in live.items():
            deltas.append(sample.take(tokens_of(drawn, slot, num_steps)))
            if sample.stop_reason is not None:
                slots.release(slot)
        return deltas

    def _run_slice(self, rows: SliceRows, num_steps: int, stretch: int, any_adapter: bool) -> Drawn:
        params, adapters = self._params, self._pool.adapters(any_used=any_adapter)
        if self._is_one_cpu:
            self._layers = params = self._layers or decode.by_layer(params, self._model)
            adapters = self._pool.gathered(np.asarray(rows.adapter_G).tolist()) if any_adapter else None
        with self._rows.at_risk():
            self._rows.cache, drawn = decode.decode_slice(
                params,
                self._model,
                adapters,
                self._rows.cache,
                rows,
                np.int32(num_steps),
                stretch=stretch,
                length=self._slice,
                max_topk=self._config.max_topk_logprobs,
            )
            return jax.device_get(drawn)

    def _stretch(self, longest: int) -> int:
        """Return how much of the cache is read when that many positions are in use as a slice begins."""
        return min(max(next_power(longest), SEGMENT), self._rows.shape.length)

    def rehearse(self, sampler: SamplerId) -> None:
        """Run every program that samples run in once, on nothing, so that none is compiled later.

        The sampler is one that is loaded. Nothing may be running.
        """
        assert not any(self._requests())
        for each in (None, sampler):
            self._prefiller.rehearse(each)
        rows = self._rows
        for length in ascending(lambda size: rows.shape_for(size).length, self.max_length):
            rows.reshape(rows.shape_for(length))
            nowhere_S = np.full(len(rows.slots), len(rows.slots), np.int32)
            for room in self._prefiller.chunks.rooms():
                prompt = self._prefiller.empty(room)
                rows.cache = decode.insert(rows.cache, prompt, np.int32(0), nowhere_S, np.int32(0))
            rows.rehearse()
            by_tile = slice_rows(rows.slots)
            by_slot = replace(by_tile, adapter_G=jnp.asarray([BASE] * len(rows.slots), jnp.int32))
            for stretch in ascending(self._stretch, length):
                for each, any_adapter in ((by_tile, False), (by_tile, True), (by_slot, True)):
                    self._run_slice(each, 1, stretch, any_adapter)
        rows.reshape(rows.shape_for(1))


def _empty_delta(request: SampleRequest, *, index: int = 0, error: str | None = None) -> SampleDelta:
    return SampleDelta(
        request_id=request.request_id,
        index=index,
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        error=error,
    )
