"""Checkpoint metadata in the manifests of artifacts, to restore lost database rows, and imported runs.

The engine writes the metadata with each artifact. Later changes are stored in the database only,
for example a new time to live, publication, a copy of the checkpoint or another owner. A restored
checkpoint is never public.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from sqlmodel import Session, col, select

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract import codec, ids
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, ModelId, SessionId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.contract.state_files import CONFIG_FILE
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import ApiKeyRow, CheckpointRow, ModelRow

_RECOVER = "skyrl-tx recover"
_GROUPS = {
    "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "train_mlp": {"gate_proj", "up_proj", "down_proj"},
    "train_unembed": {"lm_head", "unembed_tokens", "embed_tokens"},
}
"""Target modules of each `LoraSpec` field, for manifests of early releases, which have no spec."""
_SPEC_DECODER = msgspec.json.Decoder(ModelSpec)


class Unrecoverable(Exception):
    """A manifest lacks a value that a database row needs. The message names the value."""


def make_run_metadata(
    *, model_id: ModelId, owner: str, base_model: str, spec: ModelSpec, now: float, step: int | None = None
) -> dict[str, str]:
    """Return the metadata of an artifact that a checkpoint may refer to.

    `step` is the number of optimizer steps at the save, or None if the caller does not know it.
    """
    steps = {} if step is None else {"step": str(step)}
    return {
        **steps,
        "model_id": model_id,
        "owner": owner,
        "base_model": base_model,
        "spec": msgspec.json.encode(spec).decode(),
        "saved_at": repr(now),
    }


def make_checkpoint_metadata(
    *, kind: str, name: str, expires_at: float | None, user_metadata: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the metadata that a checkpoint has in addition to `make_run_metadata`."""
    metadata = {"kind": kind, "name": name}
    if expires_at is not None:
        metadata["expires_at"] = repr(expires_at)
    if user_metadata is not None:
        metadata["user_metadata"] = json.dumps(dict(user_metadata))
    return metadata


def is_ephemeral(artifact: Artifact) -> bool:
    """Return whether an artifact is an ephemeral sampler, which is saved without a name."""
    return artifact.metadata.get("kind") == CheckpointKind.SAMPLER and "base_model" not in artifact.metadata


def get_save_time(artifact: Artifact) -> float:
    """Return when an artifact was written, in seconds since the epoch.

    Artifacts without a recorded time use the modification time of their manifest.
    """
    recorded = artifact.metadata.get("saved_at")
    return float(recorded) if recorded else (artifact.path / "manifest.json").stat().st_mtime


def restore_rows(tx: Session, artifact: Artifact, now: float) -> CheckpointPath:
    """Store a checkpoint row for an artifact and return the checkpoint's path.

    Creates the training run and its session if they are missing. A recovery snapshot becomes the
    training checkpoint `snapshot-N`, where N is its log sequence number. If another artifact
    already has the name, the start of the artifact id is appended to it. Raises Unrecoverable.
    """
    metadata = artifact.metadata
    model = _restore_run(tx, artifact, now)

    # Choose a free name.
    part_of_id = artifact.artifact_id.removeprefix("art-")[:8]
    if "effect_order" in metadata:
        kind, name = CheckpointKind.TRAINING, f"snapshot-{metadata['effect_order']}"
    else:
        kind, name = _parse_kind(metadata), metadata.get("name") or f"recovered-{part_of_id}"
    present = tx.get(CheckpointRow, (model.model_id, kind, name))
    if present is not None and present.artifact_id != artifact.artifact_id:
        name = f"{name[:100]}-{part_of_id}"
        present = tx.get(CheckpointRow, (model.model_id, kind, name))
    if present is not None:
        return present.path

    expires_at = float(metadata["expires_at"]) if "expires_at" in metadata else None
    row = CheckpointRow(
        model_id=model.model_id,
        kind=kind,
        name=name,
        artifact_id=artifact.artifact_id,
        created_at=get_save_time(artifact),
        expires_at=expires_at if expires_at is not None and expires_at > now else None,
        size_bytes=artifact.size_bytes,
        user_metadata=json.loads(metadata["user_metadata"]) if "user_metadata" in metadata else None,
        step=_parse_step(metadata),
    )
    checkpoints.put(tx, row, overwrite=False)
    tx.flush()
    return row.path


def _parse_step(metadata: Mapping[str, str]) -> int | None:
    """Return the number of optimizer steps at the save, or None for artifacts of early releases."""
    return int(metadata["step"]) if metadata.get("step", "").isdecimal() else None


def _parse_kind(metadata: Mapping[str, str]) -> CheckpointKind:
    try:
        return CheckpointKind(metadata.get("kind", ""))
    except ValueError:
        raise Unrecoverable("its manifest does not say what kind of checkpoint it is") from None


def _restore_run(tx: Session, artifact: Artifact, now: float) -> ModelRow:
    """Return the training run of an artifact. A missing run is created with status `unloaded`."""
    metadata = artifact.metadata
    model_id = ModelId(metadata["model_id"]) if "model_id" in metadata else None
    if model_id is not None and (present := models.get(tx, model_id)) is not None:
        if present.user_metadata == {"created_by": _RECOVER}:  # artifacts are restored in any order
            present.num_steps = max(present.num_steps, _parse_step(metadata) or 0)
        return present

    # Read the base model and the spec, from the adapter's files if the manifest has none.
    config = _read_adapter_config(artifact)
    base_model = metadata.get("base_model") or config.get("base_model_name_or_path")
    if not base_model:
        raise Unrecoverable("neither its manifest nor its files name the base model")
    spec = _parse_spec(metadata, config)

    # Create the session and the run.
    session_id = None if model_id is None else SessionId(model_id.partition(":train:")[0])
    if session_id is None or sessions.get(tx, session_id) is None:
        owner = _choose_owner(tx, metadata.get("owner"))
        session_id = sessions.create(tx, owner=owner, tags=["recovered"], now=now, session_id=session_id)
        sessions.finish(tx, session_id, "recovered", now)
        tx.flush()

    row = _create_run(tx, model_id, session_id, str(base_model), spec, _RECOVER, get_save_time(artifact))
    row.base_model_hash, row.num_steps = metadata.get("base_model_hash"), _parse_step(metadata) or 0
    tx.flush()
    return row


def _create_run(
    tx: Session,
    model_id: ModelId | None,
    session_id: SessionId,
    base_model: str,
    spec: ModelSpec,
    created_by: str,
    created_at: float,
) -> ModelRow:
    """Create a run that is not loaded, by default the first one of its session."""
    row = ModelRow(
        model_id=model_id or ids.model_id(session_id, 0),
        session_id=session_id,
        base_model=base_model,
        spec=codec.encode(spec),
        user_metadata={"created_by": created_by},
        status="unloaded",
        created_at=created_at,
        last_request_at=created_at,
    )
    models.create(tx, row)
    return row


def _choose_owner(tx: Session, recorded: str | None) -> str:
    """Return the recorded owner, or the first admin if none is recorded.

    The first admin also gets data that was created while authentication was disabled. Without API
    keys such data belongs to `LOCAL_OWNER`.
    """
    if recorded not in (None, LOCAL_OWNER):
        return recorded
    admins = select(ApiKeyRow.owner).where(ApiKeyRow.scope == "admin").order_by(col(ApiKeyRow.key_id))
    return tx.exec(admins).first() or LOCAL_OWNER


def _read_adapter_config(artifact: Artifact) -> dict[str, Any]:
    try:
        config = json.loads((artifact.path / CONFIG_FILE).read_text())
    except (OSError, ValueError):  # for example because the files are encrypted
        return {}
    return cast(dict[str, Any], config) if isinstance(config, dict) else {}


def _parse_spec(metadata: Mapping[str, str], config: Mapping[str, Any]) -> ModelSpec:
    if "spec" in metadata:
        return _SPEC_DECODER.decode(metadata["spec"])
    rank, modules = config.get("r"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(modules, list):
        raise Unrecoverable("neither its manifest nor its files describe the LoRA adapter")
    present = {str(module).rpartition(".")[2] for module in cast(list[object], modules)}
    is_known = any(present & group for group in _GROUPS.values())
    trained = {field: bool(present & group) or not is_known for field, group in _GROUPS.items()}
    return ModelSpec(lora=LoraSpec(rank=rank, seed=0, **trained))


def import_run(
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
    run = _create_run(tx, None, session_id, base_model, spec, created_by, now)

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
