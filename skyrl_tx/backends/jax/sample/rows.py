"""The rows of a decode slice: which samples have them, and how many there are.

A slice computes as many rows as the least row count that holds the running samples, so that a free slot costs little.
On one CPU device a row has the same bits for any count in use: the order of sums is tried at the start, on the same
numbers for all. Elsewhere this is not checked. In float32 there is one count then, and in bfloat16, whose bits depend
on other samples anyway, there are few.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from skyrl_tx.backends.jax.sample.running import BASE, RunningSample
from skyrl_tx.backends.jax.shapes import next_power, tiles

SINGLE = 2
"""Rows for one or two samples. XLA on CPU adds the products of one row in another order than those of several."""
STEP = 4
"""Growth of row counts on accelerators, from 16.

Programs of few rows read the weights as long as those of many, and each takes its time to compile."""
FEW = 8
"""Measured on CPU, in ms of a step with 30M parameters: two rows 16, four 19, eight 21, 16 rows 26, 64 rows 59."""

log = logging.getLogger(__name__)


class RowCounts:
    """The numbers of rows that slices may have. The largest is always in use."""

    def __init__(self, counts: Sequence[int], bits_of: Callable[[int, bool], Any] | None = None) -> None:
        """Create the counts, in ascending order.

        `bits_of(count, any_adapter)` returns the numbers that programs with and without adapters compute of some rows.
        Without it all counts are in use.
        """
        self.all = counts
        self._bits_of = bits_of
        self._agrees: dict[tuple[int, bool], bool] = {}

    @classmethod
    def of_one_cpu(cls, num_slots: int, bits_of: Callable[[int, bool], Any]) -> Self:
        """Return the counts for up to `num_slots` samples on one CPU device; see `__init__`."""
        largest = max(next_power(num_slots), FEW)
        few = [] if largest == FEW else [SINGLE]  # eight rows are enough of a gain to need no other program
        return cls([*few, *(FEW << i for i in range((largest // FEW).bit_length()))], bits_of)

    @classmethod
    def of_accelerators(cls, num_slots: int, num_shards: int) -> Self:
        """Return the counts for up to `num_slots` samples in bfloat16, whose rows are cut into shards."""
        few = (STEP**n for n in itertools.count(2))
        counts = itertools.takewhile(lambda count: count < num_slots, few)
        return cls([*(count for count in counts if count % num_shards == 0), num_slots])

    def least(self, num_samples: int, *, any_adapter: bool) -> int:
        """Return the least count in use that has a row for each sample."""
        return next(count for count in self.all if count >= num_samples and self.is_used(count, any_adapter))

    def is_used(self, count: int, any_adapter: bool) -> bool:
        """Return whether rows have the same bits as with the largest count, with which they are compared once."""
        if count == self.all[-1] or self._bits_of is None:
            return True
        key = count, any_adapter
        if key not in self._agrees:
            mine, largest = (self._bits_of(each, any_adapter) for each in (count, self.all[-1]))
            pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(largest), strict=True)
            self._agrees[key] = all(np.array_equal(own, other[: len(own)]) for own, other in pairs)
            if not self._agrees[key]:
                log.warning("decoding never computes %d rows: their bits differ from those of more rows", count)
        return self._agrees[key]


@dataclass(frozen=True, slots=True)
class Rows:
    """The sample of each row, and the adapters of the rows."""

    samples: tuple[RunningSample | None, ...]
    """None: a row without a sample."""
    adapters: tuple[int, ...]
    """Adapter slots: of all rows, of each tile of rows, or of each row."""

    @classmethod
    def arrange(cls, samples: Iterable[RunningSample], count: int, *, merges: bool, num_shards: int = 1) -> "Rows":
        """Return rows for the samples, such that tiles share an adapter if there are rows enough for that.

        Each shard has as many rows, one shard after the other, of which its samples have the first. If it `merges`, an
        adapter that all samples share is that of all rows: two plain products, of which nothing is gathered by tile.
        They add in another order than tiles do, so that bits depend on other samples.
        """
        samples = list(samples)
        adapters = {sample.adapter for sample in samples}
        is_merged = merges and len(adapters) == 1
        if is_merged and num_shards == 1:  # the usual case on accelerators, where the host has little time
            return cls((*samples, *[None] * (count - len(samples))), tuple(adapters))
        by_shard: list[dict[int, list[RunningSample]]] = [{} for _ in range(num_shards)]
        for sample in samples:
            by_shard[sample.table.shard].setdefault(sample.adapter, []).append(sample)
        size, own = len(tiles(count)[0]), count // num_shards
        if is_merged or own % size:
            size = 1
        by_tile = [_in_tiles(part, size) for part in by_shard]
        if any(len(rows) > own for rows in by_tile):
            size, by_tile = 1, [_in_tiles(part, 1) for part in by_shard]
        rows = list[RunningSample | None]()
        for part in by_tile:
            rows += [*part, *[None] * (own - len(part))]
        if is_merged:
            return cls(tuple(rows), tuple(adapters))
        return cls(tuple(rows), tuple(BASE if sample is None else sample.adapter for sample in rows[::size]))

    @property
    def any_adapter(self) -> bool:
        """Whether a row has another adapter than the base model."""
        return any(adapter != BASE for adapter in self.adapters)

    def by_row(self) -> dict[int, RunningSample]:
        """Return the sample of each row that has one."""
        return {row: sample for row, sample in enumerate(self.samples) if sample is not None}


def group_counts(count: int, *, any_adapter: bool, merges: bool) -> list[int]:
    """Return how many adapters programs of `count` rows are given: one for each group of equal size, see `Rows`."""
    num_tiles = len(tiles(count))
    fewest = 1 if merges else num_tiles
    return sorted({fewest, num_tiles, count}) if any_adapter else [fewest]


def groups_of(
    samples: Iterable[RunningSample], counts: Iterable[int], read_length: Callable[[int], int], most: int
) -> Iterator[list[RunningSample]]:
    """Cut samples into groups of like length, the longest first, that read at most `most` positions together.

    All rows of a group read as much as its longest. The fewest rows may read more.
    """
    rest, counts = sorted(samples, key=lambda sample: sample.position, reverse=True), sorted(counts)
    while rest:
        length = read_length(rest[0].position)
        size = max([counts[0], *(count for count in counts if count * length <= most)])
        yield rest[:size]
        rest = rest[size:]


def _in_tiles(samples: Mapping[int, list[RunningSample]], size: int) -> list[RunningSample | None]:
    """Return the samples of each adapter one after another, padded to whole tiles of `size` rows."""
    rows = list[RunningSample | None]()
    for _, group in sorted(samples.items()):
        rows += [*group, *[None] * (-len(group) % size)]
    return rows
