"""Endpoints for client flags, capabilities, health, telemetry, metrics and the caller's API key."""

import ipaddress
import time
from http import HTTPStatus
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlmodel import Session

from skyrl_tx.process import exposition, signals
from skyrl_tx.server.context import ApiContext, Incoming, get_context
from skyrl_tx.server.errors import ApiError, not_found
from skyrl_tx.server.http.connections import normalize_address
from skyrl_tx.server.http.request_guard import UNTRUSTED
from skyrl_tx.server.identity.authentication import ORGANIZATION, read_credential
from skyrl_tx.server.routes.training import has_custom_losses
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.store import audit, engine_state, keys

router = APIRouter()
metrics_router = APIRouter()
"""The page `/metrics`, which is not below `/api/v1`."""
_LIVENESS_TIMEOUT_S = 0.25
"""Maximum time to read the engine's status for `/livez`, in seconds.

Probes usually fail after a second, and a slow database is no reason to restart this process.
"""
_WITHOUT_PYQWEST = ("3.10.", "3.11.")
"""Python versions whose clients should use httpx. Clients send their version with each request.

pyqwest's transport wraps each request in `asyncio.wait_for` (pyqwest/httpx/_transport.py). Before
Python 3.12, that function loses a cancellation that arrives at the same time as the response
(https://github.com/python/cpython/issues/86296). When `ServiceClient` is closed, the SDK cancels
its polls and waits for them (`InternalClientHolder._async_cleanup`), so it would then wait forever.
This happened about once in a hundred short programs.
"""
_ENGINE_TIMEOUT_S = 0.8
"""Maximum time to wait for the engine's metrics, in seconds.

So the page responds within a second, even if the engine is stopped.
"""
_METRICS_SCOPES = frozenset({"admin", "metrics"})
_REVOKED = "the key has been revoked"
_AUTH_DISABLED = "authentication is disabled on this server"


@router.post("/client/config")
def get_client_config(
    call: Incoming, response: Response, python: Annotated[str, Header(alias="x-stainless-runtime-version")] = ""
) -> schemas.ClientConfigResponse:
    """Return the client flags, which only depend on the client's Python version.

    The response closes the connection, because the SDK never does (0.38,
    `InternalClientHolder._fetch_client_config`). Otherwise Python's garbage collector would close
    the socket some time later, possibly on another event loop of the client, and
    `AsyncHttpxClientWrapper.__del__` would then close the connection on that loop. By then, a new
    connection may have the same file descriptor. The SDK's loop would no longer watch it, and its
    request would wait forever.
    """
    response.headers["Connection"] = "close"
    return schemas.ClientConfigResponse(
        custom_loss_server_side=has_custom_losses(call),
        use_pyqwest_transport=not python.startswith(_WITHOUT_PYQWEST),
    )


