"""Artifacts: immutable, hashed directories of weight files, in a local directory or in an object store."""

from skyrl_tx.artifacts.base import ArtifactStore, Identity, artifact_id_for
from skyrl_tx.artifacts.files import (
    Artifact,
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactsUnreachable,
    FileHash,
    hash_file,
    open_artifact,
    recorded_files,
)
from skyrl_tx.artifacts.local import LocalArtifacts
from skyrl_tx.artifacts.place import PlaceRefused, checked_url, open_artifacts, open_bucket, recorded_url

__all__ = [
    "Artifact",
    "ArtifactCorrupt",
    "ArtifactMissing",
    "ArtifactStore",
    "ArtifactsUnreachable",
    "FileHash",
    "Identity",
    "LocalArtifacts",
    "PlaceRefused",
    "artifact_id_for",
    "checked_url",
    "hash_file",
    "open_artifact",
    "open_artifacts",
    "open_bucket",
    "recorded_files",
    "recorded_url",
]
