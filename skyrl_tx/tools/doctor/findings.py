"""The findings of checks: what `skyrl-tx doctor` prints."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyrl_tx.launch.settings import ServerSettings

Level = Literal["ok", "warning", "error"]
STATUS: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}
"""The exit status of the command, by the worst level of all findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, for example that the disk is nearly full."""

    check: str
    """The subject of the finding, for example `disk`."""
    level: Level
    message: str
    advice: str = ""
    """The advice to the operator. Empty if the level is `ok`."""


class ExaminedServer(NamedTuple):
    """The server that the checks examine. It need not be running."""

    settings: ServerSettings
    """The settings of the server. `base_model` is empty if the command line names no model."""
    server_pids: dict[str, int]
    """The process ids of the server if it is running, by role: `api` and `engine`."""


def ok(check: str, message: str) -> Finding:
    """Make a finding that needs no action."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, advice: str) -> Finding:
    """Make a finding about something that works, but badly or not for long."""
    return Finding(check, "warning", message, advice)


def error(check: str, message: str, advice: str) -> Finding:
    """Make a finding about something that does not work."""
    return Finding(check, "error", message, advice)


def get_worst_level(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings; `ok` if there are none."""
    levels = {finding.level for finding in findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"


def format_findings(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the findings as lines of text. Advice follows its finding on a line that starts with an arrow."""
    for finding in findings:
        yield f"{finding.level:<8} {finding.check:<9} {finding.message}"
        if finding.advice:
            yield f"{'':<18} → {finding.advice}"
