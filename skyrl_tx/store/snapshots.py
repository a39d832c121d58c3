"""Recovery snapshots: one a model, the newest."""

from sqlmodel import Session

from skyrl_tx.contract.ids import ArtifactId, ModelId
from skyrl_tx.store.tables import SnapshotRow


def put(tx: Session, model_id: ModelId, artifact_id: ArtifactId, effect_order: int, now: float) -> ArtifactId | None:
    """Replace a model's snapshot by a newer one; returns the artifact replaced.

    Raises ValueError for one that contains less than the present one.
    """
    row = get(tx, model_id)
    if row is None:
        tx.add(SnapshotRow(model_id=model_id, artifact_id=artifact_id, effect_order=effect_order, created_at=now))
        tx.flush()
        return None
    if effect_order < row.effect_order:
        raise ValueError(f"snapshot of {model_id} at effect {effect_order} is older than that at {row.effect_order}")
    replaced = row.artifact_id
    row.artifact_id, row.effect_order, row.created_at = artifact_id, effect_order, now
    tx.flush()
    return replaced


def get(tx: Session, model_id: ModelId) -> SnapshotRow | None:
    """Read a model's snapshot."""
    return tx.get(SnapshotRow, model_id)


def delete(tx: Session, model_id: ModelId) -> ArtifactId | None:
    """Forget a model's snapshot; returns its artifact."""
    row = get(tx, model_id)
    if row is None:
        return None
    tx.delete(row)
    tx.flush()
    return row.artifact_id
