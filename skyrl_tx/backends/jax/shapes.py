"""Sizes of arrays in training and sampling.

Sizes are rounded up to a few values, so that few programs are compiled. Prefill chunks end at fixed
positions of a prompt. With a largest chunk of 512 tokens, these are 128, 256, 512, 1024, 1536 and
so on. Only the last chunk of a prompt is shorter; it is padded to a power of two. So the keys and
values of a token are computed by the same program, regardless of the tokens that follow, and
prompts with equal beginnings share all whole chunks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.kv_cache import PAGE_SIZE, PAST_BLOCK_KEYS

SHORTEST_CHUNK = 32
"""The minimum padded size of a prompt's last chunk, if the largest chunk is below LARGE_CHUNK."""
LARGE_CHUNK = 512
"""If the largest chunk has this many tokens, last chunks are padded to at least FIRST_CHUNK.

Accelerators use such chunks by default. They compute 128 tokens in the time of 32, and with fewer
sizes, fewer programs are compiled.
"""

FIRST_CHUNK = 128
"""Tokens of the first chunk.

On CPU, a prompt of 250 tokens takes 1.2 times as long as with a single chunk. With a first chunk of
64 tokens it would take 1.3 times as long.
"""

MAX_PROMPTS_TOGETHER = 4
"""How many prompts one device prefills together, if their bits may depend on each other.

One chunk is little work for a GPU, which would wait for the host between its programs.
"""

TILE = 4
"""Batch slots that share an adapter.
On CPU, tiles of 1, 4 and 8 slots decode 540, 760 and 820 tokens/s."""

MAX_PROMPTS = 4
"""How many prompts can be in prefill or have waiting samples.
Each queue has at most one partly computed prompt and one more."""

STATE_SHARE = 0.75
"""Share of the prefix cache for states of linear attention.

A prompt keeps up to three states, each as large as many positions.
"""


