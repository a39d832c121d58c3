"""In what pieces prompts are computed, and how much room they are given: of both few sizes, so that shapes are few.

Chunks are all of one size but the last, which is padded to a power of two; so what a position's keys are computed with
depends on its place in the prompt alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_tx.backends.jax.buckets import ascending, next_power
from skyrl_tx.backends.jax.config import JaxConfig

SHORTEST = 32  # tokens that the last chunk of a prompt is padded to, at least


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of `size` tokens, a power of two; and rooms of up to `longest` positions, a multiple of it."""

    size: int
    longest: int

    @classmethod
    def of(cls, config: JaxConfig, max_length: int) -> "Chunks":
        """Return those for prompts of up to `max_length` tokens."""
        size = min(config.prefill_chunk_tokens, next_power(max(max_length, SHORTEST)))
        return cls(size, -(-max_length // size) * size)

    def end(self, start: int) -> int:
        """Return where the chunk ends that begins at `start`, in a prompt that is long enough."""
        return start + self.size

    def last_end(self, num_tokens: int) -> int:
        """Return where the last of the chunks ends that so many tokens fill; 0 if they fill none."""
        return num_tokens // self.size * self.size

    def padded_sizes(self) -> Iterator[int]:
        """Yield every size that chunks have, padding included."""
        return ascending(padded, self.size)

    def room_of(self, num_tokens: int) -> int:
        """Return how many positions are set aside for a prompt: a whole number of chunks."""
        room = self.size
        while room < num_tokens:
            room *= 4
        return min(room, self.longest)

    def rooms(self) -> Iterator[int]:
        """Yield every number of positions that a prompt may take."""
        return ascending(self.room_of, self.longest)


def padded(num_tokens: int) -> int:
    """Return what a chunk of so many tokens is padded to."""
    return max(next_power(num_tokens), SHORTEST)
