"""HTTP errors, which all have the body `{"detail": text}`."""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus


class ApiError(Exception):
    """An HTTP error response. `detail` is written for the person who made the call."""

    def __init__(self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


bad_request = partial(ApiError, HTTPStatus.BAD_REQUEST)
"""The call cannot be read, or contradicts stored data."""
not_found = partial(ApiError, HTTPStatus.NOT_FOUND)
"""An id does not exist, or belongs to another owner."""
too_large = partial(ApiError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""The body exceeds the limit."""
