"""One log format for every process: time, level, role, request id where there is one, message."""

import logging
import sys
import time
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]


class LogFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO engine [req-…] message`.

    The request id comes from `log.info(…, extra={"request_id": request_id})`.
    """

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is logging's own
        """Put one line before its traceback, if there is one."""
        request_id = getattr(record, "request_id", None)
        where = f"{self._role} [{request_id}]" if request_id else self._role
        return f"{self.formatTime(record)} {record.levelname} {where} {record.message}"


def configure_logging(role: str, level: LogLevel = "info") -> None:
    """Send this process's log to stderr; libraries are heard from warnings on, warnings included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("skyrl_tx").setLevel(level.upper())
    logging.captureWarnings(True)
