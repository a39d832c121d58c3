"""The rows of a decode slice: their number, the sample and adapter of each row, and its results.

A decode slice is a fixed number of decode steps. It has the smallest row count that holds the
running samples, so that unused rows cost little.

On a single CPU device, a row has the same bits for every row count in use. XLA may sum in a
different order for some counts, so each count is compared with the largest one, on the same
numbers, before its first use. A file remembers the comparisons (see `ComparedRows`). On other
devices, nothing is compared. With float32 there is only one row count. With bfloat16 there are a
few, because bits depend on other samples anyway.

Legend: S rows, N steps, K top tokens.
"""

import hashlib
import itertools
import logging
import os
import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from skyrl_tx.backends.jax.compiler import ValueFile
from skyrl_tx.backends.jax.devices import fetch
from skyrl_tx.backends.jax.sample.programs import SliceResult
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, RunningSample
from skyrl_tx.backends.jax.shapes import get_tile_size, next_power_of_two
from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.logit_adjuster import LogitAdjuster
from skyrl_tx.contract.results import TopK

PAIR_ROWS = 2
"""The row count for one or two samples.

A single row would not do: XLA on CPU sums the products of one row in a different order than the
products of multiple rows.
"""
GROWTH_FACTOR = 4
"""The growth of row counts on accelerators (16, 64, ...) and of adapter counts (4, 16, ...).

Programs with few rows spend as much time on reading the weights as programs with more rows, and
each program takes time to compile.
"""
MIN_ROWS = 8
"""The smallest row count on a single CPU device, except for PAIR_ROWS.

Measured with 30M parameters, ms per step: 2 rows 16, 4 rows 19, 8 rows 21, 16 rows 26, 64 rows 59.
"""

_PRODUCT = Path(__file__).parents[3]
_SOURCES = "backends/jax", "layers", "models"
"""The folders with the code of programs."""
_CPUINFO = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


class ComparedRows(ValueFile[bool]):
    """A file that says, for each comparison, whether both row counts gave the same bits.

    The file belongs to one setup: the model, the settings, the code, the versions of JAX and the CPU.
    """

    def __init__(self, directory: Path, *setup: object) -> None:
        """`setup` is everything that changes a program on this machine, with a stable `repr`."""
        texts = (repr(setup), *_describe_machine(), _hash_sources())
        name = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        loss = "which row counts were compared, so the next start compares them"
        super().__init__(directory / "compared_rows" / f"{name}.json", bool, loss=loss)


def _describe_machine() -> list[str]:
    """Return what XLA compiles CPU programs for: versions, flags, instructions and cores."""
    cpu = ""
    with suppress(OSError):
        cpu = _CPUINFO.read_text().split("\n\n")[0]
    lines = [line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features"))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = (f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    return [*versions, platform.machine(), *lines, f"{cores} cores", os.environ.get("XLA_FLAGS", "")]


def _hash_sources() -> str:
    """Return a hash of the code of all programs."""
    content = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_PRODUCT / folder).rglob("*.py")):
            content.update(path.relative_to(_PRODUCT).as_posix().encode() + path.read_bytes())
    return content.hexdigest()


