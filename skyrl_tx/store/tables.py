"""The database tables. Columns that end in `_at` hold seconds since the epoch.

Every session has an owner; other rows belong to an owner through their session.
"""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor and documents that it be assigned a string.

from collections.abc import Mapping
from typing import Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Index,
    Integer,
    MetaData,
    String,
    text,
)
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
EngineStatus = Literal["starting", "recovering", "ready", "stopping"]
KeyScope = Literal["admin", "user", "sample", "read", "metrics"]
SubjectKind = Literal["owner", "key", "project"]
OverQuota = Literal["wait", "fail"]
ProjectRole = Literal["viewer", "editor"]
ProcessName = Literal["api", "engine", "supervisor"]

BIG_KEY = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows automatically only in an INTEGER column
_JSON_OR_NULL = JSON(none_as_null=True)


def partial_index(name: str, column: str, where: str) -> Index:
    """Return a partial index, for both kinds of database."""
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


class AppTable(SQLModel):
    """Base class of the tables of optional features.

    Migrations create them in every database, whichever features a process has imported, so they are not among the
    tables of `SQLModel.metadata`.
    """

    metadata = MetaData()


class SessionRow(SQLModel, table=True):
    """A session of one client process, with the metadata it sent."""

    __tablename__ = "sessions"

    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str = Field(index=True)
    project_id: str | None = None
    display_name: str | None = None
    tags: list[str] = Field(default_factory=list, sa_type=JSON)
    user_metadata: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    sdk_version: str | None = None
    key_id: int | None = None
    """The API key that created the session; None without keys."""
    created_at: float
    last_heartbeat_at: float
    finished_at: float | None = None
    finish_reason: str | None = None


class ModelRow(SQLModel, table=True):
    """A training run: one adapter in training. `spec` is an encoded `ModelSpec`."""

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
    """Log sequence number of the last committed request; the first is 1."""
    poisoned_by: str | None = None
    """Why the accumulated gradient is incomplete; the next optim_step fails with this message."""
    base_model_hash: str | None = None
    """Hash of the base weights, once the model is created."""
    deleted_at: float | None = Field(default=None, index=True)
    """When the run was deleted; it can be restored for a while."""
    loaded_from: str | None = Field(default=None, index=True)
    """The checkpoint's `tinker://` path that the run began with or loaded last."""
    num_steps: int = Field(default=0, sa_type=BigInteger)
    """Optimizer steps since the run began."""
    engine: int = 1
    """Number of the engine that trains the model, the only one that writes its log."""


