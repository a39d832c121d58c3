"""The rows of the table: what a row is, how it runs within its time limit, and its result."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tinker

if TYPE_CHECKING:
    from skyrl_tx.tools.conformance.server import Server

Status = Literal["pass", "fail", "not offered", "not run"]
Check = Callable[["Server"], object]
"""Checks one promise on a server, and raises an exception if the server fails. A returned text is a detail."""

_REFUSALS = (tinker.NotFoundError, tinker.PermissionDeniedError, tinker.AuthenticationError, tinker.BadRequestError)


class Mismatch(Exception):
    """The server did something else than the row expects. The message has the values."""


class Skip(Exception):
    """The SDK or the server has no such feature, or the row cannot run on this machine."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceRow:
    """One promise of the Tinker API, and the function that checks it.

    The check sends and samples at most `tokens` tokens. If a server refuses an optional feature,
    the result is `not offered`.
    """

    group: str
    title: str
    check: Check
    tokens: int = 0
    is_optional: bool = False

    @property
    def name(self) -> str:
        """The name that the table shows and that `--only` selects."""
        return f"{self.group}: {self.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a row."""

    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0


class ConformanceTable(list[ConformanceRow]):
    """A list of rows, with a decorator that adds them."""

    def row(
        self, group: str, title: str = "", *, tokens: int = 0, is_optional: bool = False
    ) -> Callable[[Check], Check]:
        """Return a decorator that adds a check as a row. The title is its docstring, if none is given."""

        def add(check: Check) -> Check:
            own = title or (check.__doc__ or "").rstrip(".")
            self.append(ConformanceRow(group=group, title=own, check=check, tokens=tokens, is_optional=is_optional))
            return check

        return add


def expect(condition: object, message: str) -> None:
    """Raise Mismatch with the message unless the condition holds."""
    if not condition:
        raise Mismatch(message)


def is_refusal(error: Exception) -> bool:
    """Return whether a server has refused a call because of the call, and not because the server failed."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category == tinker.types.RequestErrorCategory.User
    return isinstance(error, _REFUSALS)


def run_row(row: ConformanceRow, server: "Server", timeout_s: float) -> tuple[Result, bool]:
    """Run a row on its own thread, and return its result and whether its time limit passed.

    A thread cannot be ended from outside. If the limit passes, the thread remains and its result is ignored.
    """
    outcome: list[tuple[Status, str]] = []
    begin = time.monotonic()
    thread = threading.Thread(target=lambda: outcome.append(_check(row, server)), daemon=True)
    thread.start()
    thread.join(timeout_s)

    is_late = not outcome
    status, detail = ("fail", f"no result within {timeout_s:g} s") if is_late else outcome[0]
    return Result(name=row.name, status=status, detail=detail, seconds=time.monotonic() - begin), is_late


def _check(row: ConformanceRow, server: "Server") -> tuple[Status, str]:
    try:
        return "pass", str(row.check(server) or "")
    except Skip as reason:
        return reason.status, str(reason)
    except Exception as error:
        # Everything that a check raises is a finding about the server, also an exception of the SDK.
        kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
        return "not offered" if row.is_optional and is_refusal(error) else "fail", f"{kind}{error}"
