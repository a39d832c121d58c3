"""The rows of a decode slice: which samples have them, and how many there are.

A slice computes as many rows as the least row count that holds the running samples, so that a free slot costs little.
On one CPU device a row has the same bits for any count in use: the order of sums is tried at the start, on the same
numbers for all. Elsewhere this is not checked. In float32 there is one count then, and in bfloat16, whose bits depend
on other samples anyway, there are few.

A dispatched slice (`Slice`) also belongs here: what its samples drew once the host reads it.

Legend: S rows, N steps, K top tokens.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from skyrl_tx.backends.jax.devices import fetch
from skyrl_tx.backends.jax.sample.programs import SliceResult
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, RunningSample
from skyrl_tx.backends.jax.shapes import make_tiles, next_power_of_two
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.results import TopK

PAIR_ROWS = 2
"""Rows for one or two samples. XLA on CPU adds the products of one row in another order than those of several."""
GROWTH_FACTOR = 4
"""Growth of row counts on accelerators, from 16, and of the numbers of adapters in one slice, from 4.

Programs of few rows read the weights as long as those of many, and each takes its time to compile."""
FEW = 8
"""Measured on CPU, in ms of a step with 30M parameters: two rows 16, four 19, eight 21, 16 rows 26, 64 rows 59."""

log = logging.getLogger(__name__)


class RowCounts:
    """The numbers of rows that slices may have. The largest is always in use."""

    def __init__(self, counts: Sequence[int], decode_rows: Callable[[int, bool], Any] | None = None) -> None:
        """Create the counts, in ascending order.

        `decode_rows(count, any_adapter)` returns the numbers that programs with and without adapters compute of some rows.
        Without it all counts are in use.
        """
        self.all = counts
        self._decode_rows = decode_rows
        self._agrees: dict[tuple[int, bool], bool] = {}

    @classmethod
    def for_single_cpu(cls, num_slots: int, decode_rows: Callable[[int, bool], Any]) -> Self:
        """Return the counts for up to `num_slots` samples on one CPU device; see `__init__`."""
        largest = max(next_power_of_two(num_slots), FEW)
        few = [] if largest == FEW else [PAIR_ROWS]  # eight rows are enough of a gain to need no other program
        return cls([*few, *(FEW << i for i in range((largest // FEW).bit_length()))], decode_rows)

    @classmethod
    def for_accelerators(cls, num_slots: int, num_shards: int, num_copies: int = 1) -> Self:
        """Return the counts for up to `num_slots` samples in bfloat16, whose rows are cut into shards.

        Each of the copies of the weights has as many rows as a single one would have.
        """
        few = (num_copies * GROWTH_FACTOR**n for n in itertools.count(2))
        counts = itertools.takewhile(lambda count: count < num_slots, few)
        return cls([*(count for count in counts if count % num_shards == 0), num_slots])

    def choose(self, num_samples: int, *, any_adapter: bool) -> int:
        """Return the least count in use that has a row for each sample."""
        return next(count for count in self.all if count >= num_samples and self.is_used(count, any_adapter))

    def is_used(self, count: int, any_adapter: bool) -> bool:
        """Return whether rows have the same bits as with the largest count, with which they are compared once."""
        if count == self.all[-1] or self._decode_rows is None:
            return True
        key = count, any_adapter
        if key not in self._agrees:
            mine, largest = (self._decode_rows(each, any_adapter) for each in (count, self.all[-1]))
            pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(largest), strict=True)
            self._agrees[key] = all(np.array_equal(own, other[: len(own)]) for own, other in pairs)
            if not self._agrees[key]:
                log.warning("decoding never computes %d rows: their bits differ from those of more rows", count)
        return self._agrees[key]


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The sample of each row, and the adapters of the rows."""

    samples: tuple[RunningSample | None, ...]
    """None: a row without a sample."""
    adapters: tuple[int, ...]
    """Adapter slots: of all rows, of each tile of rows, or of each row; with `groups` each slot in use once."""
    groups: tuple[int, ...] | None = None
    """The index in `adapters` of each row's."""

    @classmethod
    def arrange(
        cls, samples: Iterable[RunningSample], count: int, *, merges: bool, num_shards: int = 1, max_adapters: int = 0
    ) -> "SliceRows":
        """Return rows for the samples, such that tiles share an adapter if there are rows enough for that.

        Each shard has as many rows, one shard after the other, of which its samples have the first. If it `merges`, the
        adapters are those in use, padded to one of a few numbers up to `max_adapters` (0: any), and all rows are
        multiplied with all of them: one adapter is two plain products, and no tile has a copy. Sums have another order
        than in tiles then, so that bits depend on other samples.
        """
        samples = list(samples)
        adapters = sorted({sample.adapter for sample in samples})
        if merges and num_shards == 1:  # the usual case on accelerators, where the host has little time
            return cls._from_merged_adapters((*samples, *[None] * (count - len(samples))), adapters, max_adapters)
        by_shard: list[dict[int, list[RunningSample]]] = [{} for _ in range(num_shards)]
        for sample in samples:
            by_shard[sample.table.shard].setdefault(sample.adapter, []).append(sample)
        size, own = len(make_tiles(count)[0]), count // num_shards
        if merges or own % size:
            size = 1
        by_tile = [_pad_to_tiles(part, size) for part in by_shard]
        if any(len(rows) > own for rows in by_tile):
            size, by_tile = 1, [_pad_to_tiles(part, 1) for part in by_shard]
        rows = list[RunningSample | None]()
        for part in by_tile:
            rows += [*part, *[None] * (own - len(part))]
        if merges:
            return cls._from_merged_adapters(tuple(rows), adapters, max_adapters)
        return cls(tuple(rows), tuple(BASE_SLOT if sample is None else sample.adapter for sample in rows[::size]))

    @classmethod
    def _from_merged_adapters(
        cls, rows: tuple[RunningSample | None, ...], adapters: Sequence[int], max_adapters: int
    ) -> "SliceRows":
        if len(adapters) == 1:
            return cls(rows, tuple(adapters))
        padded = next(number for number in _list_adapter_counts(len(rows), max_adapters) if number >= len(adapters))
        index = {adapter: number for number, adapter in enumerate(adapters)}
        groups = tuple(0 if sample is None else index[sample.adapter] for sample in rows)
        return cls(rows, (*adapters, *[BASE_SLOT] * (padded - len(adapters))), groups)

    @classmethod
    def iter_shapes(cls, count: int, adapter: int, *, merges: bool, max_adapters: int = 0) -> "Iterator[SliceRows]":
        """Yield `count` rows without samples, in every shape in which `arrange` returns them, with this adapter."""
        rows = (None,) * count
        if merges:
            yield cls(rows, (adapter,))
            if adapter != BASE_SLOT:
                for number in _list_adapter_counts(count, max_adapters):
                    yield cls(rows, (adapter,) * number, (0,) * count)
            return
        num_tiles = len(make_tiles(count))
        for number in sorted({num_tiles, count}) if adapter != BASE_SLOT else [num_tiles]:
            yield cls(rows, (adapter,) * number)

    @property
    def any_adapter(self) -> bool:
        """Whether a row has another adapter than the base model."""
        return any(adapter != BASE_SLOT for adapter in self.adapters)

    def get_samples_by_row(self) -> dict[int, RunningSample]:
        """Return the sample of each row that has one."""
        return {row: sample for row, sample in enumerate(self.samples) if sample is not None}


