"""Divide the samples of a decode slice among compiled programs, on a single CPU device.

A decode slice is up to 16 decode steps of all running samples. Its program depends on the number of
rows and on the KV read length. The read length does not change the bits of a row. A number of rows
is only used if a comparison has shown that it does not either (see `RowCounts`). So while the
program that fits best is not compiled, samples run in a larger program or in multiple smaller ones.
When their extra cost reaches the cost of a compilation, the best program is compiled in the
background. Samples wait for the compiler only if no compiled program can hold them, or if one slice
in other programs would cost more than the compilation.

The bits of a sample also depend on the padded rank of its adapter. So all adapters of a part have
the same padded rank. Samples of the base model may be in any part.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skyrl_tx.backends.jax.compiler import Compiler, Program
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, RunningSample
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts, SliceRows
from skyrl_tx.layers.kv_cache import MIN_SEGMENT_SIZE
from skyrl_tx.models import ModelConfig
from skyrl_tx.models.flops import count_frozen_macs

MAX_PARTS = 4
"""A group of samples is divided into at most this many parts; otherwise it waits for the compiler."""
CALL_COST = 16
"""The cost of a part without rows, see `PlannedPart.cost`."""
ROW_LENGTH = 512
"""A row with this KV read length costs twice as much as a row that reads nothing."""
_COMPILED_PARAMETERS = 21_000_000_000
"""A compilation takes as long as a decode step of one row with this many parameters.

The number is multiplied by the layers of the model. Measured with two cores and six layers with 30M
parameters in total: a compilation takes 3 s, and 16 decode steps take 11 ms more per row.
"""


def group_by_length(
    samples: Iterable[RunningSample], counts: Iterable[int], read_length: Callable[[int], int], max_positions: int
) -> Iterator[list[RunningSample]]:
    """Split samples into groups of similar length that read up to `max_positions` each.

    The group of the longest samples comes first. All rows of a group read as many positions as its
    longest sample. A group cannot have fewer rows than the smallest row count, so it may read more.
    """
    rest, counts = sorted(samples, key=lambda sample: sample.position, reverse=True), sorted(counts)
    while rest:
        length = read_length(rest[0].position)
        size = max([counts[0], *(count for count in counts if count * length <= max_positions)])
        yield rest[:size]
        rest = rest[size:]


def estimate_compilation_cost(model: ModelConfig) -> float:
    """Return the time to compile a program, in the unit of `PlannedPart.cost`."""
    return _COMPILED_PARAMETERS * model.num_layers / count_frozen_macs(model)


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Samples that one program decodes, and the shape of that program."""

    rows: SliceRows
    length: int
    """KV positions that each row reads."""
    rank: int
    """The padded rank of the adapters; 0 if all rows use the base model."""
    is_adjusted: bool = False
    """Whether penalties, biases or masks are applied to the logits, see `RunningSample.is_adjusted`."""

    @classmethod
    def arrange(cls, samples: Sequence[RunningSample], count: int, length: int, rank: int) -> "PlannedPart":
        """Assign samples to `count` rows. Either all of them are adjusted or none.

        `rank` is the padded rank of all their adapters. Samples of the base model alone have rank 0.
        """
        rows = SliceRows.arrange(samples, count, merges=False)
        return cls(rows, length, rank if rows.any_adapter else 0, samples[0].is_adjusted)

    def make_compared(self, count: int) -> "PlannedPart":
        """Return a part without samples.

        It runs with two row counts, to find out whether both give rows the same bits.
        """
        rows = next(SliceRows.iter_shapes(count, BASE_SLOT + self.rows.any_adapter, merges=False))
        return PlannedPart(rows, MIN_SEGMENT_SIZE, self.rank, self.is_adjusted)

    @property
    def num_samples(self) -> int:
        """The number of rows that have a sample."""
        return len(self.rows.get_samples_by_row())

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.rows.samples)

    @property
    def kind(self) -> tuple[int, bool]:
        """The rank, and whether logits are adjusted.

        `RowCounts` compares row counts separately for each kind.
        """
        return self.rank, self.is_adjusted

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Everything that the program's shapes depend on."""
        name = "adjusted rows" if self.is_adjusted else "rows"
        return name, self.count, len(self.rows.adapters), self.rank, self.length

    @property
    def cost(self) -> float:
        """The time of a decode step, in units of the time of a row that reads no KV cache."""
        return CALL_COST + self.count * (1 + self.length / ROW_LENGTH)