def round_up_to_bucket(size: int, smallest: int = 1) -> int:
    """Round `size` up to `smallest` · (1, 1.5, 2, 3, 4, 6, 8 …). At most a third is padding."""
    power = smallest
    while power < size:
        power *= 2
    midpoint = power * 3 // 4
    return midpoint if power > smallest and midpoint >= size else power


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
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
    """The sizes of prefill chunks. `chunk_size` is the largest chunk in tokens, a power of two."""

    chunk_size: int

    @classmethod
    def from_config(cls, config: JaxConfig, max_length: int) -> "PrefillShapes":
        """Return the sizes for prompts of up to `max_length` tokens.

        `config` must have platform defaults.
        """
        assert config.prefill_chunk_tokens is not None
        return cls(min(config.prefill_chunk_tokens, next_power_of_two(max(max_length, SHORTEST_CHUNK))))

    def pad_size(self, num_tokens: int) -> int:
        """Return the padded size of a chunk of `num_tokens`."""
        shortest = SHORTEST_CHUNK if self.chunk_size < LARGE_CHUNK else FIRST_CHUNK
        return max(next_power_of_two(num_tokens), shortest)

    def chunk_end(self, start: int) -> int:
        """Return the end of the full chunk that begins at position `start`."""
        if start >= self.chunk_size:
            return start + self.chunk_size
        return min(max(2 * start, FIRST_CHUNK), self.chunk_size)

    def iter_prompt_sizes(self, num_tokens: int) -> Iterator[int]:
        """Yield the padded size of each chunk of a prompt of `num_tokens`."""
        start = 0
        while start < num_tokens:
            end = min(self.chunk_end(start), num_tokens)
            yield self.pad_size(end - start)
            start = end

    def count_full_chunk_tokens(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of a prompt lie in full chunks."""
        end = 0
        while (later := self.chunk_end(end)) <= num_tokens:
            end = later
        return end

    def iter_padded_sizes(self) -> Iterator[int]:
        """Yield every padded size that a chunk can have."""
        return iter_ascending(self.pad_size, self.chunk_size)

    def iter_prompt_lengths(self, max_length: int) -> Iterator[int]:
        """Yield prompt lengths, one for each padded size of the last chunk."""
        for size in self.iter_padded_sizes():
            yield min(size if size <= FIRST_CHUNK else 2 * size, max_length)


def get_tile_size(num_rows: int) -> int:
    """Return how many neighbouring rows are a tile. `num_rows` is a multiple of it.

    The rows of a tile share an adapter where possible. If there are up to TILE rows, each is a
    tile, so that one tile never holds all of multiple rows. XLA on CPU would compute a single tile
    as a plain matrix product, with another order of sums.
    """
    return math.gcd(num_rows, TILE) if num_rows > TILE else 1


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """The size of the KV cache for samples, prompts and prefixes, on all devices together."""

    num_slots: int
    """How many samples can run at the same time."""
    tokens: int
    """Positions for running prompts and samples."""
    prefix_tokens: int
    """Further positions for the prefix cache, states of linear attention included."""
    max_length: int
    """Longest sample, in prompt and new tokens."""
    state_tokens: int = 0
    """The number of positions that take as many bytes as one state of linear attention, or 0."""
    page: int = PAGE_SIZE
    """Positions in a page."""
    shards: int = 1
    """The number of shards of batch rows. Each shard has its own pages and states."""

    @property
    def per_shard(self) -> "SampleMemory":
        """The memory of one shard. It always fits the longest sample."""
        if self.shards == 1:
            return self
        tokens = max(-(-self.tokens // self.shards), self.max_length)
        num_slots, prefix_tokens = self.num_rows // self.shards, self.prefix_tokens // self.shards
        return replace(self, num_slots=num_slots, tokens=tokens, prefix_tokens=prefix_tokens, shards=1)

    @property
    def num_rows(self) -> int:
        """The rows of the largest decode slice: `num_slots`, rounded up to whole shards."""
        return -(-self.num_slots // self.shards) * self.shards

    def count_pages(self, num_tokens: int) -> int:
        """Return the number of pages for a row of `num_tokens`."""
        return -(-num_tokens // self.page)

    @property
    def num_pages(self) -> int:
        """The number of pages: an empty page, and pages for samples and prefixes.

        Each sample gets one page more than its tokens need, because its last page is only partly
        filled.
        """
        if self.shards > 1:
            return self.shards * self.per_shard.num_pages
        sample_pages = self.count_pages(self.tokens)
        prefix_pages = self.count_pages(self.prefix_tokens - self._prefix_states * self.state_tokens)
        return 1 + sample_pages + min(sample_pages, self.num_slots) + prefix_pages

    @property
    def num_states(self) -> int:
        """The number of states: an empty one, and those for samples, prompts and prefixes."""
        if self.shards > 1:
            return self.shards * self.per_shard.num_states
        return 1 + self.num_slots + MAX_PROMPTS + self._prefix_states

    @property
    def table_pages(self) -> int:
        """The width of a block table: pages of the longest sample, in whole attention blocks."""
        block = max(PAST_BLOCK_KEYS // self.page, 1)
        return -(-self.count_pages(self.max_length) // block) * block

    @property
    def all_tokens(self) -> int:
        """The number of positions that take as many bytes as the whole cache, states included."""
        return self.num_pages * self.page + self.num_states * self.state_tokens

    @property
    def slice_tokens(self) -> int:
        """The positions that take as many bytes as a decode slice's copies of all states."""
        return self.num_rows * self.state_tokens

    @property
    def equal_sample_length(self) -> int:
        """The length of each sample if `num_slots` samples of equal length run at the same time."""
        return min(max(self.tokens // self.num_slots, 1), self.max_length)

    def count_samples(self, length: int) -> int:
        """Return how many samples of a given length can run at the same time."""
        return min(self.num_slots, self.tokens // length)

    @property
    def _prefix_states(self) -> int:
        return int(STATE_SHARE * self.prefix_tokens) // self.state_tokens if self.state_tokens else 0
