"""Error responses as the OpenAI and Anthropic APIs have them."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

from fastapi.responses import JSONResponse, Response

from skyrl_tx.apps.chat.text import ContextTooLong
from skyrl_tx.contract.errors import FieldError, RequestError
from skyrl_tx.process.text import make_line
from skyrl_tx.server.errors import ApiError

ApiName = Literal["openai", "anthropic"]

_OVERLOADED = 529
"""Anthropic's HTTP status for an overloaded server. Used instead of 503."""
_MAX_PARAM_CHARS = 200
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


def convert_error_response(api: ApiName, response: Response, error: Exception) -> Response:
    """Convert an error response of this server to an error response of an API."""
    detail = str(json.loads(bytes(response.body)).get("detail", ""))
    headers = {name: value for name, value in response.headers.items() if name in _KEPT_HEADERS}
    if response.status_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers.setdefault("retry-after", "5")

    status = response.status_code
    is_overloaded = api == "anthropic" and status == HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(
        describe_error(api, status, detail, error),
        status_code=_OVERLOADED if is_overloaded else status,
        headers=headers,
    )


def describe_error(api: ApiName, status: int, detail: str, error: Exception | None = None) -> dict[str, object]:
    """Return the body of an error response.

    `detail` is the message of this server's own error response.
    """
    # Clients recognize the error for a too long prompt by its text (Anthropic) or code (OpenAI)
    too_long = error if isinstance(error, ContextTooLong) else None
    if api == "anthropic":
        if too_long is not None:
            detail = f"prompt is too long: {too_long.num_prompt} tokens > {too_long.limit} maximum"
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": detail}}

    # OpenAI's `code` of 404 says that a model does not exist, which would mislead for an unknown
    # path
    kind, code = _OPENAI_TYPES.get(status, ("server_error", None))
    if too_long is not None:
        code = "context_length_exceeded"
    if status == HTTPStatus.NOT_FOUND and "not offered" in detail:
        code = None

    # A field can be a key that the client sent
    field = error.field if isinstance(error, ApiError | FieldError) else None
    param = None if field is None else make_line(field, _MAX_PARAM_CHARS)
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}


def describe_stream_error(api: ApiName, error: Exception) -> dict[str, object]:
    """Return the body of an error event, for an error after the response has started."""
    status = error.status if isinstance(error, ApiError) else HTTPStatus.INTERNAL_SERVER_ERROR
    detail = error.detail if isinstance(error, ApiError) else "internal error"
    if isinstance(error, RequestError):
        status, detail = HTTPStatus.BAD_REQUEST, error.message
    return describe_error(api, status, detail, error)
