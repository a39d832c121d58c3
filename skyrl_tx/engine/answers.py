"""Answers: a result, its effect's number and all rows that change with it, in one transaction."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ErrorCategory, RequestError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import Sample
from skyrl_tx.contract.results import Failure, Result
from skyrl_tx.engine.attempts import Attempts
from skyrl_tx.engine.work import Work
from skyrl_tx.failpoints import reach
from skyrl_tx.store import futures, models
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_TOUCH_PERIOD_S = 5.0  # "last used" is for people; a row less to write matters to the latency of each answer
Rows = Callable[[Session], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request gets. `effect_order` numbers its effect on its model; None: it had none."""

    work: Work
    result: Result
    effect_order: int | None = None


def failure_of(error: Exception) -> Failure:
    """An exception as its request's caller gets to see it."""
    if isinstance(error, RequestError):
        return Failure(message=error.message, category=error.category)
    return Failure(message=f"internal error: {type(error).__name__}: {error}", category=ErrorCategory.SERVER)


class Answers:
    """Writes answers in the order they are given, without waiting for the disk."""

    def __init__(self, store: Store, attempts: Attempts) -> None:
        self._store = store
        self._attempts = attempts
        self._writing: deque[Future[None]] = deque()
        self._touched: dict[ModelId, float] = {}

    def give(self, answers: Sequence[Answer], rows: Rows | None = None) -> None:
        """Answer requests, all in one transaction with `rows`; returns at once."""
        reach("engine.result")
        written = self._store.write_soon(self._commit(answers, rows))
        written.add_done_callback(lambda _: self._forget(answers) if written.exception() is None else None)
        self._writing.append(written)
        reach("engine.answer")

    def give_now(self, answers: Sequence[Answer], rows: Rows | None = None) -> None:
        """As `give`, but wait; what `rows` raises is raised here, and nothing was answered."""
        self._store.write(self._commit(answers, rows))
        self._forget(answers)

    def _forget(self, answers: Sequence[Answer]) -> None:
        self._attempts.forget([answer.work.request_id for answer in answers])

    def settle(self, *, wait: bool = False) -> None:
        """Raise what writing raised; `wait` until all is on disk."""
        while self._writing and (wait or self._writing[0].done()):
            self._writing.popleft().result()

    def _commit(self, answers: Sequence[Answer], rows: Rows | None) -> Callable[[Session], None]:
        encoded = [(answer, codec.encode(answer.result)) for answer in answers]

        def commit(tx: Session) -> None:
            now = time.time()
            for answer, data in encoded:
                self._commit_one(tx, answer, data, now)
            if rows is not None:
                rows(tx)

        return commit

    def _commit_one(self, tx: Session, answer: Answer, data: bytes, now: float) -> None:
        work, failed = answer.work, isinstance(answer.result, Failure)
        if failed:
            _log.debug("%s %s failed: %s", work.kind, work.request_id, answer.result)
        if answer.effect_order is not None:
            assert work.model_id is not None
            counted = models.next_effect(tx, work.model_id)
            assert counted == answer.effect_order, f"effect {answer.effect_order} of {work.model_id} is no. {counted}"
        if not futures.complete(tx, work.request_id, data, failed=failed, effect_order=answer.effect_order, now=now):
            level = logging.DEBUG if isinstance(work.request, Sample) else logging.WARNING  # samples can be cancelled
            _log.log(level, "%s request %s was answered or removed by someone else", work.kind, work.request_id)
        if work.model_id is not None and now - self._touched.get(work.model_id, 0.0) >= _TOUCH_PERIOD_S:
            self._touched[work.model_id] = now
            with suppress(LookupError):
                models.touch(tx, work.model_id, now)
