"""Which pages and states of the cache are free, and which a prompt or a sample has."""

from collections.abc import Iterable
from dataclasses import dataclass


class FreeList:
    """Numbers from 1 to `size` - 1, each of which is free or has holders. Number 0, the empty one, is neither."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, 0, -1))
        self._references = [0] * size

    @property
    def num_free(self) -> int:
        """How many numbers have no holder."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many numbers have a holder."""
        return len(self._references) - 1 - len(self._free)

    def count_references(self, number: int) -> int:
        """Return how many hold a number."""
        return self._references[number]

    def allocate(self, count: int) -> list[int]:
        """Return `count` free numbers, each with one holder now. There must be as many."""
        assert count <= len(self._free), f"{count} of {len(self._free)} free ones"
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        for number in taken:
            self._references[number] = 1
        return taken

    def add_references(self, numbers: Iterable[int]) -> None:
        """Add a holder to each of the numbers."""
        for number in numbers:
            self._references[number] += number > 0

    def release(self, numbers: Iterable[int]) -> None:
        """Remove a holder from each of the numbers; those without any are free."""
        for number in numbers:
            if number > 0:
                assert self._references[number] > 0, f"{number} is free already"
                self._references[number] -= 1
                if not self._references[number]:
                    self._free.append(number)


@dataclass(slots=True, eq=False)
class BlockTableRow:
    """A row of the block table: the pages and the state of a prompt or a sample.

    Page i has its positions from i pages on. All pages but the last are full, or shared, and are never written again.
    Numbers are those within the shard.
    """

    pages: list[int]
    state: int = 0
    """The slot of its state of fixed size; 0 for models without."""
    shard: int = 0
