"""Samples run in programs that are compiled, and the programs that fit best are compiled in the background."""

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import pytest

from skyrl_tx.backends.jax.compiler import CompiledProgram, Program
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, RunningSample
from skyrl_tx.backends.jax.sample.slice_parts import MAX_PARTS, PlannedPart, SliceDivider, cover, group_by_length
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts
from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.contract.logit_adjuster import LogitAdjuster
from skyrl_tx.contract.requests import SamplingControls
from tests.support.sample_requests import make_prompt, make_request

MAX_POSITIONS = 1 << 20


def make_samples(*positions: int, adapter: int = 0, **controls: float) -> list[RunningSample]:
    """Return samples at these positions, the longest first."""
    params = {"controls": SamplingControls(**controls)} if controls else {}
    requests = (make_request("a", make_prompt(position), **params) for position in sorted(positions, reverse=True))
    return [
        RunningSample(
            request=request,
            index=index,
            stops=frozenset(),
            adapter=adapter,
            adjuster=LogitAdjuster.make(request, frozenset(), 300),
        )
        for index, request in enumerate(requests)
    ]


def choose_length(position: int) -> int:
    return max(next_power_of_two(position), 128)


def lengths(most: int, *sizes: int) -> list[list[int]]:
    """Return the positions of the samples of each group.

    Groups have 2, 8 or 16 rows, and read lengths are powers of 2.
    """
    running = make_samples(*sizes)
    groups = group_by_length(running, [2, 8, 16], next_power_of_two, most)
    return [[sample.position for sample in group] for group in groups]


def test_samples_are_read_together_if_the_memory_is_large_enough():
    assert lengths(16 * 64, 50, 3, 9, *[5] * 8) == [[50, 9, *[5] * 8, 3]]
    assert lengths(16 * 64, *[40] * 16) == [[40] * 16]
    assert lengths(16 * 64, *[40] * 17) == [[40] * 16, [40]]


def test_a_long_sample_is_read_with_few_others():
    assert lengths(16 * 64, 500, 3, 60, *[20] * 8) == [[500, 60], [*[20] * 8, 3]]
    assert lengths(16 * 64, 5000, 3) == [[5000, 3]], "the fewest rows may read more"
    assert lengths(16 * 64, 5000, 4000, 3000, 100, 90, 80) == [[5000, 4000], [3000, 100], [90, 80]]


def describe(parts: Sequence[PlannedPart]) -> list[tuple[int, int, int]]:
    """Return number of samples, row count and KV read length of each part."""
    return [(part.num_samples, part.count, part.length) for part in parts]


@pytest.mark.parametrize(
    ("positions", "shapes", "expected"),
    [
        ([40], [(2, 128), (16, 128), (2, 512)], [(1, 2, 128)]),
        ([40] * 3, [(2, 128), (16, 128), (16, 512)], [(3, 16, 128)]),
        ([300, 300, 40], [(2, 128), (2, 512), (16, 128)], [(2, 2, 512), (1, 2, 128)]),
        ([300, 300, 40], [(2, 512), (16, 1024)], [(3, 16, 1024)]),
        ([300] * 4, [(2, 512), (16, 128)], [(2, 2, 512), (2, 2, 512)]),
        ([300], [(16, 128)], []),
        ([300] * (2 * MAX_PARTS + 1), [(2, 512)], []),
    ],
)
def test_samples_are_divided_among_the_programs_that_can_run(
    positions: list[int], shapes: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert describe(cover(make_samples(*positions), 0, shapes, choose_length, lambda part: True)) == expected


def test_a_program_that_cannot_run_is_not_used() -> None:
    shapes = [(2, 128), (8, 128)]
    assert describe(cover(make_samples(40), 0, shapes, choose_length, lambda part: part.count == 8)) == [(1, 8, 128)]
    assert cover(make_samples(40), 0, shapes, choose_length, lambda part: False) == []


class FakeCompiler:
    """Compiles a program when a call waits for it, or when the test asks for it."""

    def __init__(self) -> None:
        self.ready: dict[Hashable, CompiledProgram] = {}
        self.queued: list[Hashable] = []
        self.waited: list[Hashable] = []

    def queue_needed(self, key: Hashable, program: Callable[[], Program], requester: Hashable = None) -> None:
        if key not in self.queued:
            self.queued.append(key)

    def wait_if_pending(self, key: Hashable) -> None:
        self.waited.append(key)
        self.compile()

    def compile(self) -> None:
        """Compile all queued programs."""
        self.ready |= {key: CompiledProgram(lambda *_: None) for key in self.queued}
        self.queued.clear()


def get_rank(slots: Iterable[int]) -> int:
    """Return a padded rank: 0 for the base model, 8 for slots below 10, and 32 above."""
    return max(0 if slot == BASE_SLOT else 8 if slot < 10 else 32 for slot in slots)


def make_divider(
    compiler: FakeCompiler | None, *, compilation_cost: float, different: int = 0, num_slots: int = 16
) -> SliceDivider:
    """Return a divider for row counts 2, 8 and 16. The count `different` gives rows other bits."""
    counts = RowCounts.for_single_cpu(num_slots, lambda count, *_: np.zeros(count) + (count == different))
    make_program = pytest.fail  # only the compiler makes programs
    return SliceDivider(counts, choose_length, get_rank, compiler, make_program, compilation_cost)  # type: ignore[arg-type]


def rows_key(count: int, length: int, rank: int = 0, name: str = "rows") -> Hashable:
    return name, count, max(count // 4, 2), rank, length


def test_the_first_slice_waits_for_one_program_and_later_ones_for_none() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=100)
    sample = make_samples(40)
    assert describe(divider.divide(sample, 1, MAX_POSITIONS)) == [(1, 16, 128)]
    assert compiler.waited == [rows_key(16, 128)]

    # Each step costs 17.5 rows more than with two rows.
    while not compiler.queued:
        assert describe(divider.divide(sample, 1, MAX_POSITIONS)) == [(1, 16, 128)]
    assert divider._extra_cost[rows_key(2, 128)] == 105
    assert compiler.queued == [rows_key(2, 128)]
    compiler.compile()
    assert describe(divider.divide(sample, 1, MAX_POSITIONS)) == [(1, 2, 128)]
    assert len(compiler.waited) == 1


def test_a_short_sample_beside_long_ones_waits_for_no_program() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=100)
    divider.divide(make_samples(40), 1, MAX_POSITIONS)
    assert describe(divider.divide(make_samples(300, 300), 1, MAX_POSITIONS)) == [(2, 2, 512)]
    waited = [rows_key(16, 128), rows_key(2, 128), rows_key(2, 512)]
    assert compiler.waited == waited, "two rows are compared with 16 rows, then used"

    assert describe(divider.divide(make_samples(300, 300, 40), 1, MAX_POSITIONS)) == [(2, 2, 512), (1, 2, 128)]
    assert compiler.waited == waited and compiler.queued == []


