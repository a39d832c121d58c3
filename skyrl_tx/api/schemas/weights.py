"""Keeping weights and taking them up again."""

from datetime import datetime
from typing import Literal

from skyrl_tx.api.schemas.base import Answer, Int, SeqId, WireModel
from skyrl_tx.api.schemas.training import OptimizerAnswer, OptimizerConfig


class SaveWeightsRequest(WireModel):
    """Keep weights and optimizer under a name."""

    model_id: str
    path: str | None = None
    seq_id: SeqId | None = None
    ttl_seconds: Int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str | None = None


class SaveWeightsForSamplerRequest(WireModel):
    """Keep weights to sample from, under a name or as a sampling session."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: str = "snapshot"
    seq_id: SeqId | None = None
    ttl_seconds: Int | None = None
    user_metadata: dict[str, str] | None = None
    type: str | None = None


class SaveWeightsExternalRequest(WireModel):
    """Keep weights for download, each file encrypted if there are recipients."""

    model_id: str
    path: str | None = None
    seq_id: SeqId | None = None
    ttl_seconds: Int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str | None = None


class LoadWeightsRequest(WireModel):
    """Put a checkpoint into a model (`model_id`), or make a model from it (`session_id`, `model_seq_id`)."""

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
    """A question about a checkpoint."""

    tinker_path: str


class WeightsInfoAnswer(Answer):
    """What SDKs up to 0.36 build the model from before they load a checkpoint into it."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerAnswer


class CopyWeightsRequest(WireModel):
    """Have a checkpoint again: in a project, or as a model of a session (`session_id`, `model_seq_id`)."""

    source_path: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: str | None = None
    ttl_seconds: Int | None = None
    weights_access_token: str | None = None


class CopyWeightsAnswer(Answer):
    """Where the copy is."""

    tinker_path: str


class TtlRequest(WireModel):
    """A new lifetime for a checkpoint from now on; null: for ever."""

    ttl_seconds: Int | None


class ExternalWeightsUrlsAnswer(Answer):
    """Where each file of external weights can be had, without a key, until `expires`."""

    urls: dict[str, str]
    expires: datetime


class Cursor(Answer):
    """A place in a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Answer):
    """A saved set of weights."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointsAnswer(Answer):
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Answer):
    """A model as the management client sees it."""

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


class TrainingRunsAnswer(Answer):
    """A list of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor
