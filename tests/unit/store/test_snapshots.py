import pytest

from skyrl_tx.contract.ids import ArtifactId, ModelId
from skyrl_tx.store import snapshots
from skyrl_tx.store.database import Store

MODEL = ModelId("run")


def put(store: Store, artifact: str, effect_order: int) -> ArtifactId | None:
    return store.write(lambda tx: snapshots.put(tx, MODEL, ArtifactId(artifact), effect_order, float(effect_order)))


def test_the_newest_snapshot_replaces_the_one_before(store: Store) -> None:
    assert store.read(lambda tx: snapshots.get(tx, MODEL)) is None
    assert put(store, "art-1", 3) is None
    assert put(store, "art-2", 5) == "art-1"
    row = store.read(lambda tx: snapshots.get(tx, MODEL))
    assert (row.artifact_id, row.effect_order, row.created_at) == ("art-2", 5, 5.0)


def test_a_snapshot_never_goes_back(store: Store) -> None:
    put(store, "art-1", 3)
    with pytest.raises(ValueError, match="effect 2 is older than that at 3"):
        put(store, "art-0", 2)
    assert store.read(lambda tx: snapshots.get(tx, MODEL)).artifact_id == "art-1"


def test_a_snapshot_is_forgotten_once(store: Store) -> None:
    put(store, "art-1", 3)
    assert store.write(lambda tx: snapshots.delete(tx, MODEL)) == "art-1"
    assert store.write(lambda tx: snapshots.delete(tx, MODEL)) is None
