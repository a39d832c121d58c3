"""HTTP errors. The body of every error response is `{"detail": text}`."""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Literal

from skyrl_tx.contract.errors import MAX_MESSAGE_CHARS
from skyrl_tx.process.text import make_visible

Refusal = Literal[
    "missing_key",
    "wrong_key",
    "ended_key",
    "throttled",
    "scope",
    "queue_full",
    "bodies_full",
    "calls_full",
    "quota",
    "stored_bytes",
]
"""Labels of refused requests in the metrics.

Either the API key of the request does not permit it, or the client should send it again later.
"""


class ApiError(Exception):
    """An HTTP error response. `detail` is shown to the person who made the call.

    `reason` is the label in the metrics. Errors without a reason are not counted. `field` is the
    path of the field that is wrong, if there is one.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        reason: Refusal | None = None,
        field: str | None = None,
    ) -> None:
        self.status = status
        self.detail = make_visible(detail, MAX_MESSAGE_CHARS)
        super().__init__(self.detail)
        self.headers = headers
        self.reason: Refusal | None = reason
        self.field = field


bad_request = partial(ApiError, HTTPStatus.BAD_REQUEST)
"""400: the request cannot be parsed, or contradicts stored data."""
not_found = partial(ApiError, HTTPStatus.NOT_FOUND)
"""404: there is no object with this id, or it belongs to another owner."""
too_large = partial(ApiError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""413: the body exceeds a limit."""


def too_many_requests(detail: str, *, reason: Refusal, retry_after_s: int = 1) -> ApiError:
    """429: the request was refused, and the client sends it again later.

    The SDK's sampling client then also pauses before it sends other requests
    (SDK 0.38, lib/public_interfaces/sampling_client.py).
    """
    headers = {"Retry-After": str(retry_after_s), "X-Tinker-Sampling-Backpressure": "1"}
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, headers=headers, reason=reason)