class RequestRow(SQLModel, table=True):
    """A future: a request, and later its result. These rows are also the engine's write-ahead log."""

    __tablename__ = "requests"
    __table_args__ = (
        partial_index("ix_requests_open", "position", "status = 'open'"),
        Index("ix_requests_model_effect", "model_id", "effect_order"),
        partial_index("ix_requests_loads", "position", "kind = 'load_weights'"),
        partial_index("ix_requests_prunable", "fetched_at", "result IS NOT NULL"),
        partial_index("ix_requests_pruned", "fetched_at", "result IS NULL AND status <> 'open'"),
        partial_index("ix_requests_alone", "position", "is_alone"),
        partial_index("ix_requests_failed", "position", "status = 'failed'"),
        Index("ix_requests_answers", "answer_order"),
        Index("ix_requests_sampling_session_answers", "sampling_session_id", "answer_order"),
        {"sqlite_autoincrement": True},  # positions are never reused: readers keep them as cursors
    )

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of arrival at its engine: a request that moves to another engine gets a new one."""
    request_id: RequestId = Field(unique=True, sa_type=String)
    kind: str
    owner: str
    session_id: SessionId = Field(foreign_key="sessions.session_id", index=True, sa_type=String)
    model_id: ModelId | None = Field(default=None, sa_type=String)
    seq_id: int | None = Field(default=None, sa_type=BigInteger)
    sampling_session_id: SamplingSessionId | None = Field(default=None, sa_type=String)
    sampler_id: SamplerId | None = Field(default=None, sa_type=String)
    """The sampler of a sample, whose artifact stays while the request is open; None in rows of early releases."""
    engine: int = 1
    """Number of the engine that executes the request: that of its model, or one that was chosen for a sample."""
    body: bytes
    digest: bytes
    status: RequestStatus = Field(default="open", sa_type=String)
    effect_order: int | None = None
    attempts: int = 0
    """Starts of the open request by an engine, less those that ended in a clean stop."""
    is_alone: bool = False
    """Whether the last start was alone on the device."""
    crashes: int = 0
    """Engine crashes that happened while the request ran alone."""
    result: bytes | None = None
    """None while open, and again once pruned."""
    body_crc: int | None = Field(default=None, sa_type=BigInteger)
    """CRC-32 of `body`; None in rows of early releases."""
    result_crc: int | None = Field(default=None, sa_type=BigInteger)
    created_at: float
    started_at: float | None = None
    """When the last delivery attempt began; equal to `created_at` before the first one."""
    is_streamed: bool = False
    """Whether the client reads the sample while it is decoded."""
    completed_at: float | None = None
    fetched_at: float | None = None
    answer_order: int | None = Field(default=None, sa_type=BigInteger)
    """Order of completion by commit: no later commit gets a smaller number."""


class PrunedRow(SQLModel, table=True):
    """High-water mark: the last deleted sequence number of a model or sampling client."""

    __tablename__ = "pruned"

    numbered_by: str = Field(primary_key=True)
    """The scope, see `futures.get_sequence_scope`."""
    up_to: int = Field(sa_type=BigInteger)


class AnswerCounterRow(SQLModel, table=True):
    """The number of completed requests. Its one row serializes transactions that complete requests."""

    __tablename__ = "answer_counter"

    id: int = Field(default=1, primary_key=True)
    value: int = Field(default=0, sa_type=BigInteger)


class CancellationRow(SQLModel, table=True):
    """A sample that its client cancelled, until the engine has read the cancellation."""

    __tablename__ = "cancellations"
    __table_args__ = {"sqlite_autoincrement": True}

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    request_id: RequestId = Field(sa_type=String)
    engine: int = 1
    """Number of the engine that has the sample."""


class SamplingSessionRow(SQLModel, table=True):
    """The weights of one sampling client: the base model, a checkpoint, or an ephemeral sampler of `model_id`."""

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
    """Size of an ephemeral sampler's files, once they are written."""
    is_inflight: bool = False
    """Whether each in-flight save of the model replaces the sampler."""
    num_clones: int = 0
    """Copies of the client in other processes, each with its own range of sequence numbers."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """The model's optimizer steps at the save of an ephemeral sampler; None for others."""


class CustomLossRow(SQLModel, table=True):
    """A loss that a client uploaded for its session. `body` is an encoded `CreateCustomLoss`."""

    __tablename__ = "custom_losses"

    loss_id: str = Field(primary_key=True)
    session_id: SessionId = Field(foreign_key="sessions.session_id", index=True, sa_type=String)
    owner: str = Field(index=True)
    name: str
    body: bytes
    created_at: float
    last_used_at: float = Field(index=True)


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
    deleted_at: float | None = Field(default=None, index=True)
    """When the checkpoint was deleted; it can be restored for a while."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """The model's optimizer steps at the save; None in rows of early releases."""
    copied_from: str | None = Field(default=None, index=True)
    """The `tinker://` path of the original, if this is a copy."""

    @property
    def path(self) -> CheckpointPath:
        """The checkpoint's `tinker://` path."""
        return CheckpointPath(self.model_id, CheckpointKind(self.kind), self.name)


class SnapshotRow(SQLModel, table=True):
    """A model's recovery snapshot at one log sequence number, `effect_order`."""

    __tablename__ = "snapshots"

    model_id: ModelId = Field(primary_key=True, sa_type=String)
    artifact_id: ArtifactId = Field(sa_type=String)
    effect_order: int
    created_at: float


class StabilityRow(SQLModel, table=True):
    """Recorded log-probabilities of one sampled sequence: little-endian float32, one per sampled token."""

    __tablename__ = "stability"

    sequence_id: str = Field(primary_key=True)
    owner: str
    prompt_length: int
    logprobs: bytes
    last_used_at: float = Field(index=True)


class ApiKeyRow(SQLModel, table=True):
    """An API key, stored as its digest; `hint` is its beginning, for lists."""

    __tablename__ = "api_keys"
    __table_args__ = {"sqlite_autoincrement": True}  # signed tokens name keys by number, so numbers are never reused

    key_id: int | None = Field(default=None, primary_key=True)
    digest: str = Field(unique=True)
    hint: str
    owner: str
    scope: KeyScope = Field(sa_type=String)
    name: str
    note: str = ""
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None
    last_used_at: float | None = None


