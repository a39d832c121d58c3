"""Schemas of custom losses: a traced graph as plain data (tinker/types/custom_loss_graph.py)."""

from typing import Annotated

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, Name, SeqId, Table, WireModel

MAX_NODES = 512
"""The most nodes of a graph."""
_MAX_ARGUMENTS = 64


class LossGraphNode(WireModel):
    """A node of the graph; `args` and `kwargs` are in the SDK's encoding."""

    changes_maths = True
    op: Name
    name: Name
    target: Name
    args: Annotated[list[object], Field(max_length=_MAX_ARGUMENTS)] = Field(default_factory=list[object])
    kwargs: Table[object] = Field(default_factory=dict[str, object])


class LossGraph(WireModel):
    """The nodes of a loss in the order of execution."""

    changes_maths = True
    format: Int = 1
    nodes: Annotated[List[LossGraphNode], Field(max_length=MAX_NODES)]


class LossInput(WireModel):
    """An input: its name, and its number of dimensions in each datum."""

    changes_maths = True
    name: Name
    rank: Int


class CreateCustomLossRequest(WireModel):
    """A custom loss to store for a session."""

    changes_maths = True
    session_id: str
    custom_loss_seq_id: SeqId
    name: Name
    inputs: Annotated[List[LossInput], Field(max_length=_MAX_ARGUMENTS)]
    graph: LossGraph
    type: str | None = None
