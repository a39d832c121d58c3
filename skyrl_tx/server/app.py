"""The HTTP application (`create_app`) and the uvicorn server that runs it (`ApiServer`)."""

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from skyrl_tx import __version__
from skyrl_tx.artifacts import open_artifacts
from skyrl_tx.contract.errors import UserError
from skyrl_tx.process.setup import listen
from skyrl_tx.server.context import ApiContext, ServerExtension
from skyrl_tx.server.engine_status import AdmissionControl, EngineHealth
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.connections import Connections, HttpProtocol, Listener, compute_max_connections
from skyrl_tx.server.http.long_poll import LongPollMiddleware, ResultWatcher
from skyrl_tx.server.http.request_guard import RequestGuard, TrustedProxies
from skyrl_tx.server.identity.authentication import OWNER, Authenticator, Caller, SigningKey
from skyrl_tx.server.identity.scopes import API_PREFIX as _PREFIX
from skyrl_tx.server.monitoring import ApiMetrics, ServerMonitor
from skyrl_tx.server.routes import (
    downloads,
    futures,
    runs,
    sampling,
    service,
    sessions,
    training,
    uploads,
    weights,
)
from skyrl_tx.server.schemas.base import make_body_schemas
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.shares import Shares, StoredBytes
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import StoreError, ValueRefused
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 75
_BACKLOG = 4096
_DATABASE_FAILED = "the database is not available; see the server's log"
"""Says nothing about the database, because callers without a key may read it."""
_OBJECT_STORE_TIMEOUT_S = 2.0
"""Time limit for calls of an object store on which a client waits, except downloads."""
_LOG_PERIOD_S = 60.0
"""Minimum time between two log lines about the same error of the database."""
_MAX_LOGGED = 100
_TICKS_PER_CHECK = 5
_TICK_S = 0.1
"""Interval at which uvicorn calls `on_tick`, in seconds."""
ROUTERS = (
    futures.router,
    sampling.router,
    training.router,
    service.router,
    sessions.router,
    weights.router,
    runs.router,
    downloads.router,
    uploads.router,
)
"""The routers below `/api/v1` in matching order. The most frequently called routers come first."""


def create_context(
    settings: ApiSettings, store: Store, extensions: Mapping[str, ServerExtension] | None = None
) -> ApiContext:
    """Create the components of an API process. `extensions` are the optional features by name."""
    signing_key, metrics, results = SigningKey.from_data_dir(settings.data_dir), ApiMetrics(), ResultWatcher(store)

    features = (extensions or {}).values()
    counts = [feature.count_stored_bytes for feature in features if feature.count_stored_bytes is not None]

    # Connect the metrics to their sources.
    metrics.polls_waiting.set_function(lambda: results.num_waiting)
    results.observe_wakeup = metrics.poll_wakeup_s.observe
    store.observe_commits(metrics.store_write_s.observe)

    return ApiContext(
        # Settings and storage
        settings=settings,
        store=store,
        artifacts=open_artifacts(
            settings.data_dir,
            settings.artifacts,
            max_cache_bytes=settings.max_artifact_cache_bytes,
            interactive_timeout_s=_OBJECT_STORE_TIMEOUT_S,
        ),
        # Components
        signing_key=signing_key,
        authenticator=Authenticator(settings, store, signing_key),
        engine=EngineHealth(store, settings.engine_silence_s),
        admission=AdmissionControl(store),
        shares=Shares.divide(settings.request_threads, settings.max_inflight_bytes),
        stored_bytes=StoredBytes(store, [*counts, uploads.Uploads(settings).count_bytes]),
        results=results,
        metrics=metrics,
        extensions=extensions or {},
    )


