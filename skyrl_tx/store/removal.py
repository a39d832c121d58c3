"""Removing a run and all that belongs to it; the files go once nothing points at them."""

from sqlalchemy import delete
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import pruning, samplers
from skyrl_tx.store.tables import CheckpointRow, ModelRow, RequestRow, SamplingSessionRow, SnapshotRow


def remove_run(tx: Session, model_id: ModelId) -> None:
    """Forget a run that no engine has in its memory: its checkpoints, requests and unnamed samplers go with it.

    Raises LookupError if there is none, ValueError while it is ready or being made: unload it first.
    """
    row = tx.get(ModelRow, model_id)
    if row is None:
        raise LookupError(f"no run {model_id!r}")
    if row.status in ("creating", "ready"):
        raise ValueError(f"run {model_id} is {row.status}")
    pruning.forget_marks(tx, [f"model/{model_id}"])
    pruning.forget_sample_marks(tx, samplers.ids_of_model(tx, model_id))
    for table in (CheckpointRow, SnapshotRow, RequestRow, SamplingSessionRow):
        tx.connection().execute(delete(table).where(col(table.model_id) == model_id))
    tx.delete(row)
    tx.flush()
