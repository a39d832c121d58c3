"""The lineage of weights as a tree: the runs and checkpoints before them, and those made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NodeKind = Literal["base", "run", "checkpoint", "copy", "hidden"]


@dataclass(frozen=True, slots=True)
class Node:
    """A base model, a run or a checkpoint in a lineage. `path` is the id of the run or the path of the checkpoint."""

    kind: NodeKind
    path: str
    title: str
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A node with its depth in the tree, from 0."""

    depth: int
    node: Node


def lines(ancestors: Sequence[Node], current: Node, children: Sequence[Node]) -> list[Line]:
    """Return the tree as lines: ancestors, oldest first, then the node itself, then what was made of it."""
    path = [Line(depth, node) for depth, node in enumerate([*ancestors, current])]
    return path + [Line(len(path), child) for child in children]
