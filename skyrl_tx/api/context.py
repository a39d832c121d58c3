"""What every route has at hand."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

from anyio import CapacityLimiter
from fastapi import Depends, Query, Request

from skyrl_tx.api.backpressure import SampleBudget
from skyrl_tx.api.engine_watch import EngineWatch
from skyrl_tx.api.errors import ApiError
from skyrl_tx.api.precedence import Precedence
from skyrl_tx.api.principal import Caller, Gate, Principal
from skyrl_tx.api.recall import Recall
from skyrl_tx.api.schemas.base import WireModel
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.api.signing import SigningKey
from skyrl_tx.api.translate.translated import UnknownFields
from skyrl_tx.api.waiters import Waiters
from skyrl_tx.api.wire import Body, read_body
from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.database import Store

_READERS = 4


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts of one HTTP process. None of them holds a truth that is not in the store."""

    settings: ApiSettings
    store: Store
    artifacts: ArtifactStore
    signing_key: SigningKey
    gate: Gate
    engine: EngineWatch
    waiters: Waiters
    sample_budget: SampleBudget
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    recall: Recall = field(default_factory=Recall)
    precedence: Precedence = field(default_factory=Precedence)
    reading: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_READERS))
    """Results are read and written out so many at a time: hundreds that come at once would else all be last."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a route sees it: who asks, with what, and the parts of this process."""

    parts: ApiContext
    caller: Principal
    body: Body
    sdk_version: str
    idempotency_key: str | None
    """What the client's retries of one call have in common; it counts where a request has no number of its own."""
    weights_access_token: str | None = None
    """What a client sends in a header to copy another's checkpoint (tinker/lib/public_interfaces/rest_client.py)."""

    @property
    def settings(self) -> ApiSettings:
        """What this process was told."""
        return self.parts.settings

    @property
    def store(self) -> Store:
        """Where all truth is."""
        return self.parts.store

    def session_id(self, purpose: str) -> SessionId | None:
        """Name a session after this call, by a name that repetitions of it have in common and nobody else can find.

        None where nothing tells a repetition.
        """
        if self.idempotency_key is None:
            return None
        named = self.parts.signing_key.sign(purpose, self.caller.owner, self.idempotency_key)
        return SessionId(f"session-{named[:32]}")

    def lender(self, token: str | None) -> Principal | None:
        """Whoever gave the caller this `weights_access_token`: a key of theirs, or a token that was made for one.

        Raises UserError for one that opens nothing.
        """
        if token is None:
            return None
        try:
            return self.parts.gate.admit(token)
        except ApiError as error:
            raise UserError("weights_access_token: is no key, and no token for a key, of this server") from error

    def check_unknown(self, model: WireModel) -> None:
        """Raise UserError for an unknown field that may change the maths; log the others."""
        self.parts.unknown_fields.check(model, self.sdk_version)


async def parts_of(request: Request) -> ApiContext:
    """Find the parts of this process."""
    return cast(ApiContext, request.app.state.context)


async def incoming(request: Request, caller: Caller) -> Call:
    """Receive a call in full."""
    parts = await parts_of(request)
    return Call(
        parts=parts,
        caller=caller,
        body=await read_body(request, parts.settings.max_request_bytes),
        sdk_version=request.headers.get("x-stainless-package-version", "unknown")[:40],
        idempotency_key=request.headers.get("x-idempotency-key"),
        weights_access_token=request.headers.get("x-tinker-weights-access-token"),
    )


Incoming = Annotated[Call, Depends(incoming)]

AccessScope = Literal["owned", "accessible"]
Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]
