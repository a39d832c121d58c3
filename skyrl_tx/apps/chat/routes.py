"""Routes of the OpenAI and Anthropic endpoints, and the refusal of what these do not offer."""

from http import HTTPStatus

from fastapi import APIRouter, Request

from skyrl_tx.apps.chat.anthropic import count_tokens, messages
from skyrl_tx.apps.chat.chat_completions import chat_completions
from skyrl_tx.apps.chat.completions import completions
from skyrl_tx.apps.chat.errors import ANTHROPIC_PREFIX, OPENAI_PREFIXES
from skyrl_tx.apps.chat.models import get_model, list_models
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


def create_routers() -> list[APIRouter]:
    """Return a router for each prefix, which refuses all paths that are not offered below it."""
    # The second prefix of OpenAI's endpoints is an alias.
    offered = [(prefix, openai, prefix == OPENAI_PREFIXES[0]) for prefix in OPENAI_PREFIXES]
    routers: list[APIRouter] = []
    for prefix, endpoints, in_schema in (*offered, (ANTHROPIC_PREFIX, anthropic, True)):
        router = APIRouter(prefix=prefix)
        router.include_router(endpoints, include_in_schema=in_schema)
        router.add_api_route("/{path:path}", _refusal(prefix, endpoints), methods=_METHODS, include_in_schema=False)
        routers.append(router)
    return routers


def _refusal(prefix: str, router: APIRouter):
    offered = ", ".join(f"{prefix}{getattr(route, 'path_format', '')}" for route in router.routes)

    async def refuse(path: str, request: Request, caller: Caller) -> None:
        """Refuse every path that no router serves."""
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{request.method} {prefix}/{path} is not offered by this server; offered are {offered}",
        )

    return refuse
