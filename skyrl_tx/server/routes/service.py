"""Endpoints for client flags, capabilities, health and telemetry."""

from http import HTTPStatus
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Header, Response

from skyrl_tx.apps.history import telemetry_metrics
from skyrl_tx.process import threads
from skyrl_tx.server.context import ApiContext, Incoming, get_context
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.server.submission import custom_losses
from skyrl_tx.store import engine_state

router = APIRouter()
_LIVENESS_TIMEOUT_S = 0.25
"""Time for reading the engine's status: a probe fails after a second, and a slow database is no reason to restart."""
_WITHOUT_PYQWEST = ("3.10.", "3.11.")
"""Versions of Python whose clients use httpx, as they send them with each request.

There `asyncio.wait_for`, around each request of pyqwest's transport (pyqwest/httpx/_transport.py), loses a cancellation
that meets the response (https://github.com/python/cpython/issues/86296, fixed in 3.12). The SDK cancels its polls when
`ServiceClient` is closed and waits for them (`InternalClientHolder._async_cleanup`), then forever: once in some hundred
short programs.
"""


@router.post("/client/config")
def client_config(
    call: Incoming, response: Response, python: Annotated[str, Header(alias="x-stainless-runtime-version")] = ""
) -> schemas.ClientConfigResponse:
    """Return the client flags, which are equal for all SDK releases, but not for all versions of Python.

    The connection ends with the response, because the SDK never closes it (0.38,
    `InternalClientHolder._fetch_client_config`). Where Python's garbage collector runs on another event loop of the
    process, it closes the socket, and `AsyncHttpxClientWrapper.__del__` then ends the connection on that loop. A new
    connection may have got the same file descriptor by then, and the SDK's loop would watch it no more: its request
    waits forever.
    """
    response.headers["Connection"] = "close"
    return schemas.ClientConfigResponse(
        custom_loss_server_side=custom_losses.are_offered(call),
        use_pyqwest_transport=not python.startswith(_WITHOUT_PYQWEST),
    )


@router.post("/client/dynamic_config")
def dynamic_config(call: Incoming) -> dict[str, int | bool]:
    """Return the client flags that the SDK refreshes."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def capabilities(call: Incoming) -> dict[str, list[schemas.SupportedModel]]:
    """List the base models that this server serves, with their context length."""
    state = call.store.read(engine_state.get)
    context_length = None if state is None else cast(int | None, state.capabilities.get("max_context_length"))
    names = call.settings.offered_names
    models = [schemas.SupportedModel(model_name=name, max_context_length=context_length) for name in names]
    return {"supported_models": models}


@router.get("/healthz")
def health(context: Annotated[ApiContext, Depends(get_context)], response: Response) -> dict[str, str]:
    """Report health: 200 while the engine executes requests, 503 with the reason otherwise.

    An activity that takes longer than `engine_silence_s` is reported with 200, because a large step is no outage. So
    are samplers on other servers that are lost, because training goes on.
    """
    report = context.engine.report()
    problem = threads.failure() or report.problem
    if problem is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return {"status": "waiting", "detail": problem}
    return {"status": "ok"} if report.detail is None else {"status": "ok", "detail": report.detail}


@router.get("/livez")
async def liveness(context: Annotated[ApiContext, Depends(get_context)], response: Response) -> dict[str, str]:
    """Report whether this process works: 200 unless one of its threads has died, whatever the engine does."""
    failure = threads.failure()
    if failure is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return {"status": "failed", "detail": failure}
    engine = await context.engine.report_within(_LIVENESS_TIMEOUT_S)
    detail = engine.problem or engine.detail
    return {"status": "ok"} if detail is None else {"status": "ok", "detail": detail}


@router.post("/telemetry")
def telemetry(call: Incoming) -> dict[str, str]:
    """Accept telemetry: keep the metrics that programs log through the SDK, discard all else."""
    telemetry_metrics.keep(call)
    return {"status": "accepted"}
