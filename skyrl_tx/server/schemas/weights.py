"""Schemas for saves, loads, checkpoints and training runs."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, ModelRequestIds, Name, Response, SeqId, TextMetadata, WireModel
from skyrl_tx.server.schemas.training import OptimizerConfig


class SaveRequest(ModelRequestIds):
    """The name and the lifetime of saved weights."""

    path: str | None = None
    ttl_seconds: Int | None = None


class SaveWeightsRequest(SaveRequest):
    """Saves weights and optimizer state under a name."""

    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSamplerRequest(SaveRequest):
    """Saves weights to sample from, under a name or as an ephemeral sampler."""

    sampling_session_seq_id: SeqId | None = None
    kind: str = "snapshot"
    user_metadata: TextMetadata | None = None


class SaveWeightsExternalRequest(SaveRequest):
    """Saves weights for download. With recipients, every file is encrypted."""

    age_encryption_recipients: Annotated[List[str], Field(max_length=64)] | None = None


class LoadWeightsRequest(WireModel):
    """Loads a checkpoint into a model, or creates a model from it.

    A load has `model_id`, and a creation has `session_id` and `model_seq_id`.
    """

    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: str | None = None


class WeightsInfoRequest(WireModel):
    """Asks for a description of a checkpoint."""

    tinker_path: str


class WeightsInfoResponse(Response):
    """A description of the model that saved a checkpoint."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerConfig


class CopyWeightsRequest(WireModel):
    """Copies a checkpoint.

    The copy goes into a project, or into a new run of a session (`session_id` and `model_seq_id`).
    """

    source_path: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Int | None = None
    weights_access_token: str | None = None


class TtlRequest(WireModel):
    """Sets the lifetime of a checkpoint, counted from now. Null means unlimited."""

    ttl_seconds: Int | None


class ExternalWeightsUrlsResponse(Response):
    """Signed URLs of the files of external weights.

    They need no API key and are valid until `expires`.
    """

    urls: dict[str, str]
    expires: datetime


class Cursor(Response):
    """The position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Response):
    """A checkpoint as the management client shows it."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    base_model: str | None = None


class CheckpointsResponse(Response):
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Response):
    """A training run as the management client shows it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(Response):
    """A list of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor
