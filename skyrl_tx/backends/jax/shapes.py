"""The few sizes that arrays of training and sampling are rounded up to, so that few programs are compiled.

Prefill chunks end at fixed positions of a prompt: after 128 tokens, then at each doubling up to the largest chunk
size, then at each multiple of it. Only the last chunk of a prompt is shorter, and is padded to a power of two. The
keys of a position are therefore computed by the same program whatever follows it, and prompts with equal beginnings
share all chunks that end within them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.attention import PAST_BLOCK_KEYS
from skyrl_tx.layers.kv_cache import PAGE_SIZE

SHORTEST_CHUNK = 32
"""Tokens to which the last chunk of a prompt is padded, at least, if chunks are not large."""
LARGE_CHUNK = 512
"""Chunks of this size or more are padded to FIRST_CHUNK at least.

They are for devices that compute 128 tokens in the time of 32, and there are fewer programs to compile.
"""

FIRST_CHUNK = 128
"""Tokens of the first chunk. Measured on CPU at 250 tokens: 1.2 times the time of a single chunk; 64 tokens: 1.3."""


def round_up_to_bucket(size: int, smallest: int = 1) -> int:
    """Round `size` up to one of `smallest` · (1, 1.5, 2, 3, 4, 6, 8 …), so that at most a third is padding."""
    power = smallest
    while power < size:
        power *= 2
    midpoint = power * 3 // 4
    return midpoint if power > smallest and midpoint >= size else power


def next_power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def iter_ascending(round_up: Callable[[int], int], last: int) -> Iterator[int]:
    """Yield every value of `round_up` below `last` in ascending order, then `last`."""
    size = round_up(1)
    while size < last:
        yield size
        size = round_up(size + 1)
    yield last


@dataclass(frozen=True, slots=True)
class PrefillShapes:
    """The sizes of prefill chunks, which have up to `chunk_size` tokens, a power of two."""

    chunk_size: int

    @classmethod
    def from_config(cls, config: JaxConfig, max_length: int) -> "PrefillShapes":
        """Return the sizes for prompts of up to `max_length` tokens. The settings are those `with_platform_defaults`."""
        assert config.prefill_chunk_tokens is not None
        return cls(min(config.prefill_chunk_tokens, next_power_of_two(max(max_length, SHORTEST_CHUNK))))

    def pad_size(self, num_tokens: int) -> int:
        """Return the padded size of a chunk of `num_tokens`."""
        shortest = SHORTEST_CHUNK if self.chunk_size < LARGE_CHUNK else FIRST_CHUNK
        return max(next_power_of_two(num_tokens), shortest)

    def chunk_end(self, start: int) -> int:
        """Return the end of the full chunk that begins at position `start`."""
        return (
            start + self.chunk_size if start >= self.chunk_size else min(max(2 * start, FIRST_CHUNK), self.chunk_size)
        )

    def iter_prompt_sizes(self, num_tokens: int) -> Iterator[int]:
        """Yield the padded size of each chunk of a prompt of `num_tokens`."""
        start = 0
        while start < num_tokens:
            end = min(self.chunk_end(start), num_tokens)
            yield self.pad_size(end - start)
            start = end

    def count_full_chunk_tokens(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens lie in full chunks."""
        end = 0
        while (later := self.chunk_end(end)) <= num_tokens:
            end = later
        return end

    def iter_padded_sizes(self) -> Iterator[int]:
        """Yield every padded size of a chunk."""
        return iter_ascending(self.pad_size, self.chunk_size)

    def iter_prompt_lengths(self, max_length: int) -> Iterator[int]:
        """Yield prompt lengths whose last chunks, taken together, have every padded size."""
        for size in self.iter_padded_sizes():
            yield min(size if size <= FIRST_CHUNK else 2 * size, max_length)


MAX_PROMPTS_TOGETHER = 4
"""Prompts that one device computes at the same time, where bits may depend on others.

A chunk of one is little work for a GPU, which waits for the host between its programs.
"""

