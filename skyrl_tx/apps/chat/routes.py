"""Routes of the OpenAI and Anthropic endpoints, including the list of models.

All other paths get a 404 response.
"""

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import APIRouter, Request
from fastapi.responses import Response

from skyrl_tx.apps.chat import schemas
from skyrl_tx.apps.chat.anthropic import count_tokens, create_message
from skyrl_tx.apps.chat.chat_completions import create_chat_completion
from skyrl_tx.apps.chat.completions import create_completion
from skyrl_tx.apps.chat.models import find_weights, list_sampler_checkpoints
from skyrl_tx.apps.chat.reply import make_json_response
from skyrl_tx.server.context import ApiCall, Incoming
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import Caller
from skyrl_tx.server.schemas.base import describe_body

OPENAI_PREFIXES = ("/oai/api/v1", "/v1")
ANTHROPIC_PREFIX = "/anthropic/api/v1"
_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]
_STARTED_AT = int(time.time())
"""Returned as the creation time of the served model."""


def list_models(call: Incoming) -> Response:
    """List the names of the served model, then the caller's sampler checkpoints, newest first."""
    rows = call.store.read(lambda tx: list_sampler_checkpoints(tx, call.caller))
    served = [_describe_model(call, name, _STARTED_AT) for name in call.settings.model_names]
    saved = [_describe_model(call, str(row.path), int(row.created_at)) for row in rows]
    return make_json_response({"object": "list", "data": [*served, *saved]})


def get_model(call: Incoming, model_id: str) -> Response:
    """Describe one model. Returns 404 for a name that requests cannot use as `model`."""
    path = find_weights(call, model_id).path
    return make_json_response(_describe_model(call, model_id, _STARTED_AT, None if path is None else str(path)))


def _describe_model(call: ApiCall, name: str, created: int, path: str | None = None) -> dict[str, object]:
    model: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "skyrl_tx"}
    return model if path is None else model | {"root": path, "parent": call.settings.public_model_name}


openai, anthropic = APIRouter(), APIRouter()
for router, path, endpoint, body in (
    (openai, "/chat/completions", create_chat_completion, schemas.ChatCompletionRequest),
    (openai, "/completions", create_completion, schemas.CompletionRequest),
    (anthropic, "/messages", create_message, schemas.MessagesRequest),
    (anthropic, "/messages/count_tokens", count_tokens, schemas.CountTokensRequest),
):
    router.add_api_route(path, endpoint, methods=["POST"], response_model=None, **describe_body(body))
for path, endpoint in (("/models", list_models), ("/models/{model_id:path}", get_model)):
    openai.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    openai.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def create_routers() -> list[APIRouter]:
    """Create a router for each prefix. Each router returns 404 for unknown paths below its prefix."""
    # The reference documents only the first prefix of OpenAI's endpoints; the second is an alias
    offered = [(prefix, openai, prefix == OPENAI_PREFIXES[0]) for prefix in OPENAI_PREFIXES]
    routers: list[APIRouter] = []
    for prefix, endpoints, in_schema in (*offered, (ANTHROPIC_PREFIX, anthropic, True)):
        router = APIRouter(prefix=prefix)
        router.include_router(endpoints, include_in_schema=in_schema)
        router.add_api_route(
            "/{path:path}", _create_not_found(prefix, endpoints), methods=_METHODS, include_in_schema=False
        )
        routers.append(router)
    return routers


def _create_not_found(prefix: str, router: APIRouter) -> Callable[[str, Request, Caller], Awaitable[None]]:
    paths = dict.fromkeys(f"{prefix}{getattr(route, 'path_format', '')}" for route in router.routes)
    offered = ", ".join(paths)

    async def refuse(path: str, request: Request, caller: Caller) -> None:
        """Return 404 for every path that has no endpoint, with the list of endpoints."""
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{request.method} {prefix}/{path} is not offered by this server, which offers {offered}",
        )

    return refuse
