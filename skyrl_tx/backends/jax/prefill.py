"""A prompt on its way to keys and values, chunk by chunk, so that others wait for a chunk and not for a prompt.

Chunks are all of one size but the last, which is padded to a power of two; so shapes are few, and what a position's
keys are computed with depends on its place in the prompt alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.buckets import ascending, next_power
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.prefix_cache import ComputedPrompt, PrefixCache
from skyrl_tx.backends.jax.prompt_scores import PromptScores
from skyrl_tx.backends.jax.sampler_pool import SamplerPool
from skyrl_tx.backends.jax.slots import RunningSample
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.layers import kv_cache
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.models import DecoderParams, ModelConfig

SHORTEST = 32  # tokens that the last chunk of a prompt is padded to, at least


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One prompt under way: of its tokens `num_done` have keys, `num_spared` of which were found.

    With `resumed` it is that sample's, and what had been drawn of it: it lost its keys to make room for others.
    """

    request: SampleRequest
    keys: KeyValues
    num_done: int
    num_spared: int
    last_1D: jax.Array | None = None
    scores: PromptScores | None = None
    resumed: RunningSample | None = None

    @property
    def is_done(self) -> bool:
        """Whether all of the prompt has keys."""
        return self.num_done == self.request.prompt.size

    def computed(self) -> ComputedPrompt:
        """Return the whole, once done."""
        assert self.is_done and self.last_1D is not None
        return ComputedPrompt(self.request.prompt, self.keys, self.last_1D)


class Prefiller:
    """Computes prompts, and knows those that it computed lately."""

    def __init__(
        self,
        params: DecoderParams,
        model_config: ModelConfig,
        config: JaxConfig,
        pool: SamplerPool,
        *,
        max_length: int,
        prefix_tokens: int,
    ) -> None:
        self._params = params
        self._model = model_config
        self._pool = pool
        self._chunk = min(config.prefill_chunk_tokens, next_power(max(max_length, SHORTEST)))
        self._max_topk = config.max_topk_logprobs
        self._longest = -(-max_length // self._chunk) * self._chunk
        self.prefixes = PrefixCache(prefix_tokens, self._chunk)

    def begin(self, request: SampleRequest) -> Prefill:
        """Make room for a prompt, and fill it with what is known of it.

        What is asked of a prompt needs the hidden states of all of it, so nothing is spared.
        """
        room = self.room_of(request.prompt.size)
        wants_prompt = request.options.wants_prompt
        found = None if wants_prompt else self.prefixes.find(request.sampler, request.prompt)
        if found is None:
            most = self._max_topk
            scores = PromptScores(self._params, request, max_topk=most, max_alt=most) if wants_prompt else None
            return Prefill(request=request, keys=self.empty(room), num_done=0, num_spared=0, scores=scores)
        prompt, num_spared = found
        if num_spared == request.prompt.size:
            return Prefill(
                request=request,
                keys=prompt.keys,
                num_done=num_spared,
                num_spared=num_spared,
                last_1D=prompt.last_1D,
            )
        keys = decode.copy_prompt(prompt.keys, room=room)
        return Prefill(request=request, keys=keys, num_done=num_spared, num_spared=num_spared)

    def resume(self, sample: RunningSample) -> Prefill:
        """Begin to compute again what a sample had in the cache."""
        prefill = self.begin(replace(sample.request, prompt=sample.cached_tokens(), options=PromptOptions()))
        prefill.resumed = sample
        return prefill

    def advance(self, prefill: Prefill) -> int:
        """Compute the next chunk; return how many tokens that were, padding included."""
        request, start = prefill.request, prefill.num_done
        tokens = request.prompt[start : start + self._chunk]
        size = chunk_size(tokens.size)
        place = self._pool.place_of(request.sampler)
        adapters = self._pool.adapters(any_used=request.sampler is not None)
        hidden_TD, prefill.last_1D, prefill.keys = decode.extend(
            self._params,
            self._model,
            adapters,
            np.int32(place),
            np.pad(tokens, (0, size - tokens.size)),
            np.int32(start),
            np.int32(tokens.size - 1),
            prefill.keys,
        )
        prefill.num_done += tokens.size
        if prefill.scores is not None:
            prefill.scores.add(adapters, place, hidden_TD, start)
        elif prefill.is_done and prefill.resumed is None:  # of one that made room nobody else begins with the answer
            self.prefixes.add(request.sampler, prefill.computed())
        return size

    def rehearse(self, sampler: SamplerId | None) -> None:
        """Run every program of prompts once, and keep nothing of it."""
        place, adapters = np.int32(self._pool.place_of(sampler)), self._pool.adapters(any_used=sampler is not None)
        first = np.int32(0)
        for room in self.rooms():
            keys = self.empty(room)
            for size in chunk_sizes(self._chunk):
                token_T = np.zeros(size, np.int32)
                _, _, keys = decode.extend(self._params, self._model, adapters, place, token_T, first, first, keys)
            for other in self.rooms():
                decode.copy_prompt(keys, room=other)

    def rooms(self) -> Iterator[int]:
        """Yield every number of positions that a prompt may take."""
        return ascending(self.room_of, self._longest)

    def room_of(self, size: int) -> int:
        """Return how many positions are set aside for a prompt of that size."""
        return prompt_room(size, self._chunk, self._longest)

    def empty(self, room: int) -> KeyValues:
        """Return a prompt of so many positions, none of which is written."""
        return empty_keys(self._params, self._model, 1, room)


def empty_keys(params: DecoderParams, model: ModelConfig, num_rows: int, length: int) -> KeyValues:
    """Return room for keys and values where the weights are, which is where programs will leave them."""
    dims = (model.num_layers, num_rows, model.num_kv_heads, length, model.head_dim)
    layout, dtype = params.layout, params.embed.dtype
    return kv_cache.allocate(
        *dims, dtype, layout.sharding(kv_cache.AXES, dims) if layout.is_split else params.embed.sharding
    )


def chunk_size(num_tokens: int) -> int:
    """Return what so many tokens are padded to."""
    return max(next_power(num_tokens), SHORTEST)


def chunk_sizes(chunk: int) -> Iterator[int]:
    """Yield every size that chunks have."""
    return ascending(chunk_size, chunk)


def prompt_room(size: int, chunk: int, longest: int) -> int:
    """Return how many positions are set aside for a prompt: of few different numbers, a whole number of chunks."""
    room = chunk
    while room < size:
        room *= 4
    return min(room, longest)
