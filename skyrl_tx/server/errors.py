"""HTTP errors, which all have the body `{"detail": text}`."""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Literal

Refusal = Literal["missing_key", "wrong_key", "ended_key", "throttled", "scope", "queue_full", "bodies_full", "quota"]
"""The refusals that the metrics count: of keys, and of requests that must come later."""


class ApiError(Exception):
    """An HTTP error response. `detail` is written for the person who made the call.

    `reason` is the label under which the metrics count it, if they do.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        reason: Refusal | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.reason: Refusal | None = reason


bad_request = partial(ApiError, HTTPStatus.BAD_REQUEST)
"""The call cannot be read, or contradicts stored data."""
not_found = partial(ApiError, HTTPStatus.NOT_FOUND)
"""An id does not exist, or belongs to another owner."""
too_large = partial(ApiError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""The body exceeds the limit."""
