"""What can go wrong, and whose fault it is."""

from enum import StrEnum


class ErrorCategory(StrEnum):
    """Who has to act (tinker/types/request_error_category.py)."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class RequestError(Exception):
    """A failure that belongs to one request and reaches its caller as text."""

    category = ErrorCategory.UNKNOWN

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UserError(RequestError):
    """The caller's mistake: the text names the field and its value."""

    category = ErrorCategory.USER


class ServerError(RequestError):
    """Ours: the request was sound and could not be served."""

    category = ErrorCategory.SERVER


class CapacityError(ServerError):
    """No room now; the same request may succeed once something else has ended."""


class BackendLost(Exception):
    """Device state is gone: nothing that the backend holds can be trusted any more."""
