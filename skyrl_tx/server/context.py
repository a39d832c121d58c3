"""The components of the API process, and one HTTP request as the endpoints see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, cast

from anyio import CapacityLimiter
from fastapi import Depends, Query, Request
from sqlmodel import Session

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.extension import ServerExtension
from skyrl_tx.server.http.body import CONTROL_LIMITS, POLL_LIMITS, Body, BodyBudget, BodyLimits, read_body
from skyrl_tx.server.http.long_poll import ResponsePriority, ResultWatcher
from skyrl_tx.server.identity.authentication import Authenticator, Caller, Principal, SigningKey
from skyrl_tx.server.monitoring.engine_status import AdmissionControl, EngineHealth
from skyrl_tx.server.monitoring.metrics import ApiMetrics
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.validation import UnknownFields
from skyrl_tx.store.database import Store

_RESULT_READERS = 4


_DELEGATING_SCOPES = frozenset({"admin", "user", "read"})


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The components of one API process. All durable state is in the store."""

    settings: ApiSettings
    store: Store
    artifacts: ArtifactStore
    signing_key: SigningKey
    authenticator: Authenticator
    engine: EngineHealth
    results: ResultWatcher
    admission: AdmissionControl
    received_bodies: BodyBudget
    decoded_bodies: BodyBudget
    metrics: ApiMetrics
    extensions: Mapping[str, ServerExtension] = field(default_factory=dict[str, ServerExtension])
    """The optional features by name."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    priority: ResponsePriority = field(default_factory=ResponsePriority)
    result_readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_RESULT_READERS))
    """Limits how many results are read and encoded at once: hundreds in parallel would all finish last."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One authenticated HTTP request with its body, and the components that serve it."""

    context: ApiContext
    caller: Principal
    body: Body
    sdk_version: str
    idempotency_key: str | None
    """`X-Idempotency-Key`, equal in all retries of one call. Used where a request has no sequence number."""
    weights_access_token: str | None = None
    """The header by which a client copies another owner's checkpoint (tinker/lib/public_interfaces/rest_client.py)."""

    @property
    def settings(self) -> ApiSettings:
        """The API's settings."""
        return self.context.settings

    @property
    def store(self) -> Store:
        """The database, the only source of truth."""
        return self.context.store

    def derive_session_id(self, purpose: str) -> SessionId | None:
        """Derive a session id from the idempotency key: equal for retries, and not guessable by other callers.

        Returns None without an idempotency key.
        """
        if self.idempotency_key is None:
            return None
        signature = self.context.signing_key.sign(purpose, self.caller.owner, self.idempotency_key)
        return SessionId(f"session-{signature[:32]}")

    def list_readers(self, tx: Session, token: str | None) -> Sequence[Principal]:
        """Return in whose name a checkpoint is read: the caller, and the owner of a `weights_access_token` if any.

        The token is a key or a token of an owner who lets the caller read. Raises UserError if it is invalid.
        """
        if token is None:
            return [self.caller]
        try:
            delegating = self.context.authenticator.find_principal(tx, token)
        except ApiError as error:
            raise UserError("weights_access_token: not a key and not a token of this server") from error
        if delegating.scope not in _DELEGATING_SCOPES:
            raise UserError(f"weights_access_token: a key of scope {delegating.scope} does not allow to read weights")
        return [self.caller, delegating]

    def check_unknown(self, model: WireModel) -> None:
        """Raise UserError for an unknown field that may change results; log the others."""
        self.context.unknown_fields.check(model, self.sdk_version)


async def get_context(request: Request) -> ApiContext:
    """Return the components of this process."""
    return cast(ApiContext, request.app.state.context)


async def read_poll(request: Request, caller: Caller) -> ApiCall:
    """Receive a request whose body has a few names. It never waits for other requests."""
    return await _read_call(request, caller, POLL_LIMITS)


async def read_control(request: Request, caller: Caller) -> AsyncGenerator[ApiCall]:
    """Receive a request that is neither a pass nor a sample."""
    async with receive_call(request, caller, CONTROL_LIMITS) as call:
        yield call


async def read_data(request: Request, caller: Caller) -> AsyncGenerator[ApiCall]:
    """Receive a pass or a sample, which may be large."""
    async with receive_data_call(request, caller) as call:
        yield call


@asynccontextmanager
async def receive_data_call(request: Request, caller: Principal) -> AsyncGenerator[ApiCall]:
    """Receive a request that may be large; its memory is held in the context."""
    settings = (await get_context(request)).settings
    limits = BodyLimits.from_content_type(settings.max_request_bytes, request.headers.get("content-type", ""))
    async with receive_call(request, caller, limits) as call:
        yield call


@asynccontextmanager
async def receive_call(request: Request, caller: Principal, limits: BodyLimits) -> AsyncGenerator[ApiCall]:
    """Receive a request when there is memory for its body; hold the memory that its execution takes in the context."""
    context = await get_context(request)
    async with context.received_bodies.reserve(caller.owner, _estimate_body_bytes(request, limits)):
        call = await _read_call(request, caller, limits)
        async with context.decoded_bodies.reserve(caller.owner, call.body.estimate_decoding_bytes()):
            yield call


def get_base_url(settings: ApiSettings, request: Request) -> str:
    """Return `public_url`, or the address by which the client reached this server; without a slash at its end."""
    base = settings.public_url or f"{request.url.scheme}://{request.url.netloc}{request.scope['root_path']}"
    return base.rstrip("/")


def _estimate_body_bytes(request: Request, limits: BodyLimits) -> int:
    """Return how many bytes of a body will be kept; without a Content-Length these are at most those of the limit."""
    announced = request.headers.get("content-length")
    if announced is None:
        return limits.max_bytes if "transfer-encoding" in request.headers else 0
    size = int(announced)  # a number: httptools has checked it
    return size if size <= limits.max_bytes else 0


async def _read_call(request: Request, caller: Principal, limits: BodyLimits) -> ApiCall:
    return ApiCall(
        context=await get_context(request),
        caller=caller,
        body=await read_body(request, limits),
        sdk_version=request.headers.get("x-stainless-package-version", "unknown")[:40],
        idempotency_key=request.headers.get("x-idempotency-key"),
        weights_access_token=request.headers.get("x-tinker-weights-access-token"),
    )


Incoming = Annotated[ApiCall, Depends(read_control)]


IncomingData = Annotated[ApiCall, Depends(read_data)]


AccessScope = Literal["owned", "accessible"]


Limit = Annotated[int, Query(ge=0, le=10_000)]


Offset = Annotated[int, Query(ge=0, lt=2**63)]


if TYPE_CHECKING:
    from skyrl_tx.server.context import ApiCall, ApiContext
