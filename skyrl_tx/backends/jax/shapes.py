"""The few sizes that arrays of training and sampling are rounded up to, so that few programs are compiled.

Prefill chunks end at fixed positions of a prompt: after 128 tokens, then at each doubling up to the largest chunk
size, then at each multiple of it. Only the last chunk of a prompt is shorter, and is padded to a power of two. The
keys of a position are therefore computed by the same program whatever follows it, and prompts with equal beginnings
share all chunks that end within them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skyrl_tx.backends.jax.config import JaxConfig

SHORTEST_CHUNK = 32
"""Tokens to which the last chunk of a prompt is padded, at least."""

FIRST_CHUNK = 128
"""Tokens of the first chunk. Measured on CPU at 250 tokens: 1.2 times the time of a single chunk; 64 tokens: 1.3."""


def bucket(size: int, smallest: int = 1) -> int:
    """Round `size` up to one of `smallest` · (1, 1.5, 2, 3, 4, 6, 8 …), so that at most a third is padding."""
    power = smallest
    while power < size:
        power *= 2
    midpoint = power * 3 // 4
    return midpoint if power > smallest and midpoint >= size else power


def next_power(size: int) -> int:
    """Return the least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def ascending(round_up: Callable[[int], int], last: int) -> Iterator[int]:
    """Yield every value of `round_up` below `last` in ascending order, then `last`."""
    size = round_up(1)
    while size < last:
        yield size
        size = round_up(size + 1)
    yield last


def padded_chunk(num_tokens: int) -> int:
    """Return the padded size of a chunk of `num_tokens`."""
    return max(next_power(num_tokens), SHORTEST_CHUNK)


@dataclass(frozen=True, slots=True)
class PrefillShapes:
    """The sizes of prefill chunks and prompt buffers.

    A chunk has up to `chunk_size` tokens, a power of two. A prompt buffer holds the keys of one prompt; it has up to
    `longest` positions, a multiple of `chunk_size`.
    """

    chunk_size: int
    longest: int

    @classmethod
    def of(cls, config: JaxConfig, max_length: int) -> "PrefillShapes":
        """Return the sizes for prompts of up to `max_length` tokens."""
        chunk_size = min(config.prefill_chunk_tokens, next_power(max(max_length, SHORTEST_CHUNK)))
        return cls(chunk_size, -(-max_length // chunk_size) * chunk_size)

    def chunk_end(self, start: int) -> int:
        """Return the end of the full chunk that begins at position `start`."""
        return (
            start + self.chunk_size if start >= self.chunk_size else min(max(2 * start, FIRST_CHUNK), self.chunk_size)
        )

    def full_chunks(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens lie in full chunks."""
        end = 0
        while (later := self.chunk_end(end)) <= num_tokens:
            end = later
        return end

    def padded_sizes(self) -> Iterator[int]:
        """Yield every padded size of a chunk."""
        return ascending(padded_chunk, self.chunk_size)

    def prompt_lengths(self, max_length: int) -> Iterator[int]:
        """Yield prompt lengths whose last chunks, taken together, have every padded size."""
        for size in self.padded_sizes():
            yield min(size if size <= FIRST_CHUNK else 2 * size, max_length)

    def buffer_length(self, num_tokens: int) -> int:
        """Return the positions of the buffer for a prompt of `num_tokens`: a whole number of chunks."""
        length = self.chunk_size
        while length < num_tokens:
            length *= 4
        return min(length, self.longest)

    def buffer_lengths(self) -> Iterator[int]:
        """Yield every length of a prompt buffer."""
        return ascending(self.buffer_length, self.longest)


TILE = 4
"""Slots that share an adapter. Measured on CPU, in tokens/s: one slot per adapter 540, four 760, eight 820."""


def tiles(num_slots: int) -> Sequence[range]:
    """Return the tiles of neighbouring slots, or rows, that share an adapter where possible.

    There is never a single tile of several: XLA on CPU computes one group as a plain product, in another order of sums.
    """
    size = math.gcd(num_slots, TILE) if num_slots > TILE else 1
    return [range(first, first + size) for first in range(0, num_slots, size)]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the KV cache: `num_slots` slots of `length` positions each."""

    num_slots: int
    length: int


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """The memory for keys, values and states, in positions of all devices together.

    The KV cache is allocated at start-up. Prompt buffers are allocated on demand; the least recently used entries of
    the prefix cache are evicted to make space for them.
    """

    num_slots: int
    """The most KV cache slots."""
    tokens: int
    """Positions of the KV cache, over all slots."""
    prompt_tokens: int
    """Positions of all prompt buffers; at least the longest prompt and the prompts that one step computes."""
    prefix_tokens: int
    """Positions of the prefix cache, a part of `prompt_tokens`."""
    max_length: int
    """Prompt and new tokens of one sample."""
    prompt_bytes: int = 0
    """Bytes of all prompt buffers on each device."""
    state_tokens: int = 0
    """Positions that take as many bytes as the state of fixed size of a prompt; 0 for models without."""

    def positions(self, length: int, *, num_kept: int = 0) -> int:
        """Return what a prompt buffer of `length` counts as, with its state and `num_kept` others."""
        return length + (1 + num_kept) * self.state_tokens

    def layout_for(self, needed: int) -> KVLayout:
        """Return the layout with the most slots whose KV length is at least `needed`.

        All layouts have at most `tokens` positions: each doubling of the length, up to `max_length`, halves the slots.
        """
        assert 0 < needed <= self.max_length <= self.tokens
        length = min(max(self.tokens // self.num_slots, 1), self.max_length)
        while length < needed:
            length = min(2 * length, self.max_length)
        return KVLayout(num_slots=min(self.num_slots, self.tokens // length), length=length)