class AuditRow(SQLModel, table=True):
    """An act on a checkpoint, a key, a project or a limit."""

    __tablename__ = "audit"
    __table_args__ = {"sqlite_autoincrement": True}  # positions are never reused: readers keep them as cursors

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of writing."""
    at: float = Field(index=True)
    event: str
    """Resource and action, such as `checkpoint_publish`."""
    actor: str
    """The owner who acted; `operator` for commands on the server's machine, `server` for the server itself."""
    key_id: int | None = None
    """The API key that was used."""
    path: str | None = None
    """The checkpoint's `tinker://` path."""
    details: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)


class QuotaRow(SQLModel, table=True):
    """The most that an owner, an API key or a project may use, or the weight of an owner."""

    __tablename__ = "quotas"

    subject_kind: SubjectKind = Field(primary_key=True, sa_type=String)
    subject: str = Field(primary_key=True)
    """An owner, the number of a key, or a project; `*` for each of its kind without a row of its own."""
    name: str = Field(primary_key=True)
    """The limit, or `weight`."""
    value: int = Field(sa_type=BigInteger)
    over: OverQuota = Field(default="wait", sa_type=String)
    """The fate of work beyond a quota of a day."""


class ProjectMemberRow(SQLModel, table=True):
    """An owner who sees what is in a project."""

    __tablename__ = "project_members"

    project_id: str = Field(primary_key=True)
    owner: str = Field(primary_key=True, index=True)
    role: ProjectRole = Field(sa_type=String)


class EngineStateRow(SQLModel, table=True):
    """The status of an engine, published about once a second: one row for each number that an engine ever had."""

    __tablename__ = "engine_state"

    number: int = Field(default=1, primary_key=True)
    """The engine's number, from 1. While it runs it holds the lease of this number, see `leases`."""
    boot_id: str
    """Random id of the run of the engine: another one after each start, unlike host and process id in a container."""
    host: str = ""
    """Name of the machine, or of the container."""
    pid: int
    status: EngineStatus = Field(sa_type=String)
    capabilities: Mapping[str, object] = Field(sa_type=JSON)
    base_models: list[str] = Field(sa_type=JSON)
    load: Mapping[str, object] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """`SampleLoad` of `engine_state`, as JSON; None while the engine starts."""
    detail: str = ""
    activity: str = ""
    """Description of the current work of the engine's loop; empty while it waits for requests."""
    activity_since: float | None = None
    meters: Mapping[str, object] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """Gauges and counters of the engine and its backend, for people; None while the engine starts."""
    pauses: list[Mapping[str, str]] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """The subjects whose requests wait because of a quota, as JSON; None if there are none."""
    updated_at: float


class IdentityRow(SQLModel, table=True):
    """Identity that the database shares with its artifact directory; one row."""

    __tablename__ = "identity"

    id: int = Field(default=1, primary_key=True)
    store_id: str
    """Random; the same in both. It starts with `remote-` if the artifacts are in an object store."""
    epoch: int = Field(default=0, sa_type=BigInteger)
    """Grows with each engine start and before each garbage collection; smaller in an older copy of the database."""


class PartialRow(SQLModel, table=True):
    """New tokens of one decode slice, of a sample whose client reads a stream; arrays are little-endian."""

    __tablename__ = "partials"
    __table_args__ = {"sqlite_autoincrement": True}  # positions are never reused: readers keep one as their cursor

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of writing. A request that an engine starts again begins again from its first token."""
    request_id: RequestId = Field(index=True, sa_type=String)
    sample_index: int
    start: int
    """Number of the sample's tokens before these."""
    tokens: bytes
    """int32 [tokens of the slice]."""
    logprobs: bytes
    """float32 [tokens of the slice]."""
    topk_token_ids: bytes | None = None
    """int32 [tokens of the slice, k]; None if top-k log-probabilities were not requested."""
    topk_logprobs: bytes | None = None
    """float32 [tokens of the slice, k]."""


class NoticeRow(SQLModel, table=True):
    """A warning or an error of a process."""

    __tablename__ = "notices"
    __table_args__ = {"sqlite_autoincrement": True}

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    at: float
    process: ProcessName = Field(sa_type=String)
    level: str
    text: str


class ServerPointRow(SQLModel, table=True):
    """Gauges of the server at one time."""

    __tablename__ = "server_points"

    at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    values: Mapping[str, float] = Field(sa_type=JSON)
