"""Artifacts are immutable directories of weight files with a hash for each file.

They are stored in the data directory or in an object store, for example S3.
"""

from skyrl_tx.artifacts.base import ArtifactStore, Identity, make_artifact_id
from skyrl_tx.artifacts.files import (
    Artifact,
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactsUnreachable,
    FileHash,
    hash_file,
    open_artifact,
    read_file_hashes,
)
from skyrl_tx.artifacts.local import LocalArtifacts
from skyrl_tx.artifacts.location import InvalidLocation, normalize_url, open_artifacts, open_bucket, read_recorded_url

__all__ = [
    "Artifact",
    "ArtifactCorrupt",
    "ArtifactMissing",
    "ArtifactStore",
    "ArtifactsUnreachable",
    "FileHash",
    "Identity",
    "InvalidLocation",
    "LocalArtifacts",
    "hash_file",
    "make_artifact_id",
    "normalize_url",
    "open_artifact",
    "open_artifacts",
    "open_bucket",
    "read_file_hashes",
    "read_recorded_url",
]
