"""The page `/metrics`: the metrics of this process and those of the engine, for Prometheus."""

import ipaddress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from skyrl_tx.process import exposition
from skyrl_tx.server.context import ApiContext, get_context
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.connections import plain_address
from skyrl_tx.server.http.request_guard import UNTRUSTED

router = APIRouter()
_ENGINE_TIMEOUT_S = 0.8
"""The page responds within a second, also while the engine is stopped."""
_SCOPES = frozenset({"admin", "metrics"})


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, context: Annotated[ApiContext, Depends(get_context)]) -> Response:
    """Return all metrics in the text format of Prometheus, or in OpenMetrics if that is accepted."""
    await _check_access(request, context)
    is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
    engine = await exposition.read_metrics(
        context.settings.data_dir, is_openmetrics=is_openmetrics, timeout_s=_ENGINE_TIMEOUT_S
    )
    context.metrics.engine_up.set(engine is not None)
    own = await run_in_threadpool(exposition.render, context.metrics.registry, is_openmetrics=is_openmetrics)
    return Response(
        own + (engine or b"") + (exposition.END if is_openmetrics else b""),
        headers={"Content-Type": exposition.content_type(is_openmetrics=is_openmetrics)},
    )


async def _check_access(request: Request, context: ApiContext) -> None:
    """Raise ApiError unless everyone may read, the caller is on this machine, or it has a key of a fitting scope."""
    if context.settings.metrics_open:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    credential = request.headers.get("x-api-key", "") or (bearer.strip() if scheme.lower() == "bearer" else "")
    address = "" if request.client is None else request.client.host
    if not credential and _is_loopback(address) and UNTRUSTED not in request.scope:
        return
    principal = await run_in_threadpool(context.authenticator.authenticate, credential, address)
    if principal.scope not in _SCOPES:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"X-API-Key: a key of scope {principal.scope} does not allow GET metrics; it takes scope admin, metrics",
            reason="scope",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(plain_address(address)).is_loopback
    except ValueError:  # a Unix socket, or no address
        return False
