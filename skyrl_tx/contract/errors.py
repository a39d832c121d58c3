"""Exceptions with which requests fail, and their categories."""

from enum import StrEnum


class ErrorCategory(StrEnum):
    """The side that has to act on an error (tinker/types/request_error_category.py)."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class RequestError(Exception):
    """A failure of one request, whose message the client receives."""

    category = ErrorCategory.UNKNOWN

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UserError(RequestError):
    """The request is invalid. The message names the field and its value."""

    category = ErrorCategory.USER


class ServerError(RequestError):
    """The request is valid, but the server failed to execute it."""

    category = ErrorCategory.SERVER


class CapacityError(ServerError):
    """Memory or slots are exhausted. The request may succeed later, when others have ended."""


class BackendLost(Exception):
    """The state on the device is lost. The engine process must exit."""
