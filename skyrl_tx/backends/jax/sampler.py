"""Continuous batching on the host: admit, prefill, insert, decode a slice, retire. The jitted half: decode.py.

A step prefills what fits, then decodes one slice of all slots; requests join and leave in between. Programs depend on
shapes alone, and a sample's numbers on its own request: the decode batch has all slots always, free ones included.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.buckets import bucket, next_power
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.prompt_scores import score_prompt
from skyrl_tx.backends.jax.sample_rows import draw_params, seed_words, slice_rows, tokens_of
from skyrl_tx.backends.jax.sampler_pool import SamplerPool
from skyrl_tx.backends.jax.slots import BASE, CacheShape, RunningSample, Slots, cache_shape, max_tokens, num_cached
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.models import DecoderParams, ModelConfig

log = logging.getLogger(__name__)

PROMPT_BUCKET = 32  # the shortest length that prompts are padded to
CACHE_BUCKET = 128  # the shortest stretch of the cache to be read; another stretch may round otherwise
FIRST_ROWS = (1, 8, 64)  # samples whose first tokens are drawn at once; more take turns


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt's keys and values [L, 1, K, T, H], and those of its samples that wait for a slot."""

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
        self.max_length = longest_sample(model_config, config)
        """Prompt and new tokens that one sample may have."""
        self._shape = self._shape_for(1)
        self._cache = self._empty_cache()
        self._slots = Slots(self._shape.num_slots)
        self._prompts: dict[RequestId, SampleRequest] = {}  # in order of arrival
        self._scored: dict[RequestId, SampleRequest] = {}  # of one new token: they need no slot and pass the others
        self._prefilled: PrefilledPrompt | None = None

    def load(self, sampler: SamplerId, adapter: Adapter) -> None:
        """Copy an adapter of any padded rank; of no effect when it is there. Raises CapacityError."""
        self._pool.load(sampler, adapter)

    def drop(self, sampler: SamplerId) -> None:
        """Free an adapter's slot. Idempotent."""
        assert not any(request.sampler == sampler for request in self._requests()), f"{sampler} is in use"
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
            queue = self._scored if max_tokens(request) == 1 else self._prompts
            queue[request.request_id] = request

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Forget requests wherever they are. Unknown ids are of no effect."""
        gone = frozenset(request_ids)
        for request_id in gone:
            self._prompts.pop(request_id, None)
            self._scored.pop(request_id, None)
        if self._prefilled is not None and self._prefilled.request.request_id in gone:
            self._prefilled = None
        for slot, sample in self._slots.live.items():
            if sample.request.request_id in gone:
                self._slots.release(slot)

    def step(self) -> list[SampleDelta]:
        """Prefill what fits, then decode one slice; empty when there is nothing to do.

        Raises BackendLost when a failure took the cache along.
        """
        return self._admit() + self._decode()

    def _requests(self) -> Iterator[SampleRequest]:
        """All requests that have not ended."""
        yield from self._prompts.values()
        yield from self._scored.values()
        if self._prefilled is not None:
            yield self._prefilled.request
        for sample in self._slots.live.values():
            yield sample.request

    def _admit(self) -> list[SampleDelta]:
        """Prefill in order of arrival, within a budget: running samples shall not wait for long."""
        deltas: list[SampleDelta] = []
        self._fill_slots()
        for queue in (self._scored, self._prompts):
            budget = self._config.prefill_tokens
            while queue and budget > 0 and (queue is self._scored or self._can_place(next(iter(queue.values())))):
                request = queue.pop(next(iter(queue)))
                budget -= self._prompt_bucket(request)
                deltas += self._prefill_or_fail(request)
                self._fill_slots()
        return deltas

    def _can_place(self, request: SampleRequest) -> bool:
        """Whether a sample of the request can have a slot now.

        The cache must have the shape that suits the longest of the running samples and this one. It is given another
        shape once nothing runs: until then a longer request waits, and so does a shorter one when the longest has left.
        """
        if self._prefilled is not None:
            return False
        live = self._slots.live.values()
        wanted = self._shape_for(max([num_cached(request), *(sample.num_cached for sample in live)]))
        if wanted != self._shape and not live:
            del self._cache  # before there is another
            self._shape, self._slots = wanted, Slots(wanted.num_slots)
            self._cache = self._empty_cache()
        return wanted == self._shape and bool(self._slots.free)

    def _shape_for(self, needed: int) -> CacheShape:
        num_slots, max_tokens = self._config.sample_slots, self._config.max_sample_tokens
        return cache_shape(needed, num_slots=num_slots, max_tokens=max_tokens, max_length=self.max_length)

    def _empty_cache(self) -> KeyValues:
        model, shape = self._model, self._shape
        dims = (model.num_layers, shape.num_slots, model.num_kv_heads, shape.length, model.head_dim)
        layout = self._params.layout
        sharding = layout.sharding(kv_cache.AXES, dims) if layout.is_split else None
        return kv_cache.allocate(*dims, self._params.embed.dtype, sharding)

    def _prompt_bucket(self, request: SampleRequest) -> int:
        return min(bucket(request.prompt.size, PROMPT_BUCKET), self.max_length)

    def _prefill_or_fail(self, request: SampleRequest) -> list[SampleDelta]:
        """Prefill; a failure ends this request alone, since nothing that others use was changed."""
        try:
            return self._prefill(request)
        except Exception as error:
            log.exception("prefill of request %s failed", request.request_id)
            return [
                SampleDelta(
                    request_id=request.request_id,
                    index=0,
                    tokens=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    error=f"the prompt could not be computed: {error}",
                )
            ]

    def _prefill(self, request: SampleRequest) -> list[SampleDelta]:
        """Run the prompt once and draw the first token of every sample; those that go on wait for slots."""
        slot = self._pool.place_of(request.sampler)
        adapters = self._pool.adapters(any_used=slot != BASE)
        token_T = np.zeros(self._prompt_bucket(request), np.int32)
        token_T[: request.prompt.size] = request.prompt
        hidden_TD, keys = decode.prefill(self._params, self._model, adapters, np.int32(slot), token_T)
        scores = None
        if request.options.wants_prompt:
            scores = score_prompt(
                self._params,
                adapters,
                slot,
                hidden_TD,
                request,
                seed_words(request.params.seed),
                max_topk=self._config.max_topk_logprobs,
            )
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
                hidden_TD,
                np.int32(request.prompt.size - 1),
                draw_params(by_row, num_rows),
                np.bool_(request.options.sample_topk > 0),
                max_topk=self._config.max_topk_logprobs,
            )
            drawn = jax.tree.map(lambda leaf: leaf[None], jax.device_get(drawn))
            for row, sample in by_row.items():
                deltas.append(sample.take(tokens_of(drawn, row, 1), scores if sample.index == 0 else None))
        going = deque(sample for sample in samples if sample.stop_reason is None)
        if going:
            self._prefilled = PrefilledPrompt(request, keys, going)
        return deltas

    def _fill_slots(self) -> None:
        """Insert the prefilled prompt for as many of its samples as there are free slots."""
        if self._prefilled is None:
            return
        num_slots = len(self._slots)
        waiting = self._prefilled.samples
        taken = self._slots.free_for(waiting[0].adapter)[: len(waiting)]
        if taken:
            slot_S = np.full(num_slots, num_slots, np.int32)
            slot_S[: len(taken)] = taken
            with self._cache_at_risk():
                self._cache = decode.insert(self._cache, self._prefilled.keys, slot_S, np.int32(len(taken)))
        for slot in taken:
            self._slots.place(waiting.popleft(), slot)
        if not waiting:
            self._prefilled = None

    def _decode(self) -> list[SampleDelta]:
        """Decode one slice of all slots, and free those whose samples have ended."""
        live = self._slots.live
        if not live:
            return []
        num_steps = min(self._config.decode_slice_tokens, max(sample.num_left for sample in live.values()))
        longest = max(sample.position for sample in live.values()) + num_steps
        with self._cache_at_risk():
            self._cache, drawn = decode.decode_slice(
                self._params,
                self._model,
                self._pool.adapters(any_used=any(sample.adapter != BASE for sample in live.values())),
                self._cache,
                slice_rows(self._slots),
                np.int32(num_steps),
                bucket=min(max(next_power(longest), CACHE_BUCKET), self._shape.length),
                length=self._config.decode_slice_tokens,
                max_topk=self._config.max_topk_logprobs,
            )
            drawn = jax.device_get(drawn)
        deltas: list[SampleDelta] = []
        for slot, sample in live.items():
            deltas.append(sample.take(tokens_of(drawn, slot, num_steps)))
            if sample.stop_reason is not None:
                self._slots.release(slot)
        return deltas

    @contextmanager
    def _cache_at_risk(self) -> Iterator[None]:
        """Tell a failure that took the cache, which is updated in place, from one that left it whole."""
        try:
            yield
        except Exception as error:
            if self._cache.k.is_deleted():
                raise BackendLost(f"decoding failed and took the key/value cache along: {error}") from error
            raise


def longest_sample(model_config: ModelConfig, config: JaxConfig) -> int:
    """Return how many tokens, prompt included, one sample may have."""
    context = model_config.max_context_length
    return min(context, config.max_context_length or context, config.max_sample_tokens)
