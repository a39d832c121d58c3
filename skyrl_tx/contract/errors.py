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


class MemoryExhausted(CapacityError):
    """A pass had too little memory on this host among several, and goes on in smaller parts when it is called again.

    Rank 0 calls it again if all hosts have raised this in the same call, with the same plan.
    """

    def __init__(self, message: str, *, plan: str) -> None:
        """`plan` says what the pass computes next, in any form that is the same on every host."""
        super().__init__(message)
        self.plan = plan


class BackendLost(Exception):
    """The state on the device is lost. The engine process must exit."""
