"""Notices: warnings and errors of the log, stored in the database for the console."""

import logging
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from sqlalchemy import delete, func, insert, select
from sqlmodel import Session, col

from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store, execute
from skyrl_tx.store.tables import NoticeRow, ProcessName

MAX_NOTICES = 1000
"""How many notices the database keeps."""
_MAX_CHARS = 1000
_MAX_PER_MINUTE = 60
_PERIOD_S = 1.0
_CLOSE_S = 2.0
_SUPERVISOR = "skyrl_tx.launch.supervisor"


@dataclass(frozen=True, slots=True)
class Notice:
    """One log line. `at` is in seconds since the epoch."""

    at: float
    process: ProcessName
    level: str
    text: str


_INSERT = insert(NoticeRow)
_NEWEST = select(func.max(col(NoticeRow.position)))
_COLUMNS = col(NoticeRow.at), col(NoticeRow.process), col(NoticeRow.level), col(NoticeRow.text)


def add(tx: Session, notices: Sequence[Notice]) -> None:
    """Add notices, then delete all but the newest 1,000."""
    values = [
        {"at": notice.at, "process": notice.process, "level": notice.level, "text": notice.text} for notice in notices
    ]
    execute(tx, _INSERT, values)
    newest = execute(tx, _NEWEST).scalar_one() or 0
    execute(tx, delete(NoticeRow).where(col(NoticeRow.position) <= newest - MAX_NOTICES))


def list_newest(tx: Session, limit: int = 200) -> list[Notice]:
    """Return the newest notices, newest first."""
    newest = select(*_COLUMNS).order_by(col(NoticeRow.position).desc()).limit(limit)
    return [Notice(at, cast(ProcessName, process), level, text) for at, process, level, text in execute(tx, newest)]


class _Handler(logging.Handler):
    """Keeps warnings and errors in memory until they are written, at most 60 per minute.

    Further lines are only counted. The next notice reports how many were omitted.
    """

    def __init__(self, process: ProcessName) -> None:
        super().__init__(logging.WARNING)
        self._process: ProcessName = process
        self._waiting: deque[Notice] = deque(maxlen=_MAX_PER_MINUTE)
        self._minute, self._num_in_minute, self._num_omitted = 0, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. The caller holds the handler's lock."""
        # Limit the number of lines per minute.
        minute = int(record.created // 60)
        if minute != self._minute:
            self._minute, self._num_in_minute = minute, 0
        self._num_in_minute += 1
        if self._num_in_minute > _MAX_PER_MINUTE:
            self._num_omitted += 1
            return
        omitted = f" ({self._num_omitted} earlier lines were omitted)" if self._num_omitted else ""
        self._num_omitted = 0

        process: ProcessName = "supervisor" if record.name == _SUPERVISOR else self._process
        text = record.getMessage()
        if len(text) > _MAX_CHARS:
            text = text[: _MAX_CHARS - 1] + "…"
        text = text.replace("\x00", "�")  # PostgreSQL cannot store zero characters
        self._waiting.append(Notice(record.created, process, record.levelname.lower(), text + omitted))

    def take(self) -> list[Notice]:
        """Remove and return the kept notices."""
        with self.lock or threading.Lock():
            taken = list(self._waiting)
            self._waiting.clear()
        return taken


@contextmanager
def record_notices(store: Store, process: ProcessName) -> Generator[None]:
    """Write the warnings and errors of this process to the database while the context is open.

    A separate thread writes them once per second, so that the code that logs does not wait. Notices
    that cannot be written are lost here, but the log has them.
    """
    handler, ended = _Handler(process), threading.Event()
    written: Future[None] | None = None

    def write() -> None:
        nonlocal written
        if written is not None and not written.done():
            return  # the database is full or locked, so the handler keeps the newest notices
        if notices := handler.take():
            with suppress(StoreError):
                written = store.write_soon(lambda tx: add(tx, notices))

    def repeat() -> None:
        while not ended.wait(_PERIOD_S):
            write()

    thread = ServiceThread("notices", repeat)
    logging.getLogger().addHandler(handler)
    thread.start()
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        ended.set()
        thread.join()
        write()
        if written is not None:
            with suppress(StoreError, TimeoutError):
                written.result(_CLOSE_S)
