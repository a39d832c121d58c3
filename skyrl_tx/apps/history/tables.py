"""The tables of curves, kept samples, and metrics that clients log.

Nothing here is needed to serve or to recover: rows have a retention, and clients see no difference without them.
Columns that end in `_scale_to_temperature` hold seconds since the epoch.
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


def encode_numbers(values: Mapping[str, float | None] | None) -> str:
    """Return numbers by name as JSON; those that are not finite become null."""
    return msgspec.json.encode(values).decode()


class NumbersText(TypeDecorator[Mapping[str, float | None]]):
    """Numbers by name as JSON text, which takes a fraction of the time of a JSON column. Not finite: null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Mapping[str, float | None] | None, dialect: Dialect) -> Any:
        """Encode."""
        return encode_numbers(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Mapping[str, float | None]:
        """Decode."""
        return msgspec.json.decode(value)


class RunPointRow(AppTable, table=True):
    """The effect of one completed request on its model; written in the transaction of the result."""

    __tablename__ = "run_points"
    __table_args__ = (Index("ix_run_points_model", "model_id", "position", "step"),)

    position: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """The position of the request, whose row may be gone."""
    model_id: ModelId = Field(sa_type=String)
    kind: PointKind = Field(sa_type=String)
    """`train` for forward_backward, `forward`, or `step` for optim_step."""
    step: int = Field(sa_type=BigInteger)
    """The model's optimizer steps before the request; for an optim_step its own number, from 1."""
    created_at: float
    """When the request arrived."""
    started_at: float
    """When the request first reached the device in the attempt that completed it."""
    at: float
    """When the request was completed."""
    device_s: float = 0.0
    """Seconds of the device that the request took: of a shared step, its share by tokens."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    datums: int = 0
    values: Mapping[str, float | None] = Field(default_factory=dict, sa_type=NumbersText)
    """The metrics as the client got them, such as `loss:sum`; None for NaN and infinity."""


class KeptSampleRow(AppTable, table=True):
    """One sampled sequence that is kept for people to read; arrays are little-endian."""

    __tablename__ = "kept_samples"
    __table_args__ = (Index("ix_kept_samples_model", "model_id", "step"), Index("ix_kept_samples_at", "at"))

    sequence_id: str = Field(primary_key=True)
    request_id: RequestId = Field(index=True, sa_type=String)
    """The request of its group: samples of one prompt."""
    sample_index: int
    """Its place in the group."""
    model_id: str
    """The model whose weights were sampled; empty for base weights."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Optimizer steps of the model in the weights that were sampled, if known."""
    owner: str
    """The owner of the request, who alone may read it, with admins."""
    at: float
    num_bytes: int
    """Size of the arrays. It precedes them, so that SQLite reads it without them."""
    stop_reason: str
    trained_model_id: str | None = None
    trained_step: int | None = Field(default=None, sa_type=BigInteger)
    advantage: float | None = None
    """Mean advantage of the sampled tokens, in the last pass that trained on the sequence."""
    kl: float | None = None
    """Mean difference between the sampled and the trained log-probability of the sampled tokens, in that pass."""
    trainer_gap: float | None = None
    """Mean absolute difference from the trainer's log-probabilities with the same weights, if they were compared."""
    prompt: bytes
    """int32 [prompt length] for the first sample of the group; empty for the others."""
    tokens: bytes
    """int32 [completion length]."""
    logprobs: bytes
    """float32 [completion length]."""


class SampledStepRow(AppTable, table=True):
    """Sums over the samples that an owner drew from the weights of one optimizer step."""

    __tablename__ = "sampled_steps"

    model_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Optimizer steps of the model in the weights that were sampled."""
    owner: str = Field(primary_key=True)
    samples: int = Field(default=0, sa_type=BigInteger)
    cut: int = Field(default=0, sa_type=BigInteger)
    """Samples that ended at `max_tokens` or at the context limit."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    """Sampled tokens."""
    scored_tokens: int = Field(default=0, sa_type=BigInteger)
    """Those among them that were drawn at a temperature at which their probabilities say how certain the model is."""
    logprob_sum: float = 0.0
    """Sum of the log-probabilities of the scored tokens."""


class LoggedRunRow(AppTable, table=True):
    """A run as the client's own logger names it."""

    __tablename__ = "logged_runs"
    __table_args__ = (UniqueConstraint("owner", "project", "key"), {"sqlite_autoincrement": True})

    logged_run_id: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    owner: str
    project: str
    """The logger's project; empty for metrics that name their model or session themselves."""
    key: str
    """An id that tells runs of one name apart: the logger's own id, or the id of the model or session."""
    name: str
    config: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    model_id: str | None = Field(default=None, index=True)
    """The model that the run trains, once it is known."""
    seeks_model: bool = False
    """Whether later metrics may still find the model; False once there was a choice between several."""
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
    """Chosen by the client: a repeated one is a retry."""
    step: int = Field(sa_type=BigInteger)
    at: float
    values: Mapping[str, float | None] = Field(sa_type=JSON)
