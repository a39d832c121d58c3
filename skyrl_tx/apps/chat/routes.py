"""Routes of the OpenAI and Anthropic endpoints, the list of models, and the refusal of all other paths."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from skyrl_tx.apps.chat.anthropic import count_tokens, create_message
from skyrl_tx.apps.chat.chat_completions import create_chat_completion
from skyrl_tx.apps.chat.completions import create_completion
from skyrl_tx.apps.chat.models import find_weights, list_checkpoints
from skyrl_tx.apps.chat.reply import make_json_response
from skyrl_tx.apps.chat.service import ContextTooLong
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.server.context import ApiCall, ApiError, Incoming
from skyrl_tx.server.identity.authentication import Caller

_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]
_STARTED_AT = int(time.time())
"""Shown as the creation time of the served model."""


def list_models(call: Incoming) -> Response:
    """List the served names, and the caller's sampler checkpoints, the newest first."""
    rows = call.store.read(lambda tx: list_checkpoints(tx, call.caller))
    served = [_describe_model(call, name, _STARTED_AT) for name in call.settings.model_names]
    saved = [_describe_model(call, str(row.path), int(row.created_at)) for row in rows]
    return make_json_response({"object": "list", "data": [*served, *saved]})


def get_model(call: Incoming, model_id: str) -> Response:
    """Describe one model; 404 for a name that `model` may not have."""
    path = find_weights(call, model_id).path
    return make_json_response(_describe_model(call, model_id, _STARTED_AT, None if path is None else str(path)))


def _describe_model(call: ApiCall, name: str, created: int, path: str | None = None) -> dict[str, object]:
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "skyrl_tx"}
    return model if path is None else model | {"root": path, "parent": call.settings.public_model_name}


openai = APIRouter()
openai.add_api_route("/chat/completions", create_chat_completion, methods=["POST"], response_model=None)
openai.add_api_route("/completions", create_completion, methods=["POST"], response_model=None)
openai.add_api_route("/models", list_models, methods=["GET"], response_model=None)
openai.add_api_route("/models/{model_id:path}", get_model, methods=["GET"], response_model=None)

anthropic = APIRouter()
anthropic.add_api_route("/messages", create_message, methods=["POST"], response_model=None)
anthropic.add_api_route("/messages/count_tokens", count_tokens, methods=["POST"], response_model=None)


def create_routers() -> list[APIRouter]:
    """Return a router for each prefix, which refuses all paths that are not offered below it."""
    # The second prefix of OpenAI's endpoints is an alias.
    offered = [(prefix, openai, prefix == OPENAI_PREFIXES[0]) for prefix in OPENAI_PREFIXES]
    routers: list[APIRouter] = []
    for prefix, endpoints, in_schema in (*offered, (ANTHROPIC_PREFIX, anthropic, True)):
        router = APIRouter(prefix=prefix)
        router.include_router(endpoints, include_in_schema=in_schema)
        router.add_api_route(
            "/{path:path}", _create_refusal(prefix, endpoints), methods=_METHODS, include_in_schema=False
        )
        routers.append(router)
    return routers


def _create_refusal(prefix: str, router: APIRouter) -> Callable[[str, Request, Caller], Awaitable[None]]:
    offered = ", ".join(f"{prefix}{getattr(route, 'path_format', '')}" for route in router.routes)

    async def refuse(path: str, request: Request, caller: Caller) -> None:
        """Refuse every path that no router serves."""
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{request.method} {prefix}/{path} is not offered by this server; offered are {offered}",
        )

    return refuse


OPENAI_PREFIXES = ("/oai/api/v1", "/v1")
ANTHROPIC_PREFIX = "/anthropic/api/v1"
_OVERLOADED = 529
"""Anthropic's status for a server that cannot serve now."""
Form = Literal["openai", "anthropic"]

_KEPT_HEADERS = frozenset({"retry-after", "www-authenticate", "x-should-retry"})
_OPENAI_TYPES: Mapping[int, tuple[str, str | None]] = {
    HTTPStatus.BAD_REQUEST: ("invalid_request_error", None),
    HTTPStatus.UNAUTHORIZED: ("invalid_request_error", "invalid_api_key"),
    HTTPStatus.FORBIDDEN: ("invalid_request_error", "insufficient_permissions"),
    HTTPStatus.NOT_FOUND: ("invalid_request_error", "model_not_found"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("invalid_request_error", None),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_exceeded"),
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def give_form(form: Form, response: Response, error: Exception) -> Response:
    """Return the response to an error in the form of an API."""
    detail = str(json.loads(bytes(response.body)).get("detail", ""))
    headers = {name: value for name, value in response.headers.items() if name in _KEPT_HEADERS}
    if response.status_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers.setdefault("retry-after", "5")
    status = response.status_code
    is_away = form == "anthropic" and status == HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(
        describe_error(form, status, detail, error), status_code=_OVERLOADED if is_away else status, headers=headers
    )


def describe_error(form: Form, status: int, detail: str, error: Exception | None = None) -> dict[str, object]:
    """Return the body of an error response."""
    too_long = error if isinstance(error, ContextTooLong) else None
    if form == "anthropic":
        if too_long is not None:
            detail = f"prompt is too long: {too_long.num_prompt} tokens > {too_long.limit} maximum"
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": detail}}
    kind, code = _OPENAI_TYPES.get(status, ("server_error", None))
    if too_long is not None:
        code = "context_length_exceeded"
    if status == HTTPStatus.NOT_FOUND and "not offered" in detail:
        code = None
    field = detail.partition(":")[0].partition(" ")[0]
    param = field if status == HTTPStatus.BAD_REQUEST and field.replace("_", "").replace(".", "").isalnum() else None
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}


def describe_stream_error(form: Form, error: Exception) -> dict[str, object]:
    """Return the body of an error that occurs while a response is streamed."""
    status = error.status if isinstance(error, ApiError) else HTTPStatus.INTERNAL_SERVER_ERROR
    detail = error.detail if isinstance(error, ApiError) else "internal error"
    if isinstance(error, RequestError):
        status, detail = HTTPStatus.BAD_REQUEST, error.message
    return describe_error(form, status, detail, error)
