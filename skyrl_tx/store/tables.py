"""The rows. Times are seconds since the epoch, UTC, in columns that end in `_at`.

Every session has an owner; everything else reaches its owner through a session.
"""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor and documents that it be assigned a string.

from collections.abc import Mapping
from typing import Literal

from sqlalchemy import JSON, BigInteger, Index, Integer, String, text
from sqlmodel import Field, SQLModel

from skyrl_tx.contract.ids import (
    ArtifactId,
    CheckpointKind,
    CheckpointPath,
    ModelId,
    RequestId,
    SamplerId,
    SamplingSessionId,
    SessionId,
)

ModelStatus = Literal["creating", "ready", "failed", "unloaded", "left", "expired"]
RequestStatus = Literal["open", "done", "failed"]
EngineStatus = Literal["starting", "ready", "stopping"]
KeyScope = Literal["user", "admin"]

_BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only in a column named INTEGER
_JSON_OR_NULL = JSON(none_as_null=True)


def _partial(name: str, column: str, where: str) -> Index:
    """An index of some rows only; each kind of database is told so in its own words."""
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


class SessionRow(SQLModel, table=True):
    """One client process, as it announced itself."""

    __tablename__ = "sessions"

    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str = Field(index=True)
    project_id: str | None = None
    display_name: str | None = None
    tags: list[str] = Field(default_factory=list, sa_type=JSON)
    user_metadata: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    sdk_version: str | None = None
    created_at: float
    last_heartbeat_at: float
    finished_at: float | None = None
    finish_reason: str | None = None


class ModelRow(SQLModel, table=True):
    """One adapter in training: a training run. `spec` is a `ModelSpec` in the codec's bytes."""

    __tablename__ = "models"

    model_id: ModelId = Field(primary_key=True, sa_type=String)
    session_id: SessionId = Field(foreign_key="sessions.session_id", index=True, sa_type=String)
    base_model: str
    spec: bytes
    user_metadata: Mapping[str, str] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    status: ModelStatus = Field(default="creating", sa_type=String)
    created_at: float
    last_request_at: float
    effect_order: int = 0
    """The number of the last effect committed; the first is 1."""
    poisoned_by: str | None = None
    """Why the gradient being summed is incomplete; the next optim_step fails with it."""
    base_model_hash: str | None = None
    """Of the base weights that it is trained on, once it is made."""


class RequestRow(SQLModel, table=True):
    """A future: what was asked, and once known, the answer. Together the engine's write-ahead log."""

    __tablename__ = "requests"
    __table_args__ = (
        _partial("ix_requests_open", "position", "status = 'open'"),
        Index("ix_requests_model_effect", "model_id", "effect_order"),
        _partial("ix_requests_loads", "position", "kind = 'load_weights'"),
        _partial("ix_requests_prunable", "fetched_at", "result IS NOT NULL"),
        _partial("ix_requests_pruned", "fetched_at", "result IS NULL AND status <> 'open'"),
        Index("ix_requests_answers", "answer_order"),
        Index("ix_requests_sampling_session_answers", "sampling_session_id", "answer_order"),
        {"sqlite_autoincrement": True},  # a position is never given twice: readers keep it as a cursor
    )

    position: int | None = Field(default=None, primary_key=True, sa_type=_BIG)
    """Order of arrival."""
    request_id: RequestId = Field(unique=True, sa_type=String)
    kind: str
    owner: str
    session_id: SessionId = Field(foreign_key="sessions.session_id", sa_type=String)
    model_id: ModelId | None = Field(default=None, sa_type=String)
    seq_id: int | None = Field(default=None, sa_type=BigInteger)
    sampling_session_id: SamplingSessionId | None = Field(default=None, sa_type=String)
    body: bytes
    digest: bytes
    status: RequestStatus = Field(default="open", sa_type=String)
    effect_order: int | None = None
    attempts: int = 0
    result: bytes | None = None
    """None while open, and again once pruned."""
    body_crc: int | None = Field(default=None, sa_type=BigInteger)
    """CRC-32 of `body`; None in rows of releases that kept none."""
    result_crc: int | None = Field(default=None, sa_type=BigInteger)
    created_at: float
    completed_at: float | None = None
    fetched_at: float | None = None
    answer_order: int | None = Field(default=None, sa_type=BigInteger)
    """Order of answers, as they were committed: what was read up to one of them is never added to."""


