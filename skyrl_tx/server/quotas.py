"""The pace of samples: one beyond a quota of its owner, key or project is refused until later (429).

A sample counts when it is sent: as one request, and with its prompt and as many new tokens as it may draw. Each process
counts by itself.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from skyrl_tx.apps.chat.limits import EngineLimits
from skyrl_tx.apps.teams.amounts import amount_text
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import Request, Sample
from skyrl_tx.server.errors import ApiError
from skyrl_tx.store import allowances, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Account, Limit, Quota, Subject

_PERIODS_S: dict[Limit, float] = {"sample_tokens_per_minute": 60.0, "sample_requests_per_second": 1.0}
_MAX_WAIT_S = 60
_FORGET_S = 600.0
_MAX_KNOWN = 20_000


class Spending(NamedTuple):
    """The amount that a sample counts for a quota: its tokens, or 1 for its request."""

    quota: Quota
    amount: int


@dataclass(slots=True)
class _Spent:
    """The amount that counts at a time; it decreases by the quota each period."""

    amount: float
    at: float

    def left(self, quota: Quota, now: float) -> float:
        """Return the amount that still counts at a time."""
        return max(0.0, self.amount - (now - self.at) * quota.value / _PERIODS_S[quota.limit])


class SamplePace:
    """The amounts that count for each subject with a quota of a minute or a second. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent: dict[tuple[Subject, Limit], _Spent] = {}

    def spend(self, spendings: Sequence[Spending]) -> None:
        """Count a sample. Raises ApiError 429 if it exceeds a quota; then it counts for none.

        A sample that exceeds a quota by itself may start when nothing else counts, and delays later ones.
        """
        now = self._clock()
        with self._lock:
            left = [self._left(each.quota, now) for each in spendings]
            for each, before in zip(spendings, left, strict=True):
                _check(each, before)
            if len(self._spent) >= _MAX_KNOWN:
                self._spent = {key: each for key, each in self._spent.items() if now - each.at < _FORGET_S}
            for (quota, amount), before in zip(spendings, left, strict=True):
                self._spent[quota.subject, quota.limit] = _Spent(before + amount, now)

    def refund(self, spendings: Sequence[Spending]) -> None:
        """Take back what did not become a request."""
        now = self._clock()
        with self._lock:
            for quota, amount in spendings:
                self._spent[quota.subject, quota.limit] = _Spent(max(0.0, self._left(quota, now) - amount), now)

    def _left(self, quota: Quota, now: float) -> float:
        spent = self._spent.get((quota.subject, quota.limit))
        return 0.0 if spent is None else spent.left(quota, now)


def _check(spending: Spending, before: float) -> None:
    (subject, limit, value, _), amount = spending
    excess = before + min(amount, value) - value
    if excess <= 0:
        return
    wait_s = min(max(1, math.ceil(excess * _PERIODS_S[limit] / value)), _MAX_WAIT_S)
    if limit == "sample_tokens_per_minute":
        used = f"asked for {amount_text(round(before))} of {amount_text(value)} sample tokens a minute"
        this = f"this request for {amount_text(amount)} more"
    else:
        used, this = f"sent {amount_text(value)} sample requests in a second, as many as it may", "this is one more"
    raise ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{limit}: {subject.label} has {used}, and {this}: send it in {wait_s} s",
        # The SDK pauses after a 429 with this header (0.38, lib/public_interfaces/sampling_client.py).
        headers={"Retry-After": str(wait_s), "X-Tinker-Sampling-Backpressure": "1"},
        reason="quota",
    )


class Quotas:
    """The quotas that the API looks at before it stores a request. Without any, a request costs no query."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._limits = EngineLimits(store)
        self._pace = SamplePace()
        self.view = QuotaView(store)

    @contextmanager
    def sampling(
        self, owner: str, key_id: int | None, session_id: SessionId, key: str, request: Request
    ) -> Generator[Callable[[], None]]:
        """Count a sample. The context calls what it receives once the sample is stored as a new request.

        Raises ApiError 429 if it exceeds a quota, unless the request with this idempotency key is stored already.
        """
        spendings = self._of_sample(owner, key_id, session_id, request) if self.view.rules.has(*_PERIODS_S) else ()
        if not spendings:
            yield lambda: None
            return
        try:
            self._pace.spend(spendings)
        except ApiError:
            if not key or not self._is_stored(futures.request_id(key)):
                raise
            yield lambda: None
            return
        kept: list[bool] = []
        try:
            yield lambda: kept.append(True)
        finally:
            if not kept:
                self._pace.refund(spendings)

    def pause_of(self, request_id: RequestId, pauses: Collection[Pause]) -> str | None:
        """Return for which of the published pauses a request waits, as a sentence; None if for none of them."""
        found = self._store.read(lambda tx: allowances.waiting_account(tx, request_id))
        if found is None:
            return None
        is_sample, account = found
        subjects = set(account.subjects())
        reasons = (
            pause.reason
            for pause in pauses
            if pause.concerns_training is not is_sample and pause.quota_subject in subjects
        )
        return next(reasons, None)

    def _is_stored(self, request_id: RequestId) -> bool:
        ids = [request_id]
        return self._store.read(lambda tx: bool(futures.owners_of_open(tx, ids) or futures.statuses(tx, ids)))

    def _of_sample(self, owner: str, key_id: int | None, session_id: SessionId, request: Request) -> Sequence[Spending]:
        """Return what a request counts, for each quota that applies; nothing if it is no valid sample."""
        if not isinstance(request, Sample):
            return ()
        rules, project_id = self.view.rules, None
        if rules.has(*_PERIODS_S, kinds=("project",)):
            account = self._store.read(lambda tx: allowances.account_of(tx, session_id))
            project_id = account and account.project_id
        account = Account(owner, key_id, project_id)
        tokens = [
            Spending(quota, self._tokens(request)) for quota in rules.of_account("sample_tokens_per_minute", account)
        ]
        return [*tokens, *(Spending(quota, 1) for quota in rules.of_account("sample_requests_per_second", account))]

    def _tokens(self, request: Sample) -> int:
        most = request.params.max_tokens
        if most is None:
            most = max(1, (self._limits.current().max_context_length or 0) - request.prompt.size)
        return request.prompt.size + request.num_samples * most
