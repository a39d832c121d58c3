"""A prompt on its way to keys and values, chunk by chunk, so that others wait for a chunk and not for a prompt."""

from dataclasses import dataclass, replace

import jax
import numpy as np

from skyrl_tx.backends.jax import decode
from skyrl_tx.backends.jax.chunks import Chunks, padded
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import SampleRoom
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
        room: SampleRoom,
    ) -> None:
        self._params = params
        self._model = model_config
        self._pool = pool
        self._max_topk = config.max_topk_logprobs
        self._max_tokens = room.prompt_tokens
        self.chunks = Chunks.of(config, room.max_length)
        self.prefixes = PrefixCache(room.prefix_tokens, self.chunks)

    def has_room(self, num_tokens: int, *, beside: int) -> bool:
        """Whether such a prompt has room beside so many positions of others; what is only kept makes it."""
        return beside + self.chunks.room_of(num_tokens) <= self._max_tokens

    def begin(self, request: SampleRequest, *, beside: int) -> Prefill:
        """Take room for a prompt, and fill it with what is known of it.

        What is asked of a prompt needs the hidden states of all of it, so nothing is spared.
        """
        size, wants_prompt = request.prompt.size, request.options.wants_prompt
        room = self.chunks.room_of(size)
        found = None if wants_prompt else self.prefixes.find(request.sampler, request.prompt)
        if found is not None and found[1] == size:
            kept, _ = found
            return Prefill(request=request, keys=kept.keys, num_done=size, num_spared=size, last_1D=kept.last_1D)
        self.prefixes.shrink(self._max_tokens - beside - room)
        if found is None or found[0] not in self.prefixes:
            most = self._max_topk
            scores = PromptScores(self._params, request, max_topk=most, max_alt=most) if wants_prompt else None
            return Prefill(request=request, keys=self.empty(room), num_done=0, num_spared=0, scores=scores)
        kept, num_spared = found
        keys = decode.copy_prompt(kept.keys, room=room)
        return Prefill(request=request, keys=keys, num_done=num_spared, num_spared=num_spared)

    def resume(self, sample: RunningSample, *, beside: int) -> Prefill:
        """Begin to compute again what a sample had in the cache."""
        again = replace(sample.request, prompt=sample.cached_tokens(), options=PromptOptions())
        prefill = self.begin(again, beside=beside)
        prefill.resumed = sample
        return prefill

    def advance(self, prefill: Prefill) -> int:
        """Compute the next chunk; return how many tokens that were, padding included."""
        request, start = prefill.request, prefill.num_done
        tokens = request.prompt[start : self.chunks.end(start)]
        size = padded(tokens.size)
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
        for room in self.chunks.rooms():
            keys = self.empty(room)
            for size in self.chunks.padded_sizes():
                token_T = np.zeros(size, np.int32)
                _, _, keys = decode.extend(self._params, self._model, adapters, place, token_T, first, first, keys)
            for other in self.chunks.rooms():
                decode.copy_prompt(keys, room=other)

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