TILE = 4
"""Slots that share an adapter. Measured on CPU, in tokens/s: one slot per adapter 540, four 760, eight 820."""


def make_tiles(num_slots: int) -> Sequence[range]:
    """Return the tiles of neighbouring slots, or rows, that share an adapter where possible.

    There is never a single tile of several: XLA on CPU computes one group as a plain product, in another order of sums.
    """
    size = math.gcd(num_slots, TILE) if num_slots > TILE else 1
    return [range(first, first + size) for first in range(0, num_slots, size)]


MAX_PROMPTS = 4
"""Prompts that are computed or have waiting samples, at most: of each queue a partly computed one and another."""

STATE_SHARE = 0.75
"""Share of the prefix cache for states. A prompt keeps up to three, each as large as many positions."""


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """The memory of the cache for samples, prompts and cached prefixes, on all devices together."""

    num_slots: int
    """The most samples that run at the same time."""
    tokens: int
    """Positions for prompts and samples."""
    prefix_tokens: int
    """Positions that cached prefixes count as, at most, and for which there are further pages."""
    max_length: int
    """Prompt and new tokens of one sample."""
    state_tokens: int = 0
    """Positions that take as many bytes as the state of fixed size of a prompt or sample; 0 for models without."""
    page: int = PAGE_SIZE
    """Positions of a page."""
    shards: int = 1
    """The shards of rows, each of which has pages and states of its own."""

    @property
    def per_shard(self) -> "SampleMemory":
        """The memory of one shard, which has room for the longest sample."""
        if self.shards == 1:
            return self
        tokens = max(-(-self.tokens // self.shards), self.max_length)
        num_slots, prefix_tokens = self.num_rows // self.shards, self.prefix_tokens // self.shards
        return replace(self, num_slots=num_slots, tokens=tokens, prefix_tokens=prefix_tokens, shards=1)

    @property
    def num_rows(self) -> int:
        """The rows of the largest decode slice, as many on each shard."""
        return -(-self.num_slots // self.shards) * self.shards

    def count_pages(self, num_tokens: int) -> int:
        """Return the pages of a row of `num_tokens`."""
        return -(-num_tokens // self.page)

    @property
    def num_pages(self) -> int:
        """All pages: with an empty one, and as many as there are samples, whose last is partly filled."""
        if self.shards > 1:
            return self.shards * self.per_shard.num_pages
        of_samples = self.count_pages(self.tokens)
        of_prefixes = self.count_pages(self.prefix_tokens - self._prefix_states * self.state_tokens)
        return 1 + of_samples + min(of_samples, self.num_slots) + of_prefixes

    @property
    def num_states(self) -> int:
        """All state slots: with an empty one, and those of samples, of prompts and of cached prefixes."""
        if self.shards > 1:
            return self.shards * self.per_shard.num_states
        return 1 + self.num_slots + MAX_PROMPTS + self._prefix_states

    @property
    def table_pages(self) -> int:
        """The width of a block table: pages for the longest sample, in whole blocks of attention."""
        block = max(PAST_BLOCK_KEYS // self.page, 1)
        return -(-self.count_pages(self.max_length) // block) * block

    @property
    def all_tokens(self) -> int:
        """The positions that take as many bytes as the whole cache."""
        return self.num_pages * self.page + self.num_states * self.state_tokens

    @property
    def slice_tokens(self) -> int:
        """The positions that take as many bytes as a decode slice, which has a copy of the state of each row."""
        return self.num_rows * self.state_tokens

    @property
    def equal_sample_length(self) -> int:
        """The positions of each sample if as many run as may, and all are equally long."""
        return min(max(self.tokens // self.num_slots, 1), self.max_length)

    def count_samples(self, length: int) -> int:
        """Return how many samples of that length run at the same time."""
        return min(self.num_slots, self.tokens // length)

    @property
    def _prefix_states(self) -> int:
        return int(STATE_SHARE * self.prefix_tokens) // self.state_tokens if self.state_tokens else 0
