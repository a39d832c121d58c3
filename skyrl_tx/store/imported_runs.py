"""Runs whose weights come from outside: they were never trained here and are not loaded."""

from collections.abc import Sequence

from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, model_id
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.tables import CheckpointRow, ModelRow


def create(
    tx: Session,
    artifact: Artifact,
    *,
    session_id: SessionId,
    owner: str,
    base_model: str,
    spec: ModelSpec,
    kinds: Sequence[CheckpointKind],
    name: str,
    created_by: str,
    now: float,
    project_id: str | None = None,
    key_id: int | None = None,
) -> list[CheckpointPath]:
    """Store a finished session with one run, and a checkpoint of each kind that shares one artifact.

    Returns the paths of the checkpoints.
    """
    sessions.create(
        tx, owner=owner, tags=["import"], now=now, session_id=session_id, project_id=project_id, key_id=key_id
    )
    sessions.finish(tx, session_id, "success", now)
    run = ModelRow(
        model_id=model_id(session_id, 0),
        session_id=session_id,
        base_model=base_model,
        spec=codec.encode(spec),
        user_metadata={"created_by": created_by},
        status="unloaded",
        created_at=now,
        last_request_at=now,
    )
    models.create(tx, run)

    # The checkpoints.
    paths = [CheckpointPath(run.model_id, kind, name) for kind in kinds]
    for path in paths:
        row = CheckpointRow(
            model_id=run.model_id,
            kind=path.kind,
            name=name,
            artifact_id=artifact.artifact_id,
            created_at=now,
            size_bytes=artifact.size_bytes,
        )
        checkpoints.put(tx, row, overwrite=False)
    return paths
