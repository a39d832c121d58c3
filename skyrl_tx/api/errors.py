"""What a route answers when it cannot do what was asked: always `{"detail": text}`."""

from collections.abc import Mapping
from http import HTTPStatus


class ApiError(Exception):
    """An answer other than success; `detail` is written for the person who made the call."""

    def __init__(self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


def bad_request(detail: str) -> ApiError:
    """The call itself cannot be read or contradicts what is stored."""
    return ApiError(HTTPStatus.BAD_REQUEST, detail)


def not_found(detail: str) -> ApiError:
    """An id that never existed, or belongs to someone else."""
    return ApiError(HTTPStatus.NOT_FOUND, detail)


def too_large(detail: str) -> ApiError:
    """More bytes than this server is willing to hold."""
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
