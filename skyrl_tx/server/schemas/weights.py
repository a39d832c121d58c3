"""Schemas for saves, loads, checkpoints, training runs, and uploads of external weights.

The schemas for uploads and for searching checkpoints are *unverified*: they follow the reference
pages of SDK 0.39 and 0.40, and neither release could be tested yet.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from skyrl_tx.server.schemas.base import (
    Int,
    List,
    ModelRequestIds,
    Name,
    Response,
    SeqId,
    Table,
    TextMetadata,
    WireModel,
    parse_version,
)
from skyrl_tx.server.schemas.service import SearchOwner
from skyrl_tx.server.schemas.training import LoraConfig, OptimizerConfig

_FIRST_WITH_HEADERS = 0, 40


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


class ExternalWeightsUploadStartRequest(WireModel):
    """Starts an upload of an adapter for a base model."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: Name | None = None


class ExternalWeightsUploadURL(Response):
    """A signed URL, and the headers that the PUT must send."""

    url: str
    headers: dict[str, str]


class ExternalWeightsUploadStartResponse(Response):
    """The signed URL of each file, which is uploaded with PUT before `expires`.

    SDK 0.40 and later read an object per file, and SDK 0.39 reads the URL alone.
    """

    upload_id: str
    urls: dict[str, str] | dict[str, ExternalWeightsUploadURL]
    expires: datetime

    @classmethod
    def create(
        cls, upload_id: str, urls: dict[str, str], expires: datetime, sdk_version: str
    ) -> "ExternalWeightsUploadStartResponse":
        """Create the response for a version of the SDK."""
        version = parse_version(sdk_version)
        if version is None or version < _FIRST_WITH_HEADERS:
            return cls(upload_id=upload_id, urls=urls, expires=expires)
        objects = {name: ExternalWeightsUploadURL(url=url, headers={}) for name, url in urls.items()}
        return cls(upload_id=upload_id, urls=objects, expires=expires)


class ExternalWeightsUploadFinishRequest(WireModel):
    """Turns the uploaded files into a checkpoint."""

    upload_id: str


class ExternalWeightsUploadFinishResponse(Response):
    """The path of the checkpoint."""

    tinker_path: str


class CheckpointSearchCursor(WireModel):
    """The last checkpoint of the previous page. On this server, its path is its `uuid`."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: str


class CheckpointSearchRequest(WireModel):
    """Search conditions, which must all hold. An empty list of base models matches nothing."""

    project_ids: Annotated[List[str], Field(max_length=1000)] | None = None
    user_metadata: Table[str] = Field(default_factory=dict[str, str])
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = Field(default_factory=SearchOwner)
    base_models: Annotated[List[str], Field(max_length=1000)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(Response):
    """A page of checkpoints. The last page has no cursor."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
