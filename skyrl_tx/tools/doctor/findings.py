"""Findings of the doctor's checks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyrl_tx.launch.settings import ServerSettings

Level = Literal["ok", "warning", "error"]
STATUS: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}
"""The exit status for the worst level."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check, with what to do about it."""

    check: str
    level: Level
    message: str
    advice: str = ""


class ExaminedServer(NamedTuple):
    """The server that is examined."""

    settings: ServerSettings
    """`base_model` is empty if none was named."""
    server_pids: dict[str, int]
    """The running processes of the data directory by role, `api` and `engine`."""


def ok(check: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, advice: str) -> Finding:
    """Return a finding about something that works, but not well or not for long."""
    return Finding(check, "warning", message, advice)


def error(check: str, message: str, advice: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(check, "error", message, advice)


def get_worst_level(findings: Iterable[Finding]) -> Level:
    """Return the worst level."""
    levels = {finding.level for finding in findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"


def format_findings(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the findings as text."""
    for finding in findings:
        yield f"{finding.level:<8} {finding.check:<9} {finding.message}"
        if finding.advice:
            yield f"{'':<18} → {finding.advice}"
