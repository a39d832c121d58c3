"""Routes of the OpenAI and Anthropic endpoints, and the refusal of what these do not offer."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request

from skyrl_tx.apps.chat.anthropic import count_tokens, messages
from skyrl_tx.apps.chat.chat_completions import chat_completions
from skyrl_tx.apps.chat.completions import completions
from skyrl_tx.apps.chat.errors import ANTHROPIC_PREFIX, OPENAI_PREFIXES
from skyrl_tx.apps.chat.models import get_model, list_models
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import Caller

_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]

openai = APIRouter()
openai.add_api_route("/chat/completions", chat_completions, methods=["POST"], response_model=None)
openai.add_api_route("/completions", completions, methods=["POST"], response_model=None)
openai.add_api_route("/models", list_models, methods=["GET"], response_model=None)
openai.add_api_route("/models/{model_id:path}", get_model, methods=["GET"], response_model=None)

anthropic = APIRouter()
anthropic.add_api_route("/messages", messages, methods=["POST"], response_model=None)
anthropic.add_api_route("/messages/count_tokens", count_tokens, methods=["POST"], response_model=None)


def install(app: FastAPI, context: ApiContext) -> None:
    """Add the endpoints to the application."""
    app.state.chat = ChatService(context)
    for prefix in OPENAI_PREFIXES:
        app.include_router(openai, prefix=prefix, include_in_schema=prefix == OPENAI_PREFIXES[0])
    app.include_router(anthropic, prefix=ANTHROPIC_PREFIX)
    for prefix, router in (*((prefix, openai) for prefix in OPENAI_PREFIXES), (ANTHROPIC_PREFIX, anthropic)):
        app.add_api_route(prefix + "/{path:path}", _refusal(prefix, router), methods=_METHODS, include_in_schema=False)


def _refusal(prefix: str, router: APIRouter):
    offered = ", ".join(f"{prefix}{getattr(route, 'path_format', '')}" for route in router.routes)

    async def refuse(path: str, request: Request, caller: Caller) -> None:
        """Refuse every path that no router serves."""
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{request.method} {prefix}/{path} is not offered by this server; offered are {offered}",
        )

    return refuse
