"""Database tables for curves, kept samples, and metrics that clients log.

The server does not need these rows to serve clients or to recover after a crash. They are deleted
after some time. Columns that end in `_at` hold seconds since the epoch.
"""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor and documents that it be assigned a string.

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from sqlalchemy import JSON, BigInteger, Dialect, Index, String, Text, TypeDecorator, UniqueConstraint
from sqlmodel import Field

from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store.tables import BIG_KEY, AppTable

PointKind = Literal["train", "forward", "step"]
LOSS_WEIGHT = "loss_weight:sum"
"""Name of the sum of the weights of a pass in `RunPointRow.values`.

Rows of releases before 0.3 do not have it.
"""


def encode_numbers(values: Mapping[str, float | None] | None) -> str:
    """Encode numbers by name as JSON. NaN and infinity become null."""
    return msgspec.json.encode(values).decode()


class NumbersText(TypeDecorator[Mapping[str, float | None]]):
    """A column for numbers by name, stored as JSON text.

    Much faster than SQLAlchemy's JSON type.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Mapping[str, float | None] | None, dialect: Dialect) -> Any:
        """Encode the value for the database."""
        return encode_numbers(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Mapping[str, float | None]:
        """Decode the value from the database."""
        return msgspec.json.decode(value)


class RunPointRow(AppTable, table=True):
    """The metrics and times of one completed request. Written in the transaction of its result."""

    __tablename__ = "run_points"
    __table_args__ = (Index("ix_run_points_model", "model_id", "position", "step"),)

    position: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """The position of the request. The request's own row may be deleted already."""
    model_id: ModelId = Field(sa_type=String)
    kind: PointKind = Field(sa_type=String)
    """`train` for forward_backward, `forward` for forward, `step` for optim_step."""
    step: int = Field(sa_type=BigInteger)
    """For a pass, the number of optimizer steps before it.

    For an optimizer step, its number, from 1.
    """
    created_at: float
    """When the request arrived."""
    started_at: float
    """When the request first reached the device in the attempt that completed it."""
    at: float
    """When the request completed."""
    device_s: float = 0.0
    """Device time of the request in seconds.

    Requests that share a batch are charged in proportion to their tokens.
    """
    tokens: int = Field(default=0, sa_type=BigInteger)
    datums: int = 0
    values: Mapping[str, float | None] = Field(default_factory=dict, sa_type=NumbersText)
    """The metrics in the result, for example `loss:sum`, and of a pass also `LOSS_WEIGHT`.

    None stands for NaN or infinity.
    """


class KeptSampleRow(AppTable, table=True):
    """One sampled sequence that people can read in the console. Arrays are little-endian."""

    __tablename__ = "kept_samples"
    __table_args__ = (Index("ix_kept_samples_model", "model_id", "step"), Index("ix_kept_samples_at", "at"))

    sequence_id: str = Field(primary_key=True)
    request_id: RequestId = Field(index=True, sa_type=String)
    """The request that sampled the sequence. All samples of a request are one group."""
    sample_index: int
    """Index of the sample in its group."""
    model_id: str
    """The model whose weights were sampled, or empty for base weights."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps in the sampled weights, if known."""
    owner: str
    """The owner of the request. Only the owner and admins can read the sample."""
    at: float
    num_bytes: int
    """Size of the arrays.

    This column is before the arrays, so that SQLite can read it without reading the arrays.
    """
    stop_reason: str
    trained_model_id: str | None = None
    """The model of the last pass that trained on the sequence, if any."""
    trained_step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps of this model before that pass."""
    advantage: float | None = None
    """Mean advantage of the sampled tokens, in the last pass that trained on the sequence."""
    kl: float | None = None
    """Mean of the log-probability from sampling minus the log-probability from that pass."""
    trainer_gap: float | None = None
    """Mean absolute difference to the trainer's log-probabilities at the same weights, if known."""
    prompt: bytes
    """int32 [prompt length] in the first sample of a group, empty in all following samples."""
    tokens: bytes
    """int32 [completion length]."""
    logprobs: bytes
    """float32 [completion length]."""


class SampledStepRow(AppTable, table=True):
    """Sums over all samples of an owner from the weights of one optimizer step."""

    __tablename__ = "sampled_steps"

    model_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Number of optimizer steps in the sampled weights."""
    owner: str = Field(primary_key=True)
    samples: int = Field(default=0, sa_type=BigInteger)
    cut: int = Field(default=0, sa_type=BigInteger)
    """Number of samples that reached `max_tokens` or the context limit."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    """Number of sampled tokens."""
    scored_tokens: int = Field(default=0, sa_type=BigInteger)
    """Number of tokens that were sampled at a temperature of at least 0.5.

    Only these count for the curve `surprise`, the mean -log p of sampled tokens.
    """
    logprob_sum: float = 0.0
    """Sum of the log-probabilities of the scored tokens."""


class LoggedRunRow(AppTable, table=True):
    """A run of a client's logger, for example of trackio."""

    __tablename__ = "logged_runs"
    __table_args__ = (UniqueConstraint("owner", "project", "key"), {"sqlite_autoincrement": True})

    logged_run_id: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    owner: str
    project: str
    """The logger's project.

    Empty or the session's project for metrics that were logged without a logger.
    """
    key: str
    """Distinguishes runs of one name: the logger's run id, or the id of the model or session."""
    name: str
    config: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    model_id: str | None = Field(default=None, index=True)
    """The model that the run belongs to, once it is known."""
    seeks_model: bool = False
    """Whether the server still looks for the model.

    False once it was found, or if there were multiple candidates.
    """
    num_points: int = 0
    num_bytes: int = Field(default=0, sa_type=BigInteger)
    """Size of the values of all points, as JSON."""
    created_at: float
    last_at: float = Field(index=True)


class LoggedPointRow(AppTable, table=True):
    """Metrics that a client logged for one step."""

    __tablename__ = "logged_points"
    __table_args__ = (
        UniqueConstraint("logged_run_id", "log_id"),
        Index("ix_logged_points_run", "logged_run_id", "position"),
        {"sqlite_autoincrement": True},  # positions are never reused: readers keep them as cursors
    )

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of arrival."""
    logged_run_id: int = Field(sa_type=BigInteger)
    log_id: str
    """Chosen by the client. A point with the same id is a retry."""
    step: int = Field(sa_type=BigInteger)
    at: float
    values: Mapping[str, float | None] = Field(sa_type=JSON)
