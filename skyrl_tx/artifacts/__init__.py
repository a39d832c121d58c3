"""Artifacts: immutable, hashed directories of weight files, in a local directory or in an object store."""

from skyrl_tx.artifacts.base import ArtifactStore, Identity, artifact_id_for
from skyrl_tx.artifacts.files import (
    Artifact,
    ArtifactCorrupt,
    ArtifactMissing,
    FileHash,
    hash_file,
    open_artifact,
    recorded_files,
)
from skyrl_tx.artifacts.local import LocalArtifacts

__all__ = [
    "Artifact",
    "ArtifactCorrupt",
    "ArtifactMissing",
    "ArtifactStore",
    "FileHash",
    "Identity",
    "LocalArtifacts",
    "artifact_id_for",
    "hash_file",
    "open_artifact",
    "recorded_files",
]