def create_app(settings: ApiSettings, store: Store, extensions: Mapping[str, ServerExtension] | None = None) -> FastAPI:
    """Create the HTTP application. The caller closes the store.

    `extensions` are the optional features by name.
    """
    context = create_context(settings, store, extensions)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        current_default_thread_limiter().total_tokens = settings.request_threads
        context.results.start()
        yield
        context.results.close()

    # FastAPI's documentation pages are disabled: they load scripts from another host.
    app = FastAPI(title="skyrl_tx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = context
    app.state.logged_at = {}
    app.state.authenticator = context.authenticator
    for name, extension in context.extensions.items():
        if extension.service is not None:
            setattr(app.state, name, extension.service(context))
    _add_routes(app, context)
    _add_error_handling(app, context)
    app.openapi = partial(_describe_api, app)
    return app


def _describe_api(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of the bodies that endpoints parse themselves."""
    if app.openapi_schema is None:
        components = FastAPI.openapi(app)["components"]
        components["schemas"] = make_body_schemas() | components["schemas"]
    return app.openapi_schema or {}


def _add_routes(app: FastAPI, context: ApiContext) -> None:
    """Add all routes in matching order."""
    extensions = context.extensions.values()

    # The endpoints of the Tinker API and of each feature.
    for router in ROUTERS:
        app.include_router(router, prefix=_PREFIX)
    app.include_router(service.metrics_router)
    for extension in extensions:
        for router in extension.routers:
            app.include_router(router)

    # All other paths of the Tinker API.
    app.add_api_route(
        _PREFIX + "/{path:path}",
        _refuse_unknown_endpoint,
        methods=["GET", "POST", "PUT", "DELETE", "PATCH"],
        include_in_schema=False,
    )

    # Web pages.
    for extension in extensions:
        if extension.pages is not None:
            app.router.routes.extend(extension.pages(context))


def _add_error_handling(app: FastAPI, context: ApiContext) -> None:
    """Register the handlers that turn errors into responses.

    Two middlewares run before FastAPI's own error handling, so they get the handler as an argument.
    """
    # The long poll is served by a middleware, and RequestGuard is the outermost layer.
    app.add_middleware(
        LongPollMiddleware,
        path=_PREFIX + "/retrieve_future",
        endpoint=futures.retrieve_future,
        handle_error=_handle_error,
        wait_for_results=context.wait_for_results,
    )
    app.add_middleware(
        RequestGuard,
        settings=context.settings,
        requires_key=context.authenticator.requires_key,
        handle_error=_handle_error,
        groups=context.metrics.http,
    )

    refusals = ApiError, HTTPException, RequestValidationError, UserError, ValueRefused
    for kind in (*refusals, StoreError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _handle_error)


async def _handle_error(request: Request, error: Exception) -> Response:
    """Turn an error into a response in the error format of the called API."""
    response = _make_error_response(request, error)
    context = cast(ApiContext, request.app.state.context)
    for extension in context.extensions.values():
        for prefix, form in extension.error_forms.items():
            if response.body and request.url.path.startswith(prefix):
                return form(response, error)
    return response


async def _refuse_unknown_endpoint(path: str, request: Request, caller: Caller) -> None:
    """Refuse a path below `/api/v1` that no router serves."""
    raise ApiError(HTTPStatus.NOT_FOUND, f"this server has no endpoint {request.method} {_PREFIX}/{path}")


def _log_store_error(request: Request, error: StoreError) -> None:
    """Log an error of the database, the same error at most once a minute.

    While the database is full, for example, every call fails in the same way.
    """
    logged_at: dict[str, float] = request.app.state.logged_at
    if logged_at.get(str(error), -math.inf) >= time.monotonic() - _LOG_PERIOD_S:
        return
    if len(logged_at) >= _MAX_LOGGED:
        logged_at.clear()
    logged_at[str(error)] = time.monotonic()
    owner = {"owner": request.scope.get(OWNER)}
    _log.error("%s %s: %s", request.method, request.url.path, error, extra=owner)


def _make_error_response(request: Request, error: Exception) -> Response:
    """Turn an error into a response with the body `{"detail": text}`.

    An unexpected error is logged with a random reference, and the response contains only the
    reference.
    """
    match error:
        # The body is incomplete, so the request had no effect. No one reads this response.
        case ClientDisconnect():
            _log.info("%s %s: the client disconnected while sending the body", request.method, request.url.path)
            return Response(status_code=HTTPStatus.BAD_REQUEST)

        # Errors of the caller.
        case ApiError():
            if error.reason is not None:
                cast(ApiContext, request.app.state.context).metrics.count_refusal(error.reason)
            return _make_detail_response(error.status, error.detail, error.headers)
        case HTTPException():
            return _make_detail_response(error.status_code, str(error.detail))
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _make_detail_response(
                HTTPStatus.BAD_REQUEST, f"{where}: {first['msg']}, not {quote_value(first.get('input'))}"
            )
        case UserError() | ValueRefused():
            return _make_detail_response(HTTPStatus.BAD_REQUEST, str(error))

        # Errors of the server, which are logged with the owner.
        case StoreError():
            _log_store_error(request, error)
            return _make_detail_response(HTTPStatus.SERVICE_UNAVAILABLE, _DATABASE_FAILED)
        case _:
            reference = secrets.token_hex(4)
            owner = {"owner": request.scope.get(OWNER)}
            failed = "%s %s failed (reference %s)"
            _log.error(failed, request.method, request.url.path, reference, exc_info=error, extra=owner)
            return _make_detail_response(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error; the server's log has it under reference {reference}"
            )


def _make_detail_response(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)


class ApiServer(uvicorn.Server):
    """A uvicorn server with limits on connections. It ends its long polls before it stops."""

    def __init__(
        self, settings: ApiSettings, store: Store, extensions: Mapping[str, ServerExtension] | None = None
    ) -> None:
        self.app = create_app(settings, store, extensions)
        context = cast(ApiContext, self.app.state.context)
        self.monitor = ServerMonitor(
            settings, store, context.metrics, context.results, uploads.Uploads(settings).remove_expired
        )

        # One address may use three quarters of the connections. For example, 10,000 polls of one
        # address need a limit of 14,400 open files.
        max_open = compute_max_connections()
        self.connections = Connections(
            max_open=max_open,
            max_per_address=settings.max_connections_per_address or max(1, max_open * 3 // 4),
            header_timeout_s=settings.header_timeout_s,
            body_timeout_s=settings.body_timeout_s,
            is_exempt=TrustedProxies(settings.trusted_proxies).__contains__,
        )

        super().__init__(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                access_log=False,
                log_config=None,
                # Connections
                backlog=_BACKLOG,
                loop="asyncio",  # uvloop does not call Listener.accept
                http=cast(type[asyncio.Protocol], partial(HttpProtocol, connections=self.connections)),
                ws="none",
                proxy_headers=False,  # RequestGuard evaluates them
                timeout_keep_alive=_KEEP_ALIVE_S,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve on the given sockets, with TCP_NODELAY.

        Without TCP_NODELAY, the body of a response waits until the client has acknowledged the
        head, and clients delay that by 40 ms. asyncio sets the option only on sockets that it
        creates. Connections inherit it from their listening socket.
        """
        given = sockets or [listen(self.config.host, self.config.port)]
        for listener in given:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup([Listener(listener, self.connections) for listener in given])
        if not sockets:
            given[0].close()
        if self.started:
            self.monitor.start()

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of slow clients, twice a second."""
        if counter % _TICKS_PER_CHECK == 0:
            self.connections.close_late(_TICKS_PER_CHECK * _TICK_S)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the long polls, then shut down."""
        cast(ApiContext, self.app.state.context).results.release()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.monitor.close)
