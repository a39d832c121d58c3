"""The HTTP application: its parts, its routes, its one way to say what went wrong."""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from skyrl_tx import __version__
from skyrl_tx.api.backpressure import SampleBudget
from skyrl_tx.api.context import ApiContext
from skyrl_tx.api.engine_watch import EngineWatch
from skyrl_tx.api.errors import ApiError
from skyrl_tx.api.principal import Caller, Gate
from skyrl_tx.api.routes import (
    absent,
    auth,
    billing,
    copies,
    downloads,
    futures,
    runs,
    sampling,
    search,
    service,
    sessions,
    training,
    weights,
)
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.api.shortcut import Shortcut
from skyrl_tx.api.signing import SigningKey
from skyrl_tx.api.waiters import Waiters
from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError, ValueRefused

_log = logging.getLogger(__name__)
_PREFIX = "/api/v1"
_ROUTERS = (  # looked through in this order: first what is called most
    futures,
    sampling,
    training,
    service,
    auth,
    sessions,
    weights,
    runs,
    downloads,
    copies,
    search,
    billing,
    absent,
)


def create_app(settings: ApiSettings, store: Store) -> FastAPI:
    """Put the HTTP application together; the store stays the caller's to close."""
    signing_key = SigningKey.of(settings.data_dir)
    context = ApiContext(
        settings=settings,
        store=store,
        artifacts=ArtifactStore(settings.data_dir / "artifacts"),
        signing_key=signing_key,
        gate=Gate(settings, store, signing_key),
        engine=EngineWatch(store, settings.engine_silence_s),
        sample_budget=SampleBudget(store),
        waiters=Waiters(store),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        current_default_thread_limiter().total_tokens = settings.request_threads
        context.waiters.start()
        yield
        context.waiters.close()

    app = FastAPI(title="skyrl_tx", version=__version__, lifespan=lifespan)
    app.state.context = context
    app.state.gate = context.gate
    for routes in _ROUTERS:
        app.include_router(routes.router, prefix=_PREFIX)
    app.add_api_route(
        _PREFIX + "/{path:path}",
        _not_offered,
        methods=["GET", "POST", "PUT", "DELETE", "PATCH"],
        include_in_schema=False,
    )
    app.add_middleware(
        Shortcut,
        path=_PREFIX + "/retrieve_future",
        endpoint=futures.retrieve_future,
        answer_error=_answer_error,
        give_way=context.precedence.give_way,
    )
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(StoreError, _answer_error)
    app.add_exception_handler(ValueRefused, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def _not_offered(path: str, request: Request, caller: Caller) -> None:
    """Refuse the rows of the protocol that are still to come, and what is none of them."""
    raise ApiError(HTTPStatus.NOT_FOUND, f"{request.method} {_PREFIX}/{path} is not offered by this server yet")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Say what went wrong as `{"detail": text}`; what nobody foresaw is logged under a reference."""
    match error:
        case ClientDisconnect():  # what it began to say is of no effect, and nobody reads this
            _log.info("%s %s: the client went away amid the body", request.method, request.url.path)
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        case ApiError():
            return _detail(error.status, error.detail, error.headers)
        case HTTPException():
            return _detail(error.status_code, str(error.detail))
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _detail(HTTPStatus.BAD_REQUEST, f"{where}: {first['msg']}, not {shown(first.get('input'))}")
        case ValueRefused():
            return _detail(HTTPStatus.BAD_REQUEST, str(error))
        case StoreError():
            _log.error("%s %s: %s", request.method, request.url.path, error)
            return _detail(HTTPStatus.SERVICE_UNAVAILABLE, f"the database cannot serve now: {error}")
        case _:
            reference = secrets.token_hex(4)
            _log.error("%s %s failed (reference %s)", request.method, request.url.path, reference, exc_info=error)
            return _detail(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error; the server's log has it as {reference}")


def _detail(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)
