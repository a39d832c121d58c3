"""View models of checkpoints: what a deletion frees, and where weights come from."""

from collections.abc import Mapping, Sequence

from skyrl_tx.apps.console.format import short_id
from skyrl_tx.apps.console.lineage import Line, Node, lines
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.store.tables import CheckpointRow


def freed_bytes(selected: Sequence[CheckpointRow], references: Mapping[str, int]) -> int:
    """Return the bytes of the artifacts that nothing but the selected checkpoints uses."""
    uses: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for row in selected:
        uses[row.artifact_id] = uses.get(row.artifact_id, 0) + 1
        sizes[row.artifact_id] = row.size_bytes
    return sum(size for name, size in sizes.items() if uses[name] >= references.get(name, 0))


def checkpoint_node(path: str, *, is_visible: bool, is_current: bool = False, is_copy: bool = False) -> Node:
    """Return the node of a checkpoint; one that the visitor may not see has no link and shows no owner."""
    if not is_visible:
        return Node("hidden", "", "a checkpoint that is gone, or of another owner")
    try:
        parsed = CheckpointPath.parse(path)
    except UserError:
        return Node("hidden", "", path)
    return Node("copy" if is_copy else "checkpoint", path, parsed.checkpoint_id, is_current)


def run_node(model_id: str, *, is_current: bool = False) -> Node:
    """Return the node of a run."""
    return Node("run", model_id, short_id(model_id), is_current)


def checkpoint_lineage(
    base_model: str,
    ancestors: Sequence[Node],
    current: CheckpointRow,
    runs: Sequence[str],
    copies: Sequence[str],
) -> list[Line]:
    """Return the lineage of a checkpoint: base model, earlier runs and checkpoints, itself, what was made of it."""
    node = checkpoint_node(str(current.path), is_visible=True, is_current=True)
    children = [run_node(model_id) for model_id in runs]
    children += [checkpoint_node(path, is_visible=True, is_copy=True) for path in copies]
    return lines([Node("base", "", base_model), *ancestors], node, children)
