"""Prompts computed lately, so that what begins alike is computed once.

Of another prompt only whole chunks are used again, and of an equal one all. So each position's keys come of the same
computation whether they are found here or not, and a hit changes no bit of what is sampled.
"""

from collections import OrderedDict
from dataclasses import dataclass

import jax
import numpy as np

from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers.kv_cache import KeyValues


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt's keys and values [L, 1, K, C, H], C at least its length, and its last hidden state [1, D]."""

    tokens: Int32Array
    keys: KeyValues
    last_1D: jax.Array

    @property
    def room(self) -> int:
        """How many positions it takes."""
        return self.keys.k.shape[3]


class PrefixCache:
    """Computed prompts by the sampler that they were computed with; the least recently used go first."""

    def __init__(self, max_tokens: int, chunks: Chunks) -> None:
        self._max_tokens = max_tokens
        self._chunks = chunks
        self._prompts: OrderedDict[tuple[SamplerId | None, bytes], ComputedPrompt] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Positions that are taken, padding included."""
        return sum(prompt.room for prompt in self._prompts.values())

    def __contains__(self, prompt: ComputedPrompt) -> bool:
        return any(kept is prompt for kept in self._prompts.values())

    def find(self, sampler: SamplerId | None, tokens: Int32Array) -> tuple[ComputedPrompt, int] | None:
        """Return the prompt that has the most in common, and how many of `tokens` it spares: all, or whole chunks."""
        equal = (sampler, tokens.tobytes())
        if equal in self._prompts:
            self._prompts.move_to_end(equal)
            return self._prompts[equal], tokens.size
        spared = {key: self._spared(prompt, tokens) for key, prompt in self._prompts.items() if key[0] == sampler}
        best = max(spared, key=spared.__getitem__, default=None)
        if best is None or spared[best] == 0:
            return None
        self._prompts.move_to_end(best)
        return self._prompts[best], spared[best]

    def _spared(self, prompt: ComputedPrompt, tokens: Int32Array) -> int:
        """Return the length of what both begin with, in whole chunks, short of the last of `tokens`."""
        size = min(prompt.tokens.size, tokens.size)
        unequal = np.flatnonzero(prompt.tokens[:size] != tokens[:size])
        common = int(unequal[0]) if unequal.size else size
        return self._chunks.last_end(min(common, tokens.size - 1))

    def add(self, sampler: SamplerId | None, prompt: ComputedPrompt) -> None:
        """Keep a prompt, in place of those that it begins with; others go until all fit."""
        if prompt.room > self._max_tokens:
            return
        for key, other in list(self._prompts.items()):
            if key[0] == sampler and np.array_equal(other.tokens, prompt.tokens[: other.tokens.size]):
                del self._prompts[key]
        self._prompts[sampler, prompt.tokens.tobytes()] = prompt
        self.shrink(self._max_tokens)

    def shrink(self, max_tokens: int) -> None:
        """Forget prompts until those that are left take no more than that."""
        while self._prompts and self.num_tokens > max_tokens:
            self._prompts.popitem(last=False)

    def drop(self, sampler: SamplerId | None) -> None:
        """Forget all prompts of a sampler."""
        for key in [key for key in self._prompts if key[0] == sampler]:
            del self._prompts[key]
