"""The components of the API process, one HTTP request as the endpoints see it, and optional features.

Endpoints declare a parameter of type `Incoming` or `IncomingData` to get an `ApiCall`. An optional
feature extends the API process with a `ServerExtension`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal, ParamSpec, TypeAlias, TypeVar, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from sqlmodel import Session
from starlette.routing import BaseRoute
from starlette.types import Scope

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.engine_status import AdmissionControl, EngineHealth
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import CONTROL_LIMITS, POLL_LIMITS, Body, BodyLimits, read_body
from skyrl_tx.server.http.long_poll import ResponsePriority, ResultWatcher
from skyrl_tx.server.identity.authentication import (
    Authenticator,
    Caller,
    Principal,
    SigningKey,
    authenticate_request,
    read_credential,
)
from skyrl_tx.server.monitoring import ApiMetrics
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.shares import HEAVY_BYTES, CountBytes, OwnerBudget, Shares, StoredBytes
from skyrl_tx.server.submission.validation import UnknownFields
from skyrl_tx.store.database import Store

T = TypeVar("T")
P = ParamSpec("P")
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
    shares: Shares
    stored_bytes: StoredBytes
    metrics: ApiMetrics
    extensions: Mapping[str, ServerExtension]
    """The optional features by name."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    priority: ResponsePriority = field(default_factory=ResponsePriority)

    async def run_call(self, owner: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread, once `owner` has a free thread in its share."""
        async with self.shares.calls.reserve(owner):
            return await run_in_threadpool(work, *arguments, **named)

    async def wait_for_results(self, scope: Scope) -> None:
        """Wait while results of the caller of an HTTP request are being written.

        A caller that was not authenticated within the last second does not wait.
        """
        if not self.priority.is_idle:
            caller = self.authenticator.get_cached(read_credential(Request(scope)))
            if caller is not None:
                await self.priority.wait_for_results(caller.owner)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One authenticated HTTP request with its body, and the components that serve it."""

    context: ApiContext
    caller: Principal
    body: Body
    sdk_version: str
    idempotency_key: str | None
    """`X-Idempotency-Key`: the same in all retries of a call.

    It identifies requests that have no sequence number.
    """
    weights_access_token: str | None = None
    """Header with the API key or JWT of another owner.

    A client sends it to copy a checkpoint of that owner. Source:
    tinker/lib/public_interfaces/rest_client.py.
    """

    @property
    def settings(self) -> ApiSettings:
        """The settings of the API process."""
        return self.context.settings

    @property
    def store(self) -> Store:
        """The database, the only source of truth."""
        return self.context.store

    def add_stored(self, num_bytes: int) -> None:
        """Count bytes that the call is about to store.

        Raises ApiError 429 if the caller stores more than its share of the database.
        """
        self.context.stored_bytes.add(self.caller.owner, num_bytes)

    def admit_checkpoint(self, tx: Session, session_id: SessionId, now: float) -> None:
        """Let the optional features admit a checkpoint that the transaction adds to a session.

        Raises UserError if a feature refuses it, for example because of a quota.
        """
        for extension in self.context.extensions.values():
            if extension.admission is not None:
                extension.admission(tx, session_id, now)

    def derive_session_id(self, purpose: str) -> SessionId | None:
        """Derive a session id from the idempotency key. Returns None if there is no key.

        Retries get the same id. Other callers cannot guess the id, because it is signed.
        """
        if self.idempotency_key is None:
            return None
        signature = self.context.signing_key.sign(purpose, self.caller.owner, self.idempotency_key)
        return SessionId(f"session-{signature[:32]}")

    def list_readers(self, tx: Session, token: str | None) -> Sequence[Principal]:
        """Return the principals whose permissions count when the caller reads a checkpoint.

        These are the caller and, with a `weights_access_token`, the owner of that token. The token
        is an API key or a JWT of an owner who shares their checkpoints. Raises UserError if it is
        invalid.
        """
        if token is None:
            return [self.caller]
        try:
            delegating = self.context.authenticator.find_principal(tx, token)
        except ApiError as error:
            raise UserError("weights_access_token: not a key and not a token of this server") from error
        if delegating.scope not in _DELEGATING_SCOPES:
            raise UserError(f"weights_access_token: a key of scope {delegating.scope} may not read weights")
        return [self.caller, delegating]

    def check_unknown(self, model: WireModel) -> None:
        """Raise UserError for an unknown field that may change results.

        Log other unknown fields.
        """
        self.context.unknown_fields.check(model, self.sdk_version)


ErrorForm: TypeAlias = Callable[[Response, Exception], Response]
"""Converts an error response with the body `{"detail": text}` to the format of another API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtension:
    """Routers, pages, error formats and callbacks of one optional feature."""

    routers: Sequence[APIRouter] = ()
    """Routers with their own prefixes, for example `APIRouter(prefix="/v1")`.

    They are matched after the server's own routers, and before the 404 for unknown paths below
    `/api/v1`.
    """
    pages: Callable[[ApiContext], Sequence[BaseRoute]] | None = None
    """Returns routes that are not part of the OpenAPI document, such as web pages. Matched last."""
    service: Callable[[ApiContext], object] | None = None
    """Creates the component that the endpoints of the feature share.

    The component is stored as `app.state.NAME`, where NAME is the name of the feature.
    """
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict[str, ErrorForm])
    """Error formats by path prefix. For example, `/v1/` stands for all paths that start with it."""
    admission: Callable[[Session, SessionId, float], None] | None = None
    """Called as `admission(tx, session_id, now)` before a checkpoint is added to a session.

    Runs in the transaction that adds the checkpoint. Raises UserError to refuse the checkpoint.
    """
    count_stored_bytes: CountBytes | None = None
    """Returns how many bytes each owner has in the tables of the feature.

    `StoredBytes` adds these bytes to the total of the owner, and refuses calls if the total is too
    large.
    """
    on_telemetry: Callable[[ApiCall], None] | None = None
    """Called with each request to `/telemetry`, in a thread, before the request is acknowledged."""
    describe_session: Callable[[ApiCall, Request, SessionId], str | None] | None = None
    """Returns a line for the SDK to print when it creates a session, such as a URL."""


async def get_context(request: Request) -> ApiContext:
    """Return the components of this process."""
    return cast(ApiContext, request.app.state.context)


async def read_poll(request: Request, limits: BodyLimits = POLL_LIMITS) -> ApiCall:
    """Receive a long poll. Unlike other requests, it never waits for memory or for a thread."""
    return await _read_call(request, await authenticate_request(request), limits)


def _make_reader(get_threads: Callable[[Shares], OwnerBudget | None]) -> Callable[..., AsyncGenerator[ApiCall]]:
    """Return a dependency that receives a request which is neither a training pass nor a sample request.

    The call uses threads of a certain budget, see `receive_call`.
    """

    async def read(request: Request, caller: Caller) -> AsyncGenerator[ApiCall]:
        threads = get_threads((await get_context(request)).shares)
        async with receive_call(request, caller, CONTROL_LIMITS, threads=threads) as call:
            yield call

    return read


async def read_data(request: Request, caller: Caller) -> AsyncGenerator[ApiCall]:
    """Receive a training pass or a sample request, which may be large. Reserves memory for it."""
    settings = (await get_context(request)).settings
    limits = BodyLimits.from_content_type(settings.max_request_bytes, request.headers.get("content-type", ""))
    async with receive_call(request, caller, limits) as call:
        yield call


receive_data_call = asynccontextmanager(read_data)
"""`read_data` for endpoints that receive the request themselves."""


@asynccontextmanager
async def receive_call(
    request: Request, caller: Principal, limits: BodyLimits, *, threads: OwnerBudget | None = None
) -> AsyncGenerator[ApiCall]:
    """Wait for memory for the body, receive the body, and wait until the caller has a free thread.

    The thread, and the memory that decoding takes, stay reserved inside the context. The thread is
    taken from the budget `threads`. The default is `heavy_calls` for large bodies, and `calls` for
    all other bodies.
    """
    context = await get_context(request)
    shares, owner = context.shares, caller.owner
    async with shares.received_bodies.reserve(owner, _estimate_body_bytes(request, limits)):
        call = await _read_call(request, caller, limits)
        num_bytes = call.body.estimate_decoding_bytes()
        if threads is None:
            threads = shares.calls if num_bytes <= HEAVY_BYTES else shares.heavy_calls
        async with shares.decoded_bodies.reserve(owner, num_bytes), threads.reserve(owner):
            yield call


def get_base_url(settings: ApiSettings, request: Request) -> str:
    """Return the base URL of this server without a trailing slash.

    This is `public_url` if it is set, or else the address that the client used.
    """
    base = settings.public_url or f"{request.url.scheme}://{request.url.netloc}{request.scope['root_path']}"
    return base.rstrip("/")


def _estimate_body_bytes(request: Request, limits: BodyLimits) -> int:
    """Return how many bytes of a body the server will keep.

    Without a Content-Length, this is the limit of the request. A body that exceeds the limit counts
    as 0, because the server discards it.
    """
    announced = request.headers.get("content-length")
    if announced is None:
        return limits.max_bytes if "transfer-encoding" in request.headers else 0
    size = int(announced)  # httptools has checked that it is a number
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


# The thread and the memory are free again once the endpoint returns, even if the client is slow to
# read the response.
Incoming = Annotated[ApiCall, Depends(_make_reader(lambda _: None), scope="function")]
IncomingList = Annotated[ApiCall, Depends(_make_reader(attrgetter("lists")), scope="function")]
IncomingFiles = Annotated[ApiCall, Depends(_make_reader(attrgetter("weight_files")), scope="function")]
IncomingImport = Annotated[ApiCall, Depends(_make_reader(attrgetter("adapter_imports")), scope="function")]
IncomingData = Annotated[ApiCall, Depends(read_data, scope="function")]
AccessScope = Literal["owned", "accessible"]
Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]