class RowCounts:
    """The row counts that slices may have. The largest is always in use."""

    def __init__(
        self,
        counts: Sequence[int],
        decode_rows: Callable[[int, int, bool], Any] | None = None,
        compared: ComparedRows | None = None,
    ) -> None:
        """Create the counts, which must be ascending.

        `decode_rows(count, rank, is_adjusted)` returns the results of a decode slice of `count` rows,
        with adapters of `rank` or, for 0, without, and with or without changed logits. Without this
        function, all counts are in use. `compared` stores the comparisons for later starts.
        """
        self.all = counts
        self._decode_rows = decode_rows
        self._compared = compared
        self._agrees = {} if compared is None else compared.read()  # by `_name_comparison`

    @classmethod
    def for_single_cpu(
        cls, num_slots: int, decode_rows: Callable[[int, int, bool], Any], compared: ComparedRows | None = None
    ) -> Self:
        """Return the counts for up to `num_slots` samples on a single CPU device; see `__init__`."""
        largest = max(next_power_of_two(num_slots), MIN_ROWS)
        few = [] if largest == MIN_ROWS else [PAIR_ROWS]  # for up to eight slots, one program is fast enough
        return cls([*few, *(MIN_ROWS << i for i in range((largest // MIN_ROWS).bit_length()))], decode_rows, compared)

    @classmethod
    def for_accelerators(cls, num_slots: int, num_shards: int, num_copies: int = 1) -> Self:
        """Return the counts for up to `num_slots` samples in bfloat16, on `num_shards` shards.

        Each of the `num_copies` replicas of the weights has as many rows as a single replica would
        have.
        """
        few = (num_copies * GROWTH_FACTOR**n for n in itertools.count(2))
        counts = itertools.takewhile(lambda count: count < num_slots, few)
        return cls([*(count for count in counts if count % num_shards == 0), num_slots])

    def choose(self, num_samples: int, *, rank: int, is_adjusted: bool = False) -> int:
        """Return the smallest count in use that has a row for each sample."""
        counts = (count for count in self.all if count >= num_samples)
        return next(count for count in counts if self.is_used(count, rank, is_adjusted))

    def is_compared(self, count: int, rank: int, is_adjusted: bool = False) -> bool:
        """Return whether `is_used` needs no comparison, or has made it before."""
        if count == self.all[-1] or self._decode_rows is None:
            return True
        return self._name_comparison(count, rank, is_adjusted) in self._agrees

    def is_used(self, count: int, rank: int, is_adjusted: bool = False) -> bool:
        """Return whether rows have the same bits with `count` rows as with the largest count.

        The first call for a count compares them.
        """
        if count == self.all[-1] or self._decode_rows is None:
            return True
        name = self._name_comparison(count, rank, is_adjusted)
        if name not in self._agrees:
            mine, largest = (self._decode_rows(rows, rank, is_adjusted) for rows in (count, self.all[-1]))
            pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(largest), strict=True)
            self._agrees[name] = all(np.array_equal(own, other[: len(own)]) for own, other in pairs)
            if self._compared is not None:
                self._compared.write(self._agrees)
            if not self._agrees[name]:
                log.warning("decode slices of %d rows are disabled: they round differently from larger slices", count)
        return self._agrees[name]

    def _name_comparison(self, count: int, rank: int, is_adjusted: bool) -> str:
        """Return the name of a comparison with the largest count."""
        kinds = (name for name, applies in ((f"rank {rank}", rank), ("adjusted", is_adjusted)) if applies)
        return " ".join((f"{count}/{self.all[-1]} rows", *kinds))


def make_noise(arrays: Any, *, is_same: bool = False) -> Any:
    """Return random numbers of standard deviation 1 with the shapes and shardings of `arrays`.

    The numbers depend on the leaf and on the index in it, but not on the number of rows. With
    `is_same`, all rows have the numbers of the first row. NumPy draws them, because on the device
    each shape would take about ten programs to compile. The sharding has to match, because JAX
    compiles a program again for other shardings.
    """
    leaves, tree = jax.tree.flatten(arrays)

    def draw_leaf(leaf: jax.Array, seed: int) -> jax.Array:
        shape = (1, *leaf.shape[1:]) if is_same else leaf.shape
        uniform = np.random.default_rng(seed).random(shape, np.float32)
        scaled = ((2 * uniform - 1) * np.float32(3**0.5)).astype(leaf.dtype)  # a uniform on [-a, a] has a / sqrt(3)
        return jax.device_put(np.broadcast_to(scaled, leaf.shape), leaf.sharding if leaf.committed else None)

    return jax.tree.unflatten(tree, [draw_leaf(leaf, seed) for seed, leaf in enumerate(leaves)])


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The sample of each row, and the adapters of the rows."""

    samples: tuple[RunningSample | None, ...]
    """None is a row without a sample."""
    adapters: tuple[int, ...]
    """Adapter slots: one for all rows, one per tile, or one per row.

    With `groups`, this lists each adapter slot in use once.
    """
    groups: tuple[int, ...] | None = None
    """For each row, the index of its adapter in `adapters`."""

    @classmethod
    def arrange(
        cls, samples: Iterable[RunningSample], count: int, *, merges: bool, num_shards: int = 1, max_adapters: int = 0
    ) -> "SliceRows":
        """Assign the samples to rows. The rows of a tile share an adapter if there are enough rows.

        All shards have the same number of rows, one shard after the other. The samples of a shard
        have its first rows.

        With `merges`, `adapters` lists the adapters in use, padded to one of a few lengths up to
        `max_adapters` (0: no limit), and all rows are multiplied with all of them. A single adapter
        then takes two plain products, and no tile needs a copy of its adapter. Sums have another
        order than in tiles, so bits depend on other samples.
        """
        samples = list(samples)
        adapters = sorted({sample.adapter for sample in samples})
        if merges and num_shards == 1:  # the usual case on accelerators, where host time is scarce
            return cls._from_merged_adapters((*samples, *[None] * (count - len(samples))), adapters, max_adapters)

        by_shard: list[dict[int, list[RunningSample]]] = [{} for _ in range(num_shards)]
        for sample in samples:
            by_shard[sample.table.shard].setdefault(sample.adapter, []).append(sample)

        # Use tiles of one row if the shards cannot be cut into tiles, or if too few rows are left.
        size, rows_per_shard = get_tile_size(count), count // num_shards
        if merges or rows_per_shard % size:
            size = 1
        by_tile = [_pad_to_tiles(part, size) for part in by_shard]
        if any(len(rows) > rows_per_shard for rows in by_tile):
            size, by_tile = 1, [_pad_to_tiles(part, 1) for part in by_shard]

        rows = list[RunningSample | None]()
        for part in by_tile:
            rows += [*part, *[None] * (rows_per_shard - len(part))]
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
        """Yield empty rows in every shape that `arrange` can return for this count and adapter."""
        rows = (None,) * count
        if merges:
            yield cls(rows, (adapter,))
            if adapter != BASE_SLOT:
                for number in _list_adapter_counts(count, max_adapters):
                    yield cls(rows, (adapter,) * number, (0,) * count)
            return
        num_tiles = count // get_tile_size(count)
        for number in sorted({num_tiles, count}) if adapter != BASE_SLOT else [num_tiles]:
            yield cls(rows, (adapter,) * number)

    def without_samples(self) -> "SliceRows":
        """Return rows of the same shape that hold no sample."""
        return SliceRows((None,) * len(self.samples), self.adapters, self.groups)

    @property
    def any_adapter(self) -> bool:
        """Whether any row has an adapter."""
        return any(adapter != BASE_SLOT for adapter in self.adapters)

    def make_key(self, *, is_adjusted: bool = False) -> tuple[Hashable, ...]:
        """Return the key of the program of a slice on an accelerator: everything that its shapes depend on."""
        kind = "adjusted decode" if is_adjusted else "decode"
        return kind, len(self.samples), len(self.adapters), self.groups is not None, self.any_adapter

    def get_adjusters(self) -> dict[int, LogitAdjuster]:
        """Return the adjuster of each row whose next logits change."""
        samples = enumerate(self.samples)
        adjusted = ((row, sample.adjuster) for row, sample in samples if sample is not None and sample.is_adjusted)
        return {row: adjuster for row, adjuster in adjusted if adjuster is not None}

    def get_samples_by_row(self) -> dict[int, RunningSample]:
        """Return the sample of each row that has one."""
        return {row: sample for row, sample in enumerate(self.samples) if sample is not None}


def _list_adapter_counts(count: int, max_adapters: int) -> list[int]:
    """Return the possible numbers of adapters for slices of `count` rows with multiple adapters."""
    largest = min(count, max_adapters or count)
    powers = (GROWTH_FACTOR**n for n in itertools.count(1))
    return [*itertools.takewhile(lambda number: number < largest, powers), largest]


def _pad_to_tiles(samples: Mapping[int, list[RunningSample]], size: int) -> list[RunningSample | None]:
    """Return the samples sorted by adapter, with the rows of each adapter padded to whole tiles."""
    rows = list[RunningSample | None]()
    for _, group in sorted(samples.items()):
        rows += [*group, *[None] * (-len(group) % size)]
    return rows


RowTokens = tuple[RunningSample, int, Int32Array, Float32Array, bool, TopK | None]
"""A sample and what a slice drew for it: the arguments of `RunningSample.take_slice`."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """The rows and the result of one program call."""

    rows: SliceRows
    start_S: Any
    """KV positions in use before the slice, int32 on the host."""
    result: SliceResult
    wants_topk: bool


class DispatchedSlice:
    """A slice that the devices are computing or have computed."""

    def __init__(self, parts: Sequence[SlicePart], make_guard: Callable[[], AbstractContextManager[None]]) -> None:
        """Results are read inside a context from `make_guard`, because device errors surface there."""
        self._parts = parts
        self._make_guard = make_guard

    def read(self) -> Iterator[RowTokens]:
        """Wait for the devices and yield what each sample drew.

        Raises BackendLost if the cache is lost.
        """
        for part in self._parts:
            yield from self._read(part)

    def _read(self, part: SlicePart) -> Iterator[RowTokens]:
        drawn = part.result.drawn
        topk = (drawn.topk_tokens, drawn.topk_logprobs) if part.wants_topk else None
        with self._make_guard():
            result = fetch((drawn.tokens, drawn.logprobs, part.result.num_S, part.result.is_stopped_S, topk))
        tokens_NS, logprobs_NS, num_S, is_stopped_S, topk = result
        tokens_SN, logprobs_SN = (list(np.ascontiguousarray(x_NS.T)) for x_NS in (tokens_NS, logprobs_NS))
        rows = zip(part.rows.samples, part.start_S.tolist(), num_S.tolist(), is_stopped_S.tolist(), strict=True)
        for row, (sample, start, num, is_stopped) in enumerate(rows):
            if sample is None:
                continue
            tokens_N, logprobs_N = tokens_SN[row], logprobs_SN[row]
            if num < len(tokens_N):
                tokens_N, logprobs_N = tokens_N[:num], logprobs_N[:num]
            # Copy, so that a delta does not keep the arrays of all rows in memory.
            tokens_N, logprobs_N = tokens_N.copy(), logprobs_N.copy()

            sample_topk = None
            if topk is not None and (k := sample.request.options.sample_topk):
                sample_topk = TopK(token_ids=topk[0][:num, row, :k].copy(), logprobs=topk[1][:num, row, :k].copy())
            yield sample, start, tokens_N, logprobs_N, is_stopped, sample_topk
