"""Schemas for sessions, session search, client flags, health, futures and API keys."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from skyrl_tx.server.schemas.base import List, Metadata, Name, Response, Table, WireModel

FinishReasonType = Literal["success", "errored", "interrupted"]


class ClientConfigResponse(Response):
    """The client flags that this server sets. The SDK has its own defaults for all other flags.

    With `custom_loss_server_side`, the SDK uploads the losses of `create_custom_loss`. Without
    `use_pyqwest_transport`, it sends requests with httpx only.
    """

    pjwt_auth_enabled: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    proto_compress_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True
    sample_use_retrieve_futures: bool = True
    sample_join_sampling_session: bool = True
    custom_loss_server_side: bool = False
    use_pyqwest_transport: bool = True


class CreateSessionRequest(WireModel):
    """A new session of a client process."""

    tags: Annotated[List[Name], Field(max_length=100)] = Field(default_factory=list[str])
    user_metadata: Metadata | None = None
    sdk_version: Name | None = None
    project_id: Name | None = None
    display_name: Annotated[str, Field(max_length=1000)] | None = None
    type: str | None = None


class HeartbeatRequest(WireModel):
    """A heartbeat of a session."""

    session_id: str
    type: str | None = None


class FinishReason(WireModel):
    """Why a client process ended."""

    type: FinishReasonType


class FinishRequest(WireModel):
    """The end of a session."""

    reason: FinishReason
    detail: Annotated[str, Field(max_length=10_000)] | None = None


class ProjectRequest(WireModel):
    """The project of a session.

    A project is just a name, and it does not have to be created first.
    """

    project_id: str = Field(min_length=1, max_length=200)


class SupportedModel(Response):
    """A base model that clients may request."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True
    """False while all sampling servers are lost, and the trainer does not sample instead of them."""


class SessionResponse(Response):
    """The runs and samplers of a session. All metadata values are strings."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class RetrieveFutureRequest(WireModel):
    """A long poll for one result."""

    request_id: str
    allow_metadata_only: bool | None = None


class SamplingSessionTarget(WireModel):
    """The client whose sample requests a poll asks for.

    `cloned_sampler_id` is 0 for the client that created the sampling session, and the number of the
    copy for its copies.
    """

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=10**9)


class RetrieveFuturesRequest(WireModel):
    """A long poll for completed sample requests.

    `retrieved_request_ids` is ignored, because the server already records which results were
    fetched.
    """

    target: SamplingSessionTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**63)
    timeout: float | None = None
    retrieved_request_ids: List[str] = Field(default_factory=list[str])


class CompletedRequest(Response):
    """A request that has completed."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Response):
    """The requests that have completed after the cursor, and the cursor for the next poll."""

    completions: list[CompletedRequest]
    cursor: int


class CancelFutureRequest(WireModel):
    """Cancels a sample request."""

    request_id: str


class SearchOwner(WireModel):
    """The owners to search: the caller, all that the caller may see, or the listed ones."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list[str], max_length=10)


class StatusQuery(WireModel):
    """A session status to search for. `reasons` only applies to `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[List[FinishReasonType], Field(max_length=16)] | None = None


class SearchCursor(WireModel):
    """The last session of the previous page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(WireModel):
    """Search conditions.

    A session must match `session_id` or `display_name`, if at least one of them is set, and all
    other conditions.
    """

    session_id: str | None = None
    project_ids: Annotated[List[str], Field(max_length=1000)] | None = None
    user_metadata: Table[str] = Field(default_factory=dict[str, str])
    display_name: Annotated[str, Field(max_length=1000)] | None = None
    owner: SearchOwner = Field(default_factory=SearchOwner)
    statuses: Annotated[List[StatusQuery], Field(max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class ClientFinished(Response):
    """The status of a session that its client has finished."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class FailedRun(Response):
    """The run that failed a session."""

    type: Literal["training_run"] = "training_run"
    training_run_id: str


class Failed(Response):
    """The status of a session whose runs could all not be created."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"] = "user"
    reason: FailedRun
    message: str = "the training run could not be created"


class Cancelled(Response):
    """The status of a session that the server ended, for example because its heartbeats stopped."""

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class Active(Response):
    """The status of a session with a recent heartbeat."""

    type: Literal["active"] = "active"


SessionStatus = ClientFinished | Failed | Cancelled | Active


class SessionSummary(Response):
    """A session in a search result.

    It has no status if its heartbeats have stopped and the server has not ended it yet.
    """

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    """A page of sessions. The last page has no cursor."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class KeyResponse(Response):
    """A description of the caller's API key.

    `details` contains the name of the organization, and the owner as `email`.
    """

    key_id: int
    name: str
    note: str
    details: dict[str, dict[str, str]]
