"""Schemas of sessions, the session search, client flags, health, futures, API keys and storage."""

from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal, TypeVar, cast

import msgspec
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""An integer of 64 bits, which the codec, NumPy and the database can store. JSON itself has no bound."""


SeqId = Annotated[int, Field(ge=0, lt=2**63)]
"""A sequence number of a client; clones of a sampling client start at multiples of a billion."""


_MAX_METADATA_CHARS = 2**16


_MAX_NAMES = 64


ValueT = TypeVar("ValueT")


List = Annotated[list[ValueT], Field(fail_fast=True)]
"""A list of a request. Its first wrong value ends the validation: an error for each value would take a kilobyte."""


class WireModel(BaseModel):
    """An object of a request.

    SDK releases add fields and send their defaults, so unknown fields are kept in `model_extra` and are no error by
    themselves. Where `changes_maths` is true, an unknown field that is set is refused (`validation.UnknownFields`).
    Python's JSON parser accepts NaN and infinity; no field does.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)
    changes_maths: ClassVar[bool] = False


class Response(BaseModel):
    """An object of a response."""

    model_config = ConfigDict(protected_namespaces=())


Table = Annotated[dict[str, ValueT], Field(max_length=_MAX_NAMES)]
"""An object with at most 64 names of the client's choice."""


def _convert_values_to_text(value: object) -> object:
    """Convert metadata to the form in which clients read it: values other than text become JSON."""
    if not isinstance(value, dict):
        return value
    metadata = cast(dict[str, object], value)
    return {
        name: part if isinstance(part, str) else msgspec.json.encode(part).decode() for name, part in metadata.items()
    }


def _check_length(metadata: dict[str, str]) -> dict[str, str]:
    """Refuse long metadata: lists and searches read it. Raises ValueError."""
    if sum(len(name) + len(text) for name, text in metadata.items()) > _MAX_METADATA_CHARS:
        raise ValueError(f"must have at most {_MAX_METADATA_CHARS} characters in all")
    return metadata


TextMetadata = Annotated[dict[str, str], AfterValidator(_check_length)]


Metadata = Annotated[TextMetadata, BeforeValidator(_convert_values_to_text)]
"""Metadata of sessions and runs, whose values other than text are converted."""


Name = Annotated[str, Field(max_length=200)]
"""A name that is stored with a session."""


class ModelRequestIds(WireModel):
    """The model and the sequence number of a request. `type` is a constant of the SDK.

    Ids are parsed before everything else: without them there is no future that could report an error.
    """

    model_id: str
    seq_id: SeqId | None = None
    type: str | None = None


class CreationIds(WireModel):
    """The session and number of a model to create, and its metadata."""

    session_id: str
    model_seq_id: SeqId
    user_metadata: Metadata | None = None


class SampleRequestIds(WireModel):
    """The sampling session and the sequence number of a prompt; or the weights, without a sampling session."""

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: SeqId | None = None
    num_samples: Int = 1


def to_utc_time(seconds: float) -> datetime:
    """Convert seconds since the epoch to a time that JSON shows in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


FinishReasonType = Literal["success", "errored", "interrupted"]


class ClientConfigResponse(Response):
    """The client flags that this server sets, equal for every release; the SDK has defaults for others.

    With `custom_loss_server_side` the SDK uploads the losses of `create_custom_loss`. Without `use_pyqwest_transport`
    it sends requests with httpx alone.
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
    """The reason why a client process ended."""

    type: FinishReasonType


class FinishRequest(WireModel):
    """The end of a session."""

    reason: FinishReason
    detail: Annotated[str, Field(max_length=10_000)] | None = None


class ProjectRequest(WireModel):
    """The project of a session. A project is a name and needs no creation."""

    project_id: str = Field(min_length=1, max_length=200)


class SupportedModel(Response):
    """A base model that clients may request."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class SessionResponse(Response):
    """The runs and samplers of a session; metadata values are text."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class RetrieveFutureRequest(WireModel):
    """A long poll for one result."""

    request_id: str
    allow_metadata_only: bool | None = None


class SamplingSessionTarget(WireModel):
    """The samples of one client: of the creator of the sampling session (0), or of a copy."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=10**9)


class RetrieveFuturesRequest(WireModel):
    """A long poll for completed samples. `retrieved_request_ids` is ignored: fetches are recorded already."""

    target: SamplingSessionTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**63)
    timeout: float | None = None
    retrieved_request_ids: List[str] = Field(default_factory=list[str])


class CompletedRequest(Response):
    """A request that completed."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Response):
    """The requests that completed after the cursor, and the cursor of the next poll."""

    completions: list[CompletedRequest]
    cursor: int


class CancelFutureRequest(WireModel):
    """A request to cancel a sample."""

    request_id: str


class SearchOwner(WireModel):
    """The owners to search: the caller, all that the caller may see, or the listed ones."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list[str], max_length=10)


class StatusQuery(WireModel):
    """A status to search for; `reasons` applies to `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[List[FinishReasonType], Field(max_length=16)] | None = None


class SearchCursor(WireModel):
    """The last session of the previous page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(WireModel):
    """Search conditions: `session_id` and `display_name` are alternatives, all others must hold."""

    session_id: str | None = None
    project_ids: Annotated[List[str], Field(max_length=1000)] | None = None
    user_metadata: Table[str] = Field(default_factory=dict[str, str])
    display_name: Annotated[str, Field(max_length=1000)] | None = None
    owner: SearchOwner = Field(default_factory=SearchOwner)
    statuses: Annotated[List[StatusQuery], Field(max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class ClientFinished(Response):
    """The status of a session that its client finished."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class Active(Response):
    """The status of a session with a recent heartbeat."""

    type: Literal["active"] = "active"


class SessionSummary(Response):
    """A session that was found; without a status if its heartbeats stopped."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ClientFinished | Active | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    """A page of sessions; the last page has no cursor."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class KeyResponse(Response):
    """A description of the caller's API key. `details` has the name of the organization and the owner as `email`."""

    key_id: int
    name: str
    note: str
    details: dict[str, dict[str, str]]
