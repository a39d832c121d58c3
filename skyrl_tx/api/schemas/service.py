"""Sessions, flags, health."""

from typing import Literal

from pydantic import Field

from skyrl_tx.api.schemas.addresses import Metadata
from skyrl_tx.api.schemas.base import Answer, WireModel


class ClientConfigRequest(WireModel):
    """Who is asking for flags."""

    sdk_version: str | None = None


class ClientConfigAnswer(Answer):
    """The flags that this server sets, right for every release; the SDK has defaults for the rest."""

    pjwt_auth_enabled: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    proto_compress_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True
    sample_use_retrieve_futures: bool = True
    sample_join_sampling_session: bool = True


class DynamicConfigAnswer(Answer):
    """Flags that the SDK asks for again and again."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True


class CreateSessionRequest(WireModel):
    """A client process begins."""

    tags: list[str] = Field(default_factory=list[str])
    user_metadata: Metadata = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    type: str | None = None


class CreateSessionAnswer(Answer):
    """A session exists; messages are logged by the client."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class HeartbeatRequest(WireModel):
    """A session is still wanted."""

    session_id: str
    type: str | None = None


class HeartbeatAnswer(Answer):
    """Heard."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireModel):
    """How a client process ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishRequest(WireModel):
    """A session ends."""

    reason: FinishReason
    detail: str | None = None


class ProjectRequest(WireModel):
    """Where a session belongs; projects are names, made by being used."""

    project_id: str = Field(min_length=1, max_length=200)


class SupportedModel(Answer):
    """A name that may be given as `base_model`."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class CapabilitiesAnswer(Answer):
    """What this server serves."""

    supported_models: list[SupportedModel]


class HealthAnswer(Answer):
    """`ok`, or which half is not; `detail` is for people."""

    status: str
    detail: str | None = None


class TelemetryAnswer(Answer):
    """Telemetry is taken and dropped."""

    status: Literal["accepted"] = "accepted"


class SessionsAnswer(Answer):
    """A page of sessions."""

    sessions: list[str]


class SessionAnswer(Answer):
    """What was made in a session; the client reads metadata as text."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class RetrieveFutureRequest(WireModel):
    """A poll for a result."""

    request_id: str
    allow_metadata_only: bool | None = None


class SamplingSessionTarget(WireModel):
    """The samples of one client: of the one that began the sampling session (0), or of a copy."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=10**9)


class RetrieveFuturesRequest(WireModel):
    """A poll for news of many results; those retrieved were noted when they were."""

    target: SamplingSessionTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**63)
    timeout: float | None = None
    retrieved_request_ids: list[str] = Field(default_factory=list[str])


class CompletionAnswer(Answer):
    """One request that has its result."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesAnswer(Answer):
    """What was answered since the cursor of the last poll, and the cursor for the next."""

    completions: list[CompletionAnswer]
    cursor: int


class CancelFutureRequest(WireModel):
    """A result that is wanted no more."""

    request_id: str


class CancelFutureAnswer(Answer):
    """Heard; there may have been nothing left to cancel."""

    type: Literal["cancel_future"] = "cancel_future"
