"""Find examples of a request that begin alike, so that their common beginning is computed once.

For example, the 16 samples of one prompt in reinforcement learning begin with the prompt, and the
two examples of a preference pair do. Such examples are a *prefix group*. Their row has the prefix
once, then the rest of each example, its *suffix*. A suffix attends to the prefix and to itself.

An example is a sequence of *records*, one per position: its token, targets and loss inputs. Examples
share positions only as long as their records are equal. So a shared position has the same
log-probability, loss and metrics in each of them. The last token of a prompt is usually not shared,
because its target is the first token of the answer.

Everything here depends on the examples alone, so sharing is batch-invariant.

Legend: T positions, R numbers of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from skyrl_tx.contract.arrays import Int32Array
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.losses import LOSSES

SHARING_VERSION = "1"
"""Names in the fingerprint how prefixes are found and packed. Increase it if results change."""
MIN_PREFIX = 32
"""The shortest prefix that is shared. For less, it does not pay to choose other rows."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Examples that share their first `length` positions."""

    members: tuple[int, ...]
    """The indices of at least two examples."""
    length: int


def make_records(example: PassExample) -> Int32Array:
    """Return the records of the positions that an example may share, int32 [T, R].

    Floats are compared by their bits, except that -0.0 equals 0.0. If a loss is not local, it adds up
    numbers over a sequence. Then only positions at the beginning that add nothing may be shared.
    """
    targets = example.loss_inputs[TARGET_TOKENS]
    length = example.tokens.size
    floats = {name: array + np.float32(0) for name, array in example.loss_inputs.items() if name != TARGET_TOKENS}
    columns = [array.reshape(length, -1).view(np.int32) for _, array in sorted(floats.items())]
    records = np.concatenate([example.tokens[:, None], targets.reshape(length, -1), *columns], axis=1)

    if not LOSSES[example.loss].is_local:
        factors = [array != 0 for name, array in floats.items() if name not in ("weights", "logprobs")]
        adds_T = np.any(factors, axis=0)
        records = records[: int(np.argmax(adds_T)) if adds_T.any() else length]
    return records


def find_prefix_groups(records: Sequence[Int32Array], min_length: int = MIN_PREFIX) -> list[PrefixGroup]:
    """Return disjoint groups of sequences of records [T, R] that share a prefix.

    A group of n members with a prefix of length L saves (n - 1) * L positions. Sequences can begin
    alike in many ways, for example all with a system prompt, and some of them with a question. Each
    sequence is a member of at most one group. All sequences with a prefix are one group, or the
    sequences that share longer prefixes have their own groups, whichever saves more.
    """
    # Sort the sequences, so that sequences with a common prefix are neighbours.
    keys = [array.astype(">i4").tobytes() for array in records]
    order = sorted(range(len(keys)), key=lambda index: (keys[index], index))
    common = [_count_equal_records(records[a], records[b]) for a, b in pairwise(order)]

    # Visit the tree of all prefixes, where each node has the prefixes that continue it as children.
    # The stack is the path from the root to the current node.
    path = [_Node(0, 0)]
    for index, length in enumerate((*common, -1)):
        # Leave all nodes with a longer prefix.
        done: _Node | None = None
        first = index
        while path and path[-1].length > length:
            done = path.pop()
            done.choose(order, index, min_length)
            first = done.first
            if path and path[-1].length >= length:
                path[-1].add(done)
                done = None

        # Enter the node of this length.
        if not path or path[-1].length < length:
            path.append(_Node(length, first))
        if done is not None:
            path[-1].add(done)
    return path[-1].groups


@dataclass(slots=True)
class _Node:
    """A prefix of consecutive sorted sequences, and the best groups among them."""

    length: int
    first: int
    """The first of the sequences with this prefix."""
    saved: int = 0
    groups: list[PrefixGroup] = field(default_factory=list[PrefixGroup])

    def add(self, child: "_Node") -> None:
        """Add the best groups of a longer prefix."""
        self.saved += child.saved
        self.groups = self.groups + child.groups if self.groups else child.groups

    def choose(self, order: Sequence[int], last: int, min_length: int) -> None:
        """Share this prefix among all its sequences, or among the sequences without a longer prefix."""
        if self.length < max(min_length, 1):
            return

        # Compare both choices.
        everyone = order[self.first : last + 1]
        num_others = len(everyone) - sum(len(group.members) for group in self.groups)
        saved_by_others = self.length * max(num_others - 1, 0)
        saved = self.length * (len(everyone) - 1)

        # Take the better one.
        if saved > self.saved + saved_by_others:
            self.saved, self.groups = saved, [PrefixGroup(tuple(sorted(everyone)), self.length)]
        elif saved_by_others:
            grouped = {index for group in self.groups for index in group.members}
            others = [index for index in everyone if index not in grouped]
            self.saved += saved_by_others
            self.groups = [*self.groups, PrefixGroup(tuple(sorted(others)), self.length)]


def _count_equal_records(x_TR: Int32Array, y_TR: Int32Array) -> int:
    """Return how many records two sequences have in common at their beginning."""
    length = min(len(x_TR), len(y_TR))
    if x_TR.shape[1] != y_TR.shape[1]:
        return 0
    differs_T = (x_TR[:length] != y_TR[:length]).any(axis=1)
    return int(np.argmax(differs_T)) if differs_T.any() else length


@dataclass(slots=True)
class Row:
    """A row of a micro-batch: prefix groups, and single examples as groups without a prefix."""

    groups: list[PrefixGroup] = field(default_factory=list[PrefixGroup])
    size: int = 0
    """The number of positions."""


def pack_rows(groups: Sequence[PrefixGroup], sizes: Sequence[int], budget: int) -> list[Row]:
    """Return rows of at most `budget` positions with all examples of the given groups.

    A group is added to the first row in which it fits, largest first. A group that fits in no row
    starts a new row. If it has more suffixes than fit there, the rest is another group with the same
    prefix. `sizes` has the length of each example, by its index. An example that is longer
    than the budget has its own row.
    """

    def count(group: PrefixGroup) -> int:
        return group.length + sum(sizes[index] - group.length for index in group.members)

    rows: list[Row] = []
    for group in sorted(groups, key=lambda group: (-count(group), group.members)):
        rest = tuple(sorted(group.members, key=lambda index: (-sizes[index], index)))
        while rest:
            part = PrefixGroup(rest, group.length)
            row = next((row for row in rows if row.size + count(part) <= budget), None)

            # Fill a new row.
            if row is None:
                rows.append(row := Row())
                num_fitting = len(rest)
                while num_fitting > 1 and count(PrefixGroup(rest[:num_fitting], group.length)) > budget:
                    num_fitting -= 1
                part = PrefixGroup(rest[:num_fitting], group.length)

            # A single example needs no shared prefix.
            part = part if len(part.members) > 1 else PrefixGroup(part.members, 0)
            row.groups.append(part)
            row.size += count(part)
            rest = rest[len(part.members) :]
    return rows
