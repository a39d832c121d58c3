"""The database tables. Columns whose names end in `_at` hold seconds since the epoch.

Every session has an owner. Other rows belong to the owner of their session.
"""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor, but documents that a string is assigned to it.

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

# SQLite assigns row numbers only in a column of type INTEGER.
BIG_KEY = BigInteger().with_variant(Integer, "sqlite")
_JSON_OR_NULL = JSON(none_as_null=True)


def partial_index(name: str, column: str, where: str) -> Index:
    """Return a partial index for SQLite and PostgreSQL."""
    return Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


class AppTable(SQLModel):
    """Base class for the tables of optional features.

    The migrations create these tables in every database, even if a process has not imported the
    feature. Therefore they are not part of `SQLModel.metadata`.
    """

    metadata = MetaData()


class SessionRow(SQLModel, table=True):
    """A session of one client process, with the metadata that the client sent."""

    __tablename__ = "sessions"

    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str = Field(index=True)
    project_id: str | None = None
    display_name: str | None = None
    tags: list[str] = Field(default_factory=list, sa_type=JSON)
    user_metadata: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)
    sdk_version: str | None = None
    key_id: int | None = None
    """Number of the API key that created the session; None without authentication."""
    created_at: float
    last_heartbeat_at: float
    finished_at: float | None = None
    finish_reason: str | None = None


class ModelRow(SQLModel, table=True):
    """A training run, which trains one LoRA adapter. `spec` is an encoded `ModelSpec`."""

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
    """Log sequence number of the last committed request. The first number is 1."""
    poisoned_by: str | None = None
    """Why the accumulated gradient is incomplete. The next optim_step fails with this message."""
    base_model_hash: str | None = None
    """Hash of the base weights; None until the model is created."""
    deleted_at: float | None = Field(default=None, index=True)
    """When the run was deleted. It can be restored until it is purged."""
    loaded_from: str | None = Field(default=None, index=True)
    """`tinker://` path of the checkpoint that the run loaded last."""
    num_steps: int = Field(default=0, sa_type=BigInteger)
    """Number of optimizer steps since the run was created."""
    engine: int = 1
    """Number of the engine that trains the model. Only this engine writes the model's log."""


class RequestRow(SQLModel, table=True):
    """A future: a request and later its result.

    These rows are also the write-ahead log of the engine.
    """

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
    """Order of arrival at the engine.

    A request that moves to another engine gets a new position.
    """
    request_id: RequestId = Field(unique=True, sa_type=String)
    kind: str
    owner: str
    session_id: SessionId = Field(foreign_key="sessions.session_id", index=True, sa_type=String)
    model_id: ModelId | None = Field(default=None, sa_type=String)
    seq_id: int | None = Field(default=None, sa_type=BigInteger)
    sampling_session_id: SamplingSessionId | None = Field(default=None, sa_type=String)
    sampler_id: SamplerId | None = Field(default=None, sa_type=String)
    """The sampler of a sample request.

    Its artifact is kept while the request is open. None in old rows.
    """
    engine: int = 1
    """Number of the engine that executes the request.

    Training requests go to the engine of their model. For sample requests the server chooses an
    engine.
    """
    body: bytes
    digest: bytes
    status: RequestStatus = Field(default="open", sa_type=String)
    effect_order: int | None = None
    attempts: int = 0
    """How often an engine has started the request.

    A start that ended in a clean stop does not count.
    """
    is_alone: bool = False
    """Whether nothing else ran on the device after the last start."""
    crashes: int = 0
    """Number of engine crashes while the request ran alone."""
    result: bytes | None = None
    """None while the request is open, and after the result was pruned."""
    body_crc: int | None = Field(default=None, sa_type=BigInteger)
    """CRC-32 of `body`; None in rows of early releases and after pruning."""
    result_crc: int | None = Field(default=None, sa_type=BigInteger)
    created_at: float
    started_at: float | None = None
    """When the last delivery attempt began; equal to `created_at` before the first attempt."""
    is_streamed: bool = False
    """Whether the client reads the tokens of the sample while they are decoded."""
    completed_at: float | None = None
    fetched_at: float | None = None
    answer_order: int | None = Field(default=None, sa_type=BigInteger)
    """Order of completion. A later commit never gets a smaller number."""