def cover(
    samples: Sequence[RunningSample],
    rank: int,
    shapes: Sequence[tuple[int, int]],
    choose_length: Callable[[int], int],
    can_run: Callable[[PlannedPart], bool],
) -> list[PlannedPart]:
    """Divide samples, the longest first, among programs that can run now.

    `rank` is the padded rank of their adapters, and `shapes` lists row counts with KV read lengths.
    Returns an empty list if the samples do not fit into MAX_PARTS of these programs.
    """
    parts, rest = list[PlannedPart](), list(samples)
    while rest and len(parts) < MAX_PARTS:
        needed = choose_length(rest[0].position)
        fitting = (
            PlannedPart.arrange(rest[:count], count, length, rank) for count, length in shapes if length >= needed
        )
        candidates = [part for part in fitting if can_run(part)]
        if not candidates:
            return []

        # Prefer the cheapest program for all the rest, then the one for most samples.
        whole = [part for part in candidates if part.num_samples == len(rest)]
        parts.append(min(whole or candidates, key=lambda part: (-part.num_samples, part.cost)))
        rest = rest[parts[-1].num_samples :]
    return [] if rest else parts


class SliceDivider:
    """Chooses the programs of decode slices. Knows which ones are compiled."""

    def __init__(
        self,
        counts: RowCounts,
        choose_length: Callable[[int], int],
        get_rank: Callable[[Iterable[int]], int],
        compiler: Compiler[Hashable] | None,
        make_program: Callable[[PlannedPart], Program],
        compilation_cost: float,
    ) -> None:
        """Choose from `counts`, and from the KV read lengths that `choose_length` returns for a position.

        `get_rank` returns the padded rank of the adapters in slots, see `SamplerPool.get_rank`.
        Without a compiler, the best program is always used, and its first call compiles it.
        `compilation_cost` has the unit of `PlannedPart.cost`.
        """
        self._counts = counts
        self._choose_length = choose_length
        self._get_rank = get_rank
        self._compiler = compiler
        self._make_program = make_program
        self._compilation_cost = compilation_cost
        self._called: set[Hashable] = set()
        self._shapes: set[tuple[int, int]] = set()  # row counts and KV read lengths of all queued or called programs
        self._extra_cost: defaultdict[Hashable, float] = defaultdict(float)
        """By program, the extra cost of the slices that ran without it."""

    def divide(self, samples: Sequence[RunningSample], num_steps: int, max_positions: int) -> list[PlannedPart]:
        """Return the parts of a slice of `num_steps` steps. Each part reads up to `max_positions`.

        Parts of the smallest row count may read more. This may wait for the compiler.
        """
        parts: list[PlannedPart] = []
        for rank, part in self._group_by_rank(samples).items():
            for group in group_by_length(part, self._counts.all, self._choose_length, max_positions):
                parts += self._choose(group, rank, num_steps, max_positions)
        return parts

    def _group_by_rank(self, samples: Sequence[RunningSample]) -> dict[int, list[RunningSample]]:
        """Return the samples by the padded rank of their adapters. Samples of the base model join the lowest rank."""
        by_rank: defaultdict[int, list[RunningSample]] = defaultdict(list)
        for sample in samples:
            by_rank[self._get_rank([sample.adapter])].append(sample)
        if len(by_rank) > 1 and (base := by_rank.pop(0, None)):
            by_rank[min(by_rank)] += base
        return by_rank

    def list_first_programs(self, rank: int) -> list[PlannedPart]:
        """Return parts, without samples, with all programs that the first sample of a server needs.

        Its adapter has the padded rank `rank`, and 0 is the base model. Its prompt is assumed to be a
        little longer than the shortest KV read length.
        """
        rows = next(SliceRows.iter_shapes(self._counts.all[0], BASE_SLOT + (rank > 0), merges=False))
        return self._list_missing(PlannedPart(rows, self._choose_length(MIN_SEGMENT_SIZE + 1), rank))

    def record_call(self, part: PlannedPart) -> None:
        """Record that the program of a part is about to be called. The call compiles it."""
        self._called.add(part.key)
        self._shapes.add((part.count, part.length))

    def _choose(
        self, samples: Sequence[RunningSample], rank: int, num_steps: int, max_positions: int
    ) -> list[PlannedPart]:
        best = self._choose_best(samples, rank)
        if self._compiler is None or self._can_run(best):
            return [best]

        # Use programs that are compiled.
        if parts := self._cover(samples, best, num_steps, max_positions):
            self._extra_cost[best.key] += _count_extra_cost(parts, best, num_steps)
            if self._extra_cost[best.key] >= self._compilation_cost:
                for missing in self._list_missing(best):
                    self._queue(missing)
            return parts

        # Wait for the compiler. If a larger program is ready before the best one, use it.
        for missing in self._list_missing(best):
            self._queue(missing)
            self._compiler.wait_if_pending(missing.key)
            self.record_call(missing)  # if it could not be compiled, a call will tell why
            if parts := self._cover(samples, best, num_steps, max_positions):
                return parts
        # If rows of this count have other bits, use a larger count.
        return [best] if self._can_run(best) else self._choose(samples, rank, num_steps, max_positions)

    def _choose_best(self, samples: Sequence[RunningSample], rank: int) -> PlannedPart:
        """Return the cheapest part for all samples, unless it is known to give them other bits."""
        length = self._choose_length(samples[0].position)
        counts = (count for count in self._counts.all if count >= len(samples))
        parts = (PlannedPart.arrange(samples, count, length, rank) for count in counts)
        return next(
            part
            for part in parts
            if (self._compiler is not None and not self._counts.is_compared(part.count, *part.kind))
            or self._counts.is_used(part.count, *part.kind)
        )

    def _cover(
        self, samples: Sequence[RunningSample], best: PlannedPart, num_steps: int, max_positions: int
    ) -> list[PlannedPart]:
        """Return compiled parts, unless they cost more than the best part by a whole compilation."""
        smallest = self._counts.all[0]
        shapes = [shape for shape in sorted(self._shapes) if shape[0] == smallest or math.prod(shape) <= max_positions]
        parts = cover(samples, best.rank, shapes, self._choose_length, self._can_run)
        return parts if _count_extra_cost(parts, best, num_steps) < self._compilation_cost else []

    def _can_run(self, part: PlannedPart) -> bool:
        """Return whether the program is compiled and rows have the bits of the largest row count."""
        return not self._list_missing(part) and self._counts.is_used(part.count, *part.kind)

    def _list_missing(self, part: PlannedPart) -> list[PlannedPart]:
        """Return parts whose programs must be compiled before this one can run."""
        needed = [part]
        if not self._counts.is_compared(part.count, *part.kind):
            needed = [*(part.make_compared(count) for count in (self._counts.all[-1], part.count)), part]
        return [other for other in needed if not self._is_compiled(other)]

    def _is_compiled(self, part: PlannedPart) -> bool:
        assert self._compiler is not None
        return part.key in self._called or part.key in self._compiler.ready

    def _queue(self, part: PlannedPart) -> None:
        """Compile the program of a part in the background."""
        assert self._compiler is not None
        self._shapes.add((part.count, part.length))
        self._compiler.queue_needed(part.key, partial(self._make_program, part))


def _count_extra_cost(parts: Iterable[PlannedPart], best: PlannedPart, num_steps: int) -> float:
    return (sum(part.cost for part in parts) - best.cost) * num_steps
