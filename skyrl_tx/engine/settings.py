"""What the engine process is told."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class EngineSettings(BaseModel):
    """Settings of the engine process; the command line composes them with the other components'."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path = Field(description="directory of the database and all weights")
    database_url: SecretStr | None = Field(
        default=None,
        description="database, if not a file in --data-dir: postgresql://user:password@host/name; a password is better "
        "given by the environment",
    )
    base_model: str = Field(description="hub id or local directory of the model that is served")
    served_model_name: str | None = Field(
        default=None, description="name that clients use; default: base_model as given"
    )
    hole_wait_s: float = Field(
        default=10.0, ge=0, description="how long a training pass waits for one that comes before it"
    )
    training_steps_per_turn: int = Field(
        default=1, ge=1, description="micro-batches or other training work between two turns of sampling, at most"
    )
    decode_slices_per_turn: int = Field(
        default=1, ge=1, description="decoding slices between two turns of training, at most"
    )
    snapshot_interval_s: float = Field(
        default=60.0, ge=0, description="how often a model in training is kept for recovery"
    )
    snapshot_effects: int = Field(
        default=100, ge=1, description="keep a model for recovery after so many steps at the latest"
    )
    snapshot_max_share: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="the part of the time that snapshots for the number of steps may take; fast steps get fewer",
    )
    max_backlog_bytes: int = Field(
        default=2**31,
        ge=1,
        description="requests held in memory; of more passes only that they wait, until their turn is near",
    )
    max_waiting_sample_bytes: int = Field(
        default=2**30,
        ge=1,
        description="memory for samples that wait, about 4 KiB and 4 bytes a prompt token each; clients are told to "
        "send more later",
    )
    max_attempts: int = Field(default=3, ge=1, description="a request that ended the engine so many times fails")
    session_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="models of a client silent so long leave the device; they return when asked for",
    )
    session_retention_s: float = Field(
        default=7 * 86_400.0, gt=0, description="how long models of a silent or finished session can be had again"
    )
    sampler_retention_s: float = Field(
        default=86_400.0, gt=0, description="how long an unnamed sampler is kept unused, if four newer ones exist"
    )
    max_unnamed_sampler_bytes: int = Field(
        default=32 * 2**30, ge=0, description="disk space for unnamed samplers; each model's newest is kept in any case"
    )
    max_unwritten_samplers: int = Field(
        default=8, ge=1, description="unnamed samplers in memory that wait to be written; a model that makes more waits"
    )
    result_retention_s: float = Field(
        default=600.0, ge=0, description="how long a result is kept after it was fetched, or its session finished"
    )
    request_retention_s: float = Field(
        default=3600.0,
        ge=0,
        description="how long after that it is known that a request was made; later its number is refused",
    )
    housekeeping_interval_s: float = Field(
        default=60.0, gt=0, description="how often what nobody needs any more is removed"
    )

    @property
    def base_models(self) -> list[str]:
        """The names that clients may ask for, the public one first."""
        return list(dict.fromkeys(name for name in (self.served_model_name, self.base_model) if name))

    @property
    def store_url(self) -> str | None:
        """The database's URL, with its secrets."""
        return None if self.database_url is None else self.database_url.get_secret_value()
