"""Pack the examples of one request into micro-batches of a few shapes, and unpack the results.

A micro-batch has one row on a single device, and one row per shard of the batch on a mesh. A row
holds examples one after another, for example three examples of 300, 200 and 500 tokens in a row of
1024. The start positions of the examples are an input array, so one compiled program serves all
rows of the same length. Only the last row of a request has much padding.

A micro-batch never mixes requests, and its shape depends only on the request's examples. So a
request runs the same programs regardless of other requests, and results are batch-invariant.

If examples begin alike, a row can have their common beginning once, see `shared_prefixes`.

Legend: B rows, T positions, K targets per position, C config columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from skyrl_tx.backends.jax.shapes import next_power_of_two
from skyrl_tx.backends.jax.train.forward_backward import LOSS_INPUTS, NUM_COLUMNS, MicroBatch, get_loss_number
from skyrl_tx.backends.jax.train.shared_prefixes import PrefixGroup, find_prefix_groups, make_records, pack_rows
from skyrl_tx.contract.arrays import MAX_CELLS, Float32Array, NumberArray
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.results import MeanTerm, PassResult
from skyrl_tx.layers.attention import KeyRange
from skyrl_tx.losses import LOSSES, MEANS, LossOutput

MIN_ROW_LENGTH = 64
"""The shortest row. For fewer tokens, padding takes less time than another compilation."""
_LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT = 8, 128
"""Between two powers of two there are 8 row lengths, at least 128 tokens apart.

For example 2048, 2304, 2560 and so on up to 4096. So at most an eighth of a long row is padding.
Up to 1024 tokens, lengths that are closer together would not pay off: each length needs one more
compilation, which costs more time than dozens of requests gain from less padding.
"""
NUM_REMAINDER_LENGTHS = 4
"""How many different lengths the last row can have, if a request has more than one micro-batch.

The number of tokens in the last row is arbitrary. If the last row could have every length that
other rows can have, nearly every early request of a training run would compile a new program.
"""
_MIN_SAVED_SHARE = 1 / 8
"""Prefixes are shared if at least this share of all positions, padding included, is saved.

Rows with shared prefixes have their own programs, which the first request has to wait for.
"""
_STATE_SHARE = 1 / 16
"""If a model has recurrent layers, rows with shared prefixes are shorter by this fraction.

The states at the ends of the prefixes take memory. At equal length, a row of 1,024 positions took
1 % more than without shared prefixes (8 layers, hidden size 512).
"""


@dataclass(frozen=True, slots=True)
class ExampleSpans:
    """The positions of an example in a micro-batch."""

    index: int
    """The index of the example in the request."""
    row: int
    shared: slice
    """The positions of its shared prefix, which may be empty."""
    own: slice
    """The positions of the rest."""
    num_sharers: int
    """How many examples have the prefix."""

    @property
    def num_shared(self) -> int:
        """The number of positions of the shared prefix."""
        return self.shared.stop - self.shared.start

    def read(self, x: Any) -> NumberArray:
        """Return the example's part of an array [B, T, ...]."""
        own = x[self.row, self.own]
        return np.concatenate([x[self.row, self.shared], own]) if self.num_shared else own


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The shape of one micro-batch, and where its examples are."""

    examples: tuple[ExampleSpans, ...]
    num_rows: int
    length: int
    num_targets: int

    @property
    def members(self) -> tuple[int, ...]:
        """The index in the request of each example."""
        return tuple(spans.index for spans in self.examples)

    @property
    def num_tokens(self) -> int:
        """The number of positions in all rows, padding included."""
        return self.num_rows * self.length

    @property
    def has_prefixes(self) -> bool:
        """Whether examples share a prefix."""
        return any(spans.num_shared for spans in self.examples)

    @property
    def num_shared_tokens(self) -> int:
        """The number of tokens that are not computed, because another example has them."""
        return sum(number for _, number in self.count_shared_tokens())

    def count_shared_tokens(self) -> Iterator[tuple[int, int]]:
        """Yield the index of each example, and how many of its tokens are not computed for it."""
        computed = set[int]()
        for spans in self.examples:
            yield spans.index, spans.num_shared if spans.shared.start in computed else 0
            computed.add(spans.shared.start)


def round_up_row_length(size: int) -> int:
    """Return the padded length of a row that holds `size` tokens."""
    if size <= MIN_ROW_LENGTH:
        return MIN_ROW_LENGTH
    step = max(next_power_of_two(size) // 2 // _LENGTHS_PER_OCTAVE, _MIN_LENGTH_INCREMENT)
    return -(-size // step) * step


def choose_row_budget(budget: int, num_targets: int, num_rows: int) -> int:
    """Return the largest row length up to `budget` at which a micro-batch has at most MAX_CELLS cells.

    A cell is one target of one position: 4 rows of 100 positions with 8 targets have 3200 cells.
    """
    return max(1, min(budget, MAX_CELLS // (num_targets * num_rows)))


def leave_room_for_states(budget: int) -> int:
    """Return the largest length of a row with shared prefixes if layers keep states for them."""
    return budget - int(budget * _STATE_SHARE)


def choose_micro_batch_length(size: int, budget: int) -> int:
    """Return the padded length of a row that holds `size` tokens, within a budget.

    The length is `round_up_row_length(size)`, but at most `budget` if `size` fits into it, and
    otherwise at most the next power of two. The second limit matters if the budget is below
    MIN_ROW_LENGTH because examples have many targets: with budget 8, a size of 12 gives 16, not 64.
    """
    return min(round_up_row_length(size), budget if size <= budget else next_power_of_two(size))


def choose_remainder_length(size: int, budget: int) -> int:
    """Return the padded length of the last row of a request with more than one micro-batch."""
    part = -(-budget // NUM_REMAINDER_LENGTHS)
    return choose_micro_batch_length(min(-(-size // part) * part, budget) if size <= budget else size, budget)


def plan_micro_batches(
    examples: Sequence[PassExample],
    budget: int,
    num_rows: int = 1,
    multiple: int = 1,
    *,
    shares_prefixes: bool = False,
    keeps_states: bool = False,
) -> list[MicroBatchPlan]:
    """Plan the micro-batches of one request.

    All examples of a micro-batch have the same loss config, and the same number of targets after
    rounding up to a power of two.

    Args:
        examples: The examples of the request.
        budget: Maximum tokens of a micro-batch. A longer example gets its own micro-batch.
            Examples with many targets per position get smaller micro-batches (see MAX_CELLS),
            because the inputs and results of the loss take memory for each target.
        num_rows: Rows of a micro-batch: the number of shards of the batch.
        multiple: Row lengths are rounded up to a multiple of this number, even above the budget.
            It is the number of shards of a row's tokens.
        shares_prefixes: Whether examples that begin alike may share their prefix, where that saves
            enough. It needs micro-batches of one row.
        keeps_states: Whether layers keep states for shared prefixes, which take memory.
    """
    assert not shares_prefixes or num_rows == multiple == 1
    # Group the examples by number of targets and loss config, longest first.
    sizes = [example.tokens.size for example in examples]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in sorted(range(len(examples)), key=lambda i: (-sizes[i], i)):
        example = examples[index]
        group = (next_power_of_two(_count_targets(example)), *sorted(example.loss_config.items()))
        groups.setdefault(group, []).append(index)

    # Pack each group into rows, and rows into micro-batches.
    plans: list[MicroBatchPlan] = []
    for (num_targets, *_), order in groups.items():
        row_budget = choose_row_budget(budget // num_rows, num_targets, num_rows)
        make_plans = partial(_make_plans, sizes=sizes, num_rows=num_rows, num_targets=num_targets, multiple=multiple)
        rows = _balance(_first_fit(order, sizes, row_budget), order, sizes, row_budget, num_rows)
        chosen = make_plans([[PrefixGroup((index,), 0) for index in row] for row in rows], row_budget)

        if shares_prefixes and len(order) > 1 and (prefix_groups := _find_groups(examples, order, row_budget)):
            # Try two maximum lengths: the longest plain row, which takes no more memory, and the whole
            # budget, which may need less padding. The plan with fewer positions wins.
            limits = {min(max(plan.length for plan in chosen), row_budget), row_budget}
            limits = {leave_room_for_states(limit) if keeps_states else limit for limit in limits}
            choices = [
                make_plans([row.groups for row in pack_rows(prefix_groups, sizes, limit)], limit)
                for limit in sorted(limits)
            ]
            best = min(choices, key=_count_tokens)
            if _count_tokens(best) <= (1 - _MIN_SAVED_SHARE) * _count_tokens(chosen):
                chosen = best
        plans += chosen
    return plans


def _count_tokens(plans: Sequence[MicroBatchPlan]) -> int:
    """Return the number of positions, padding included."""
    return sum(plan.num_tokens for plan in plans)


def _find_groups(examples: Sequence[PassExample], order: Sequence[int], budget: int) -> list[PrefixGroup]:
    """Group the examples with the given indices by common prefix. All other examples are groups of one.

    Returns nothing if no prefix is shared. An example that is longer than the budget shares nothing.
    """
    candidates = [index for index in order if examples[index].tokens.size <= budget]
    found = find_prefix_groups([make_records(examples[index]) for index in candidates])
    groups = [PrefixGroup(tuple(candidates[i] for i in group.members), group.length) for group in found]
    grouped = {index for group in groups for index in group.members}
    return [*groups, *(PrefixGroup((index,), 0) for index in order if index not in grouped)] if groups else []


def _first_fit(order: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    """Return rows of example indices.

    Each example is added to the first row in which it fits, longest first. This is "first fit
    decreasing" (Johnson 1974), which needs at most 11/9 of the minimum number of rows.
    """
    rows: list[list[int]] = []
    totals: list[int] = []
    for index in order:
        row = next((row for row, total in enumerate(totals) if total + sizes[index] <= budget), len(rows))
        if row == len(rows):
            rows.append([])
            totals.append(0)
        rows[row].append(index)
        totals[row] += sizes[index]
    return rows


def _balance(rows: list[list[int]], order: list[int], sizes: list[int], budget: int, num_rows: int) -> list[list[int]]:
    """Distribute the examples evenly over a multiple of `num_rows` rows.

    Returns `rows` unchanged if a balanced row would exceed the budget. The rows of a micro-batch
    are computed at the same time, so the fullest row determines the time. Each example is added to
    the emptiest row, longest first ("longest processing time", Graham 1969).
    """
    if num_rows == 1:
        return rows
    totals = [0] * (-(-len(rows) // num_rows) * num_rows)
    balanced: list[list[int]] = [[] for _ in totals]
    for index in order:
        row = totals.index(min(totals))
        balanced[row].append(index)
        totals[row] += sizes[index]
    return balanced if max(totals) <= max(budget, sizes[order[0]]) else rows


def _make_plans(
    rows: Sequence[Sequence[PrefixGroup]],
    budget: int,
    *,
    sizes: Sequence[int],
    num_rows: int,
    num_targets: int,
    multiple: int,
) -> list[MicroBatchPlan]:
    """Return the plans of micro-batches of `num_rows` of the given rows, whose groups share their prefixes."""
    plans: list[MicroBatchPlan] = []
    for first in range(0, len(rows), num_rows):
        spans, fullest = list[ExampleSpans](), 0
        for row, groups in enumerate(rows[first : first + num_rows]):
            # Place each prefix, then the rest of its examples.
            position = 0
            for group in groups:
                shared = slice(position, position + group.length)
                position = shared.stop
                for index in group.members:
                    own = slice(position, position + sizes[index] - group.length)
                    spans.append(ExampleSpans(index, row, shared, own, len(group.members)))
                    position = own.stop
            fullest = max(fullest, position)

        is_remainder = num_rows == 1 and 0 < first == len(rows) - 1
        choose_length = choose_remainder_length if is_remainder else choose_micro_batch_length
        length = -(-choose_length(fullest, budget) // multiple) * multiple
        plans.append(MicroBatchPlan(tuple(spans), num_rows, length, num_targets))
    return plans


def make_empty_micro_batch(
    num_rows: int, length: int, num_targets: int, *, is_local: bool, has_prefixes: bool = False
) -> MicroBatch:
    """Return a micro-batch of the given shape without examples: zeros, loss number 0, and no prefix."""
    B, T, K = num_rows, length, num_targets
    prefix: Any = None
    if has_prefixes:
        prefix = KeyRange(np.full((B, T), T, np.int32), np.zeros((B, T), np.int32))  # type: ignore[arg-type]
    shape = (B, T) if K == 1 else (B, T, K)

    return MicroBatch(
        loss=np.int32(0),
        tokens_BT=np.zeros((B, T), np.int32),
        start_BT=np.zeros((B, T), np.int32),
        num_uses_BT=np.zeros((B, T), np.int32),
        targets=np.zeros(shape, np.int32),
        inputs={name: np.zeros(shape, np.float32) for name in LOSS_INPUTS},
        config_BC=np.zeros((B, NUM_COLUMNS), np.float32),
        is_local=is_local,
        prefix=prefix,
    )


def fill_micro_batch(plan: MicroBatchPlan, examples: Sequence[PassExample]) -> MicroBatch:
    """Return a micro-batch with the planned examples of a request."""
    first = examples[plan.examples[0].index]
    loss = LOSSES[first.loss]
    batch = make_empty_micro_batch(
        plan.num_rows, plan.length, plan.num_targets, is_local=loss.is_local, has_prefixes=plan.has_prefixes
    )
    for spans in plan.examples:
        example, row, num_shared = examples[spans.index], spans.row, spans.num_shared
        assert example.loss == loss.spec.name, "the examples of a request share its loss"

        # Copy the example to its place. At a shared position, the weights of all its examples are added.
        for span, part in ((spans.shared, slice(0, num_shared)), (spans.own, slice(num_shared, None))):
            batch.tokens_BT[row, span] = example.tokens[part]
            batch.start_BT[row, span] = span.start
            batch.num_uses_BT[row, span] += 1
            _copy_array(batch.targets[row, span], example.loss_inputs[TARGET_TOKENS][part])
            for name in loss.spec.inputs.keys() - {TARGET_TOKENS}:
                adds = name == "weights" and span is spans.shared
                _copy_array(batch.inputs[name][row, span], example.loss_inputs[name][part], adds=adds)
        batch.start_BT[row, spans.own.stop :] = spans.own.stop  # the next example overwrites this, if there is one

        # The rest of the example attends to its prefix.
        if batch.prefix is not None and num_shared:
            batch.prefix.start_BT[row, spans.own] = spans.shared.start
            batch.prefix.end_BT[row, spans.own] = spans.shared.stop
    batch.config_BC[:, : len(loss.columns)] = [first.loss_config[column] for column in loss.columns]
    return replace(batch, loss=get_loss_number(loss.spec.name, batch.targets.ndim))


def read_results(
    plan: MicroBatchPlan, examples: Sequence[PassExample], logprobs: Float32Array, loss: LossOutput
) -> Iterator[tuple[int, PassResult]]:
    """Yield index and result of each planned example, from the outputs on the host."""
    is_policy_gradient = LOSSES[examples[plan.examples[0].index].loss].spec.is_policy_gradient
    for spans in plan.examples:
        index, row = spans.index, spans.row
        shape = examples[index].loss_inputs[TARGET_TOKENS].shape
        example_logprobs = spans.read(logprobs)[:, : 1 if len(shape) == 1 else shape[1]]
        count = _sum(spans.read(loss.count_BT))
        means = {name: MeanTerm(_sum(spans.read(loss.totals[name])), count) for name in MEANS}
        # The loss of a shared position is the sum over the examples, which are equal there.
        shared_loss = _sum(loss.loss_BT[row, spans.shared]) / spans.num_sharers
        result = PassResult(
            logprobs=example_logprobs.reshape(shape).copy(),  # a view would keep the whole micro-batch in memory
            sums={"loss": _sum(loss.loss_BT[row, spans.own]) + shared_loss},
            means=means if is_policy_gradient else {},
        )
        yield index, result


def _sum(x: Any) -> float:
    return float(np.sum(x, dtype=np.float64))


def _count_targets(example: PassExample) -> int:
    targets = example.loss_inputs[TARGET_TOKENS]
    return 1 if targets.ndim == 1 else targets.shape[1]


def _copy_array(destination: NumberArray, array: NumberArray, *, adds: bool = False) -> None:
    """Copy or add an array [T] or [T, K] to a destination [T], or to the first K columns of [T, K']."""
    if destination.ndim == 1:
        array = array.reshape(array.shape[0])
    else:
        destination = destination[:, : array.shape[1]]
    destination[:] = destination + array if adds else array
