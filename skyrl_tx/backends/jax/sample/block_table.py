"""Bookkeeping of pages and states: free lists with reference counts, and block table rows."""

from collections.abc import Iterable
from dataclasses import dataclass


class FreeList:
    """A pool of the numbers 1 to `size` - 1, with reference counts.

    Number 0, the empty page, is never allocated.
    """

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
        """Return how many holders a number has."""
        return self._references[number]

    def allocate(self, count: int) -> list[int]:
        """Return `count` free numbers, each with one holder. There must be enough."""
        assert count <= len(self._free), f"{count} of {len(self._free)} free ones"
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        for number in taken:
            self._references[number] = 1
        return taken

    def add_references(self, numbers: Iterable[int]) -> None:
        """Add a holder to each number."""
        for number in numbers:
            self._references[number] += number > 0

    def release(self, numbers: Iterable[int]) -> None:
        """Remove a holder from each number. A number without a holder is free."""
        for number in numbers:
            if number > 0:
                assert self._references[number] > 0, f"{number} is free already"
                self._references[number] -= 1
                if not self._references[number]:
                    self._free.append(number)


@dataclass(slots=True, eq=False)
class BlockTableRow:
    """A row of the block table: the pages and the state slot of one prompt or sample.

    Page i holds the positions from `i * page_size` on. Only the last page is ever written, and only
    if it is neither full nor shared. Numbers count within the shard.
    """

    pages: list[int]
    state: int = 0
    """The slot of its state of fixed size; 0 for models without state."""
    shard: int = 0