class PrunedRow(SQLModel, table=True):
    """High-water mark: the highest deleted sequence number of a model or a sampling client."""

    __tablename__ = "pruned"

    numbered_by: str = Field(primary_key=True)
    """Model or sampling client, see `futures.get_sequence_scope`."""
    up_to: int = Field(sa_type=BigInteger)


class AnswerCounterRow(SQLModel, table=True):
    """The number of completed requests, in a single row.

    It serializes transactions that complete requests.
    """

    __tablename__ = "answer_counter"

    id: int = Field(default=1, primary_key=True)
    value: int = Field(default=0, sa_type=BigInteger)


class CancellationRow(SQLModel, table=True):
    """A sample request that its client has cancelled. Deleted when the engine has read it."""

    __tablename__ = "cancellations"
    __table_args__ = {"sqlite_autoincrement": True}

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    request_id: RequestId = Field(sa_type=String)
    engine: int = 1
    """Number of the engine that executes the sample request."""


class SamplingSessionRow(SQLModel, table=True):
    """The weights of one sampling client.

    These are the base weights, a checkpoint, or an ephemeral sampler of `model_id`.
    """

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
    """Size of the files of an ephemeral sampler; None until they are written."""
    is_inflight: bool = False
    """Whether each in-flight save of the model replaces the sampler."""
    num_clones: int = 0
    """Number of copies of the client in other processes.

    Each copy has its own range of sequence numbers.
    """
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps when an ephemeral sampler was saved; None for other weights."""


class CustomLossRow(SQLModel, table=True):
    """A loss function that a client uploaded for its session.

    `body` is an encoded `CreateCustomLoss`.
    """

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
    """When the checkpoint was deleted. It can be restored until it is purged."""
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Number of optimizer steps at the save; None in rows of early releases."""
    copied_from: str | None = Field(default=None, index=True)
    """`tinker://` path of the original, if this checkpoint is a copy."""

    @property
    def path(self) -> CheckpointPath:
        """The checkpoint's `tinker://` path."""
        return CheckpointPath(self.model_id, CheckpointKind(self.kind), self.name)


class SnapshotRow(SQLModel, table=True):
    """The recovery snapshot of a model.

    It includes the log up to sequence number `effect_order`.
    """

    __tablename__ = "snapshots"

    model_id: ModelId = Field(primary_key=True, sa_type=String)
    artifact_id: ArtifactId = Field(sa_type=String)
    effect_order: int
    created_at: float


class StabilityRow(SQLModel, table=True):
    """Recorded log-probabilities of one sampled sequence: little-endian float32, one per token."""

    __tablename__ = "stability"

    sequence_id: str = Field(primary_key=True)
    owner: str
    prompt_length: int
    logprobs: bytes
    last_used_at: float = Field(index=True)


class ApiKeyRow(SQLModel, table=True):
    """An API key, stored as its digest. `hint` is the start of the key, which lists show."""

    __tablename__ = "api_keys"
    # Numbers are never reused, because signed tokens name keys by number.
    __table_args__ = {"sqlite_autoincrement": True}

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
    parent_id: int | None = None
    """Number of the user key that created this key; None if an admin created it.

    A key ends with its parent at the latest, and its work counts for the parent's quotas.
    """


class AuditRow(SQLModel, table=True):
    """An entry of the audit log: an action on a checkpoint, a key, a project or a limit."""

    __tablename__ = "audit"
    __table_args__ = {"sqlite_autoincrement": True}  # positions are never reused: readers keep them as cursors

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of writing."""
    at: float = Field(index=True)
    event: str
    """Resource and action, for example `checkpoint_publish`."""
    actor: str
    """The owner who acted, `operator` for commands on the server's machine, or `server`."""
    key_id: int | None = None
    """Number of the API key that was used."""
    path: str | None = None
    """`tinker://` path of the checkpoint."""
    details: Mapping[str, object] = Field(default_factory=dict, sa_type=JSON)


