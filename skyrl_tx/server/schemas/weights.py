"""Schemas of saves, loads, checkpoints and training runs."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, ModelRequestIds, Name, Response, SeqId, TextMetadata, WireModel
from skyrl_tx.server.schemas.training import OptimizerConfig


class SaveRequest(ModelRequestIds):
    """The name and the lifetime of what is saved."""

    path: str | None = None
    ttl_seconds: Int | None = None


class SaveWeightsRequest(SaveRequest):
    """A save of weights and optimizer under a name."""

    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSamplerRequest(SaveRequest):
    """A save of weights to sample from: under a name, or as an ephemeral sampler."""

    sampling_session_seq_id: SeqId | None = None
    kind: str = "snapshot"
    user_metadata: TextMetadata | None = None


class SaveWeightsExternalRequest(SaveRequest):
    """A save of weights for download; each file is encrypted if there are recipients."""

    age_encryption_recipients: Annotated[List[str], Field(max_length=64)] | None = None


class LoadWeightsRequest(WireModel):
    """A load into a model (`model_id`), or the creation of a model from a checkpoint (`session_id`, `model_seq_id`)."""

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
    """A request for a description of a checkpoint."""

    tinker_path: str


class WeightsInfoResponse(Response):
    """A description of a checkpoint's model."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerConfig


class CopyWeightsRequest(WireModel):
    """A copy of a checkpoint: into a project, or to a model of a session (`session_id`, `model_seq_id`)."""

    source_path: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Int | None = None
    weights_access_token: str | None = None


class TtlRequest(WireModel):
    """A new lifetime of a checkpoint from now on; null is unlimited."""

    ttl_seconds: Int | None


class ExternalWeightsUrlsResponse(Response):
    """Signed URLs of the files of external weights, which need no API key and are valid until `expires`."""

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


class CheckpointsResponse(Response):
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Response):
    """A model as the management client shows it."""

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
