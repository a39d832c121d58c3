from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.console.checkpoints import Node, count_freed_bytes, draw_lineage
from skyrl_tx.contract.ids import ArtifactId, ModelId
from skyrl_tx.store.tables import CheckpointRow


def checkpoint(artifact: str, size: int, name: str = "a") -> CheckpointRow:
    return CheckpointRow(
        model_id=ModelId("m"),
        kind="weights",  # pyright: ignore
        name=name,
        artifact_id=ArtifactId(artifact),
        created_at=1.0,
        size_bytes=size,
    )


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.sets(st.sampled_from("abcd")))
def test_a_deletion_frees_what_nothing_else_uses(artifacts: list[str], used_elsewhere: set[str]) -> None:
    selected = [checkpoint(name, 10 ** "abcd".index(name)) for name in artifacts]
    references = Counter(artifacts) + Counter(used_elsewhere)
    expected = sum(10 ** "abcd".index(name) for name in set(artifacts) - used_elsewhere)
    assert count_freed_bytes(selected, references) == expected


def test_lineage_is_a_tree() -> None:
    run = Node("run", "r", "r")
    tree = draw_lineage("Qwen", [run], checkpoint("a", 1), ["session-12345678:train:1"], ["tinker://m/weights/copy"])
    assert [line.depth for line in tree] == [0, 1, 2, 3, 3] and tree[2].node.is_current
    assert [line.node.kind for line in tree] == ["base", "run", "checkpoint", "run", "copy"] and tree[1].node == run