class QuotaRow(SQLModel, table=True):
    """A quota of an owner, an API key or a project, or the weight of an owner."""

    __tablename__ = "quotas"

    subject_kind: SubjectKind = Field(primary_key=True, sa_type=String)
    subject: str = Field(primary_key=True)
    """An owner, the number of a key, or a project.

    `*` applies to each subject that has no row itself.
    """
    name: str = Field(primary_key=True)
    """Name of the limit, for example `checkpoint_bytes`, or `weight`."""
    value: int = Field(sa_type=BigInteger)
    over: OverQuota = Field(default="wait", sa_type=String)
    """Whether work beyond a daily quota waits or fails."""


class ProjectMemberRow(SQLModel, table=True):
    """A member of a project: an owner who sees its sessions, runs and checkpoints."""

    __tablename__ = "project_members"

    project_id: str = Field(primary_key=True)
    owner: str = Field(primary_key=True, index=True)
    role: ProjectRole = Field(sa_type=String)


class EngineStateRow(SQLModel, table=True):
    """The status of an engine, published about once per second.

    There is one row for each engine number.
    """

    __tablename__ = "engine_state"

    number: int = Field(default=1, primary_key=True)
    """Number of the engine, from 1.

    A running engine holds the lease of its number, see `placement`.
    """
    boot_id: str
    """Random id that is new after each start.

    Host and process id may stay the same in a container.
    """
    host: str = ""
    """Name of the machine or the container."""
    pid: int
    status: EngineStatus = Field(sa_type=String)
    capabilities: Mapping[str, object] = Field(sa_type=JSON)
    base_models: list[str] = Field(sa_type=JSON)
    load: Mapping[str, object] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """`engine_state.SampleLoad` as JSON; None while the engine starts."""
    detail: str = ""
    activity: str = ""
    """The current work of the engine loop; empty while it waits for requests."""
    activity_since: float | None = None
    meters: Mapping[str, object] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """Gauges and counters of the engine and its backend; None while the engine starts."""
    pauses: list[Mapping[str, str]] | None = Field(default=None, sa_type=_JSON_OR_NULL)
    """Owners, keys and projects that wait because of a quota: `engine_state.Pause` as JSON, or None."""
    updated_at: float


class IdentityRow(SQLModel, table=True):
    """The identity that the database shares with its artifacts, in a single row."""

    __tablename__ = "identity"

    id: int = Field(default=1, primary_key=True)
    store_id: str
    """Random id, the same as in the artifacts.

    It starts with `remote-` if they are in an object store.
    """
    epoch: int = Field(default=0, sa_type=BigInteger)
    """Raised at engine starts and before garbage collection.

    An older copy of the database has a smaller epoch.
    """


class PartialRow(SQLModel, table=True):
    """New tokens of a streamed sample from one decode slice. Arrays are little-endian."""

    __tablename__ = "partials"
    __table_args__ = {"sqlite_autoincrement": True}  # positions are never reused: readers keep them as cursors

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    """Order of writing.

    If an engine restarts a request, its rows begin with the first token again.
    """
    request_id: RequestId = Field(index=True, sa_type=String)
    sample_index: int
    start: int
    """Number of tokens of the sample before this row."""
    tokens: bytes
    """int32 [tokens of the slice]."""
    logprobs: bytes
    """float32 [tokens of the slice]."""
    topk_token_ids: bytes | None = None
    """int32 [tokens of the slice, k]; None if top-k log-probabilities were not requested."""
    topk_logprobs: bytes | None = None
    """float32 [tokens of the slice, k]."""


class NoticeRow(SQLModel, table=True):
    """A warning or an error that a process has logged."""

    __tablename__ = "notices"
    __table_args__ = {"sqlite_autoincrement": True}

    position: int | None = Field(default=None, primary_key=True, sa_type=BIG_KEY)
    at: float
    process: ProcessName = Field(sa_type=String)
    level: str
    text: str


class ServerPointRow(SQLModel, table=True):
    """The server's gauges at one time."""

    __tablename__ = "server_points"

    at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    values: Mapping[str, float] = Field(sa_type=JSON)
