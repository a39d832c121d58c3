"""Exceptions that make a request fail, and their categories."""

from enum import StrEnum

from skyrl_tx.process.text import make_visible

MAX_MESSAGE_CHARS = 2000


class ErrorCategory(StrEnum):
    """The side that has to fix an error: the client or the server.

    See tinker/types/request_error_category.py.
    """

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class RequestError(Exception):
    """One request failed. The client receives the message.

    A message may quote text of the client. Hidden characters in the message are replaced, and a
    long message is truncated, so that every database can store the message.
    """

    category = ErrorCategory.UNKNOWN

    def __init__(self, message: str) -> None:
        self.message = make_visible(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)


class UserError(RequestError):
    """The request is invalid. The message names the field and its value."""

    category = ErrorCategory.USER


class FieldError(UserError):
    """A field of a request is invalid. `field` is its path, for example "messages[2].content"."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ServerError(RequestError):
    """The request is valid, but the server failed to execute it."""

    category = ErrorCategory.SERVER


class CapacityError(ServerError):
    """Memory or slots are exhausted.

    The request may succeed later, when other requests have ended.
    """


class MemoryExhausted(CapacityError):
    """A pass ran out of memory on one of multiple hosts and must continue in smaller parts.

    If all hosts raise this in the same call with the same plan, rank 0 calls the pass again.
    """

    def __init__(self, message: str, *, plan: str) -> None:
        """`plan` describes the next computation, as text that is the same on every host."""
        super().__init__(message)
        self.plan = plan


class BackendLost(Exception):
    """The state on the device is lost. The engine process must exit."""
