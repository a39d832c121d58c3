"""Why an engine process ended, whether that was a crash, and when it is started again."""

import logging
import signal
from dataclasses import dataclass
from pathlib import Path

from skyrl_tx.artifacts import ArtifactsUnreachable
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.process.signals import EXIT_STATUS
from skyrl_tx.store import StoreError, StoreInUse, StoreUnreachable

_log = logging.getLogger(__name__)

_MAX_DELAY_S = 15.0

_CRASH_SIGNALS = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that a process causes itself.

Other signals come from outside, except SIGKILL if memory was exhausted.
"""

_EXPECTED_ERRORS = (RequestError, StoreError, StoreInUse, OSError, ValueError)
"""Errors caused by a wrong path, model or setting.

Their message is sufficient without a traceback.
"""


class EngineLost(Exception):
    """The backend or the database was lost. A new process continues from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """Why an engine process ended."""

    message: str
    is_final: bool
    """Whether a restart would fail in the same way, for example because a setting is wrong."""
    is_crash: bool
    """Whether the engine's own work caused the end.

    False for a kill from outside and for a lost database.
    """
    was_killed: bool = False
    """Whether a signal from outside ended the process."""
    was_unreachable: bool = False
    """Whether the database or the object store could not be reached.

    A restart may succeed later.
    """

    @classmethod
    def from_exit_code(cls, exit_code: int, was_memory_exhausted: bool) -> "EngineEnd":
        """Return why a process ended, if the process itself could not report the reason.

        A negative exit code is the number of a signal, for example -9 for SIGKILL.
        """
        if exit_code == EXIT_STATUS:
            message = "one of its threads ended; its log says why"
            return cls(message=message, is_final=False, is_crash=False)
        if exit_code == 0:
            return cls(message="stopped by a signal", is_final=False, is_crash=False, was_killed=True)
        if exit_code > 0:
            return cls(message=f"exited with status {exit_code}", is_final=False, is_crash=True)

        number = signal.Signals(-exit_code)
        is_memory = number is signal.SIGKILL and was_memory_exhausted
        message = f"killed by {number.name}" + (
            ", because the machine or its cgroup had no free memory" if is_memory else ""
        )
        is_crash = is_memory or number in _CRASH_SIGNALS
        return cls(message=message, is_final=False, is_crash=is_crash, was_killed=not is_crash)

    @classmethod
    def from_error(cls, error: Exception) -> "EngineEnd":
        """Return the end that an error causes, with a message of one line.

        Logs unexpected errors with their traceback.
        """
        message = explain_os_error(error) if isinstance(error, OSError) else " ".join(str(error).split())
        if isinstance(error, _EXPECTED_ERRORS) and message:
            _log.debug("the engine failed", exc_info=error)
        else:
            _log.error("the engine failed", exc_info=error)
            message = message if isinstance(error, CannotServe) else f"{type(error).__name__}: {message}"
        return cls(
            message=message,
            is_final=not isinstance(error, EngineLost),
            is_crash=not isinstance(error.__cause__ or error, (StoreError, StoreInUse, OSError)),
            was_unreachable=isinstance(error.__cause__, (StoreUnreachable, ArtifactsUnreachable)),
        )


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory. 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()  # the counter includes kills within a cgroup
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class RestartPolicy:
    """Exponential backoff between restarts, with a limit for starts without progress."""

    def __init__(self, max_starts: int, *, first_delay_s: float = 0.25) -> None:
        self._max_starts = max_starts
        self._first_delay_s = first_delay_s
        self._starts_without_progress = 0

    def compute_next_delay_s(self, *, made_progress: bool) -> float | None:
        """Return the seconds to wait before the next start, or None to give up."""
        self._starts_without_progress = 1 if made_progress else self._starts_without_progress + 1
        if self._starts_without_progress >= self._max_starts:
            return None
        return min(self._first_delay_s * 2 ** (self._starts_without_progress - 1), _MAX_DELAY_S)