def test_samples_wait_if_other_programs_would_cost_more_than_the_compilation() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=10)
    assert describe(divider.divide(make_samples(40), 1, MAX_POSITIONS)) == [(1, 2, 128)]
    assert compiler.waited == [rows_key(16, 128), rows_key(2, 128)]


def test_a_slice_costs_as_much_as_its_steps() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=100)
    divider.divide(make_samples(40), 5, MAX_POSITIONS)
    assert describe(divider.divide(make_samples(40), 5, MAX_POSITIONS)) == [(1, 16, 128)]
    assert divider._extra_cost[rows_key(2, 128)] == 5 * 17.5
    assert describe(divider.divide(make_samples(40, adapter=1), 6, MAX_POSITIONS)) == [(1, 2, 128)]


def test_rows_with_other_bits_are_never_used() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=10, different=2)
    assert describe(divider.divide(make_samples(300), 1, MAX_POSITIONS)) == [(1, 8, 512)]
    assert rows_key(2, 512) in compiler.ready, "it was compiled to be compared"


def test_parts_read_no_more_than_the_memory_holds() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=1000, different=2)
    divider.record_call(PlannedPart.arrange(make_samples(300), 16, 512, 0))
    assert describe(divider.divide(make_samples(300, 300, 300), 1, 16 * 512)) == [(3, 16, 512)]
    assert describe(divider.divide(make_samples(300, 300, 300), 1, 8 * 512)) == [(3, 8, 512)]


def test_adapters_and_changed_logits_have_programs_of_their_own() -> None:
    compiler = FakeCompiler()
    divider = make_divider(compiler, compilation_cost=1000)
    divider.divide(make_samples(40), 1, MAX_POSITIONS)
    assert describe(divider.divide(make_samples(40, adapter=1), 1, MAX_POSITIONS)) == [(1, 16, 128)]
    assert describe(divider.divide(make_samples(40, presence_penalty=1.0), 1, MAX_POSITIONS)) == [(1, 16, 128)]
    adjusted = rows_key(16, 128, name="adjusted rows")
    assert compiler.waited == [rows_key(16, 128), rows_key(16, 128, 8), adjusted]


def test_without_a_compiler_the_best_program_runs() -> None:
    divider = make_divider(None, compilation_cost=1000)
    assert describe(divider.divide(make_samples(40, 40, 40), 1, MAX_POSITIONS)) == [(3, 8, 128)]


def test_a_part_has_adapters_of_one_padded_rank() -> None:
    """Otherwise the bits of a sample would depend on the ranks of other samples."""
    divider = make_divider(None, compilation_cost=1)
    small, large, base = make_samples(40, 50, adapter=1), make_samples(60, adapter=10), make_samples(30)
    found = divider.divide([*large, *small, *base], 16, MAX_POSITIONS)
    assert [(part.rank, part.num_samples) for part in found] == [(32, 1), (8, 3)]
    assert [(part.rank, part.num_samples) for part in divider.divide(base, 16, MAX_POSITIONS)] == [(0, 1)]