@router.post("/client/dynamic_config")
def get_dynamic_config(call: Incoming) -> dict[str, int | bool]:
    """Return the client flags that the SDK refreshes regularly."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def get_capabilities(call: Incoming) -> dict[str, list[schemas.SupportedModel]]:
    """List the base models of this server with their context length."""
    rows = call.store.read(engine_state.list_engines)
    state = engine_state.choose_main_engine(rows)
    context_length = None if state is None else cast(int | None, state.capabilities.get("max_context_length"))
    models = [
        schemas.SupportedModel(
            model_name=name, max_context_length=context_length, sampleable=engine_state.can_sample(rows)
        )
        for name in call.settings.model_names
    ]
    return {"supported_models": models}


@router.get("/healthz")
@router.head("/healthz", include_in_schema=False)
def get_health(context: Annotated[ApiContext, Depends(get_context)], response: Response) -> dict[str, str]:
    """Report health: 200 while the engine executes requests, otherwise 503 with the reason.

    Two problems are only reported as a detail of a 200, because training continues: an activity
    that takes longer than `engine_silence_s`, such as a large training batch, and the loss of
    samplers on other servers.
    """
    report = context.engine.read_report()
    problem = signals.get_failure() or report.problem
    if problem is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return {"status": "waiting", "detail": problem}
    return {"status": "ok"} if report.detail is None else {"status": "ok", "detail": report.detail}


@router.get("/livez")
@router.head("/livez", include_in_schema=False)
async def get_liveness(context: Annotated[ApiContext, Depends(get_context)], response: Response) -> dict[str, str]:
    """Report whether this process works: 200 unless one of its threads has died.

    The state of the engine does not matter.
    """
    failure = signals.get_failure()
    if failure is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return {"status": "failed", "detail": failure}
    engine = await context.engine.get_report_within(_LIVENESS_TIMEOUT_S)
    detail = engine.problem or engine.detail
    return {"status": "ok"} if detail is None else {"status": "ok", "detail": detail}


@router.post("/telemetry")
def accept_telemetry(call: Incoming) -> dict[str, str]:
    """Keep the metrics that programs log through the SDK. Other telemetry is discarded."""
    for extension in call.context.extensions.values():
        if extension.on_telemetry is not None:
            extension.on_telemetry(call)
    return {"status": "accepted"}


@router.post("/auth/token")
def exchange_token(call: Incoming) -> dict[str, str]:
    """Exchange an API key for a token (JWT)."""
    return {"jwt": call.context.authenticator.issue_token(call.caller)}


@router.get("/auth/apikey/me")
def get_own_key(call: Incoming) -> schemas.KeyResponse:
    """Describe the caller's API key."""
    key_id = call.caller.key_id
    details = {"org_details": {"name": ORGANIZATION}, "user_details": {"email": call.caller.owner}}
    if key_id is None:
        return schemas.KeyResponse(key_id=0, name="any", note=_AUTH_DISABLED, details=details)
    row = call.store.read(lambda tx: keys.get(tx, key_id))
    if row is None:
        raise not_found(_REVOKED)
    return schemas.KeyResponse(key_id=key_id, name=row.name, note=row.note, details=details)


@router.delete("/auth/apikey/me", status_code=HTTPStatus.NO_CONTENT)
def revoke_own_key(call: Incoming) -> None:
    """Revoke the caller's API key."""
    key_id = call.caller.key_id
    if key_id is None:
        raise not_found(f"{_AUTH_DISABLED}: there is no key to revoke")

    def work(tx: Session) -> bool:
        now = time.time()
        is_revoked = keys.revoke(tx, key_id, now)
        if is_revoked:
            audit.record(tx, "organization_key_revoked", call.caller.actor, now, key=key_id, owner=call.caller.owner)
        return is_revoked

    if not call.store.write(work):
        raise not_found(_REVOKED)
    call.context.authenticator.clear_cache()


@metrics_router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
async def get_metrics(request: Request, context: Annotated[ApiContext, Depends(get_context)]) -> Response:
    """Return all metrics in the Prometheus text format, or in OpenMetrics if that is accepted."""
    await _check_metrics_access(request, context)
    is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
    engine = await exposition.read_metrics(
        context.settings.data_dir, is_openmetrics=is_openmetrics, timeout_s=_ENGINE_TIMEOUT_S
    )
    context.metrics.engine_up.set(engine is not None)
    api_metrics = await run_in_threadpool(exposition.render, context.metrics.registry, is_openmetrics=is_openmetrics)
    return Response(
        api_metrics + (engine or b"") + (exposition.END if is_openmetrics else b""),
        headers={"Content-Type": exposition.get_content_type(is_openmetrics=is_openmetrics)},
    )


async def _check_metrics_access(request: Request, context: ApiContext) -> None:
    """Raise ApiError unless the caller may read the metrics.

    Programs on this machine may, and keys of scope `admin` or `metrics`. With `--metrics-open`,
    everyone may.
    """
    if context.settings.metrics_open:
        return
    credential = read_credential(request)
    address = "" if request.client is None else request.client.host
    if not credential and _is_loopback(address) and UNTRUSTED not in request.scope:
        return
    principal = await run_in_threadpool(context.authenticator.authenticate, credential, address)
    if principal.scope not in _METRICS_SCOPES:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"X-API-Key: a key of scope {principal.scope} does not allow GET metrics; it needs scope admin or metrics",
            reason="scope",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(normalize_address(address)).is_loopback
    except ValueError:  # a Unix socket, or no address
        return False