def _list_adapter_counts(count: int, max_adapters: int) -> list[int]:
    """Return how many adapters programs of `count` rows with several are given."""
    most = min(count, max_adapters or count)
    return [*itertools.takewhile(lambda number: number < most, (GROWTH_FACTOR**n for n in itertools.count(1))), most]


def group_by_length(
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


def _pad_to_tiles(samples: Mapping[int, list[RunningSample]], size: int) -> list[RunningSample | None]:
    """Return the samples of each adapter one after another, padded to whole tiles of `size` rows."""
    rows = list[RunningSample | None]()
    for _, group in sorted(samples.items()):
        rows += [*group, *[None] * (-len(group) % size)]
    return rows


RowTokens = tuple[RunningSample, int, Int32Array, Float32Array, bool, TopK | None]
"""A sample, and what a slice drew of it: the arguments of `RunningSample.take_slice`."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """The rows of one call of the program."""

    rows: SliceRows
    start_S: Any
    """KV positions in use before the slice, int32 on the host."""
    result: SliceResult
    wants_topk: bool


class DispatchedSlice:
    """Rows that devices compute, or have computed."""

    def __init__(self, parts: Sequence[SlicePart], guarded: Callable[[], AbstractContextManager[None]]) -> None:
        """Errors of the devices are raised where results are read, inside a context that `guarded` makes."""
        self._parts = parts
        self._make_guard = guarded

    def read(self) -> Iterator[RowTokens]:
        """Wait for the devices, and yield what each sample drew. Raises BackendLost if the cache is lost."""
        for part in self._parts:
            yield from self._read(part)

    def _read(self, part: SlicePart) -> Iterator[RowTokens]:
        drawn = part.result.drawn
        topk = (drawn.topk_tokens, drawn.topk_logprobs) if part.wants_topk else None
        with self._make_guard():
            found = fetch((drawn.tokens, drawn.logprobs, part.result.num_S, part.result.is_stopped_S, topk))
        tokens_NS, logprobs_NS, num_S, is_stopped_S, topk = found
        tokens_SN, logprobs_SN = (list(np.ascontiguousarray(each.T)) for each in (tokens_NS, logprobs_NS))
        rows = zip(part.rows.samples, part.start_S.tolist(), num_S.tolist(), is_stopped_S.tolist(), strict=True)
        for row, (sample, start, num, is_stopped) in enumerate(rows):
            if sample is None:
                continue
            tokens_N, logprobs_N = tokens_SN[row], logprobs_SN[row]
            if num < len(tokens_N):
                tokens_N, logprobs_N = tokens_N[:num], logprobs_N[:num]
            # Copies, so that a delta does not keep all rows in memory.
            tokens_N, logprobs_N = tokens_N.copy(), logprobs_N.copy()
            own = None
            if topk is not None and (k := sample.request.options.sample_topk):
                own = TopK(token_ids=topk[0][:num, row, :k].copy(), logprobs=topk[1][:num, row, :k].copy())
            yield sample, start, tokens_N, logprobs_N, is_stopped, own
