"""The prefix cache: keys and values of recent prompts, so that equal beginnings are computed once.

Prompts of different cache scopes never meet, so that neither a hit nor its latency tells anything about another scope.

A prompt that is equal to a cached one uses all of it; any other prompt uses whole prefill chunks only. The keys of a
position are therefore computed by the same program whether they come from the cache or not: hits are batch-invariant.
A model with state of fixed size also needs the state at the end of these chunks, which is kept at few ends: `Prefiller`
chooses them.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from skyrl_tx.backends.jax.sample.running import PromptKV
from skyrl_tx.backends.jax.shapes import PrefillShapes
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import SamplerId


class PromptSource(NamedTuple):
    """The sampler that computed a prompt, and the scope within which it may be used."""

    sampler: SamplerId | None
    cache_scope: str = ""

    @classmethod
    def of(cls, request: SampleRequest) -> "PromptSource":
        """Return the source of a request's prompt."""
        return cls(request.sampler, request.cache_scope)


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt, its keys and values, and the hidden state of its last token."""

    tokens: Int32Array
    kv: PromptKV
    last_hidden: Any
    states: Mapping[int, Any] = field(default_factory=dict[int, Any])
    """The kept states by the number of tokens that they have seen, which are whole chunks."""


class PrefixCache:
    """Computed prompts by sampler and cache scope. The least recently used are evicted first."""

    def __init__(self, max_tokens: int, shapes: PrefillShapes, *, state_tokens: int = 0) -> None:
        """Create an empty cache. A state counts as `state_tokens` positions; 0 for models without state."""
        self._max_tokens = max_tokens
        self._shapes = shapes
        self._state_tokens = state_tokens
        self._prompts: OrderedDict[tuple[PromptSource, bytes], ComputedPrompt] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The positions of all cached buffers, padding included, and what their states count as."""
        return self._size(self._prompts.values())

    def _size(self, prompts: Collection[ComputedPrompt]) -> int:
        """Return what prompts count as; they may have kept states in common. Each also has the state after its end."""
        kept = {id(state) for prompt in prompts for state in prompt.states.values()}
        return sum(prompt.kv.length for prompt in prompts) + self._state_tokens * (len(prompts) + len(kept))

    def __contains__(self, prompt: ComputedPrompt) -> bool:
        return any(cached is prompt for cached in self._prompts.values())

    def find(self, source: PromptSource, tokens: Int32Array) -> tuple[ComputedPrompt, int] | None:
        """Return the cached prompt with the longest usable prefix, and that prefix's length in tokens."""
        equal = (source, tokens.tobytes())
        if equal in self._prompts:
            self._prompts.move_to_end(equal)
            return self._prompts[equal], tokens.size
        usable = {key: self._usable(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source}
        best = max(usable, key=usable.__getitem__, default=None)
        if best is None or usable[best] == 0:
            return None
        self._prompts.move_to_end(best)
        return self._prompts[best], usable[best]

    def find_parting(self, source: PromptSource, tokens: Int32Array) -> int:
        """Return how many tokens, in whole chunks, a cached prompt begins with, whether or not it has a state there."""
        return max(
            (self._common(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == source), default=0
        )

    def _usable(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return how many of the first tokens need not be computed."""
        common = self._common(prompt, tokens)
        if self._state_tokens:
            return max((end for end in prompt.states if end <= common), default=0)
        return common

    def _common(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return the length of the common prefix in whole chunks, without the last of `tokens`."""
        size = min(prompt.tokens.size, tokens.size)
        unequal = np.flatnonzero(prompt.tokens[:size] != tokens[:size])
        common = int(unequal[0]) if unequal.size else size
        return self._shapes.full_chunks(min(common, tokens.size - 1))

    def add(self, source: PromptSource, prompt: ComputedPrompt) -> None:
        """Cache a prompt in place of those that it serves as well, its prefixes, and evict others until all fit."""
        if self._size([prompt]) > self._max_tokens:
            return
        for key, other in list(self._prompts.items()):
            if key[0] == source and np.array_equal(other.tokens, prompt.tokens[: other.tokens.size]):
                del self._prompts[key]
        self._prompts[source, prompt.tokens.tobytes()] = prompt
        self.shrink(self._max_tokens)

    def shrink(self, max_tokens: int) -> None:
        """Evict prompts with their states until the rest counts as at most `max_tokens` positions."""
        while self._prompts and self.num_tokens > max_tokens:
            self._prompts.popitem(last=False)

    def drop(self, sampler: SamplerId | None) -> None:
        """Evict all prompts of a sampler."""
        for key in [key for key in self._prompts if key[0].sampler == sampler]:
            del self._prompts[key]