class PrunedRow(SQLModel, table=True):
    """Up to which number the requests of a model, or of one client of a sampling session, are forgotten."""

    __tablename__ = "pruned"

    numbered_by: str = Field(primary_key=True)
    """See `pruning.numbered_by`."""
    up_to: int = Field(sa_type=BigInteger)


class AnswerCounterRow(SQLModel, table=True):
    """How many answers were given; one row, so that those who answer take turns until they have committed."""

    __tablename__ = "answer_counter"

    id: int = Field(default=1, primary_key=True)
    value: int = Field(default=0, sa_type=BigInteger)


class CancellationRow(SQLModel, table=True):
    """A sample that was answered because its client wants it no more, until the engine has heard of it."""

    __tablename__ = "cancellations"
    __table_args__ = {"sqlite_autoincrement": True}

    position: int | None = Field(default=None, primary_key=True, sa_type=_BIG)
    request_id: RequestId = Field(sa_type=String)


class SamplingSessionRow(SQLModel, table=True):
    """What a client samples from: the base model, a checkpoint, or an unnamed save of `model_id`."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: SamplingSessionId = Field(primary_key=True, sa_type=String)
    session_id: SessionId = Field(foreign_key="sessions.session_id", index=True, sa_type=String)
    base_model: str
    model_path: str | None = None
    sampler_id: SamplerId | None = Field(default=None, sa_type=String)
    model_id: ModelId | None = Field(default=None, index=True, sa_type=String)
    created_at: float
    last_used_at: float
    request_id: RequestId | None = Field(default=None, sa_type=String)
    size_bytes: int | None = Field(default=None, sa_type=BigInteger)
    """Of an unnamed save's files, once they are written."""
    is_inflight: bool = False
    """Whether it follows its model: each in-flight save gives it new weights."""
    num_clones: int = 0
    """Copies of the client, in other processes, that number their requests apart."""


class CheckpointRow(SQLModel, table=True):
    """A name for an artifact: `tinker://{model_id}/{kind}/{name}`."""

    __tablename__ = "checkpoints"

    model_id: ModelId = Field(primary_key=True, sa_type=String)
    kind: CheckpointKind = Field(primary_key=True, sa_type=String)
    name: str = Field(primary_key=True)
    artifact_id: ArtifactId = Field(sa_type=String)
    created_at: float
    expires_at: float | None = Field(default=None, index=True)
    size_bytes: int = Field(sa_type=BigInteger)
    public: bool = False
    user_metadata: Mapping[str, str] | None = Field(default=None, sa_type=_JSON_OR_NULL)

    @property
    def path(self) -> CheckpointPath:
        """Where clients find it."""
        return CheckpointPath(self.model_id, CheckpointKind(self.kind), self.name)


class SnapshotRow(SQLModel, table=True):
    """What a model is restored from after a crash: it contains the effects up to `effect_order`."""

    __tablename__ = "snapshots"

    model_id: ModelId = Field(primary_key=True, sa_type=String)
    artifact_id: ArtifactId = Field(sa_type=String)
    effect_order: int
    created_at: float


class StabilityRow(SQLModel, table=True):
    """What the sampler recorded of one sequence: `logprobs` are little-endian float32, one per drawn token."""

    __tablename__ = "stability"

    sequence_id: str = Field(primary_key=True)
    owner: str
    prompt_length: int
    logprobs: bytes
    last_used_at: float = Field(index=True)


class ApiKeyRow(SQLModel, table=True):
    """A key that callers show. Only its digest is kept; `hint` is its beginning, for people."""

    __tablename__ = "api_keys"
    __table_args__ = {"sqlite_autoincrement": True}  # tokens name keys by number: none may ever mean another

    key_id: int | None = Field(default=None, primary_key=True)
    digest: str = Field(unique=True)
    hint: str
    owner: str
    scope: KeyScope = Field(sa_type=String)
    name: str
    note: str = ""
    created_at: float
    revoked_at: float | None = None


class EngineStateRow(SQLModel, table=True):
    """What the engine says of itself, about once a second; one row."""

    __tablename__ = "engine_state"

    id: int = Field(default=1, primary_key=True)
    boot_id: str
    pid: int
    status: EngineStatus = Field(sa_type=String)
    capabilities: Mapping[str, object] = Field(sa_type=JSON)
    base_models: list[str] = Field(sa_type=JSON)
    load: Mapping[str, int] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """`SampleLoad` of `engine_state`, as JSON; None while the engine starts."""
    detail: str = ""
    updated_at: float
