"""Sample tokens a minute: a sample beyond the quota of its owner, key or project is refused until later (429).

A sample counts when it is sent, with its prompt and as many new tokens as it may draw. Each process counts by itself.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from skyrl_tx.amounts import amount_text
from skyrl_tx.api.chat.limits import EngineLimits
from skyrl_tx.api.errors import ApiError
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.contract.requests import Request, Sample
from skyrl_tx.store import allowances, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.quota_view import QuotaView
from skyrl_tx.store.quotas import Account, Quota, Subject

_LIMIT = "sample_tokens_per_minute"
_MINUTE_S = 60.0
_MAX_WAIT_S = 60
_MAX_SUBJECTS = 10_000


@dataclass(slots=True)
class _Spent:
    """The tokens that count at a time; they decrease by the quota each minute."""

    tokens: float
    at: float

    def left(self, value: int, now: float) -> float:
        """Return the tokens that still count at a time."""
        return max(0.0, self.tokens - (now - self.at) * value / _MINUTE_S)


class SampleTokens:
    """The sample tokens of the last minute, of each subject with a quota. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent: dict[Subject, _Spent] = {}

    def spend(self, quotas: list[Quota], tokens: int) -> None:
        """Count tokens. Raises ApiError 429 if they exceed a quota; then they count for none.

        A sample that exceeds a quota by itself may start when nothing else counts, and delays later ones.
        """
        now = self._clock()
        with self._lock:
            left = [self._left(quota, now) for quota in quotas]
            for quota, before in zip(quotas, left, strict=True):
                self._check(quota, before, tokens)
            if len(self._spent) >= _MAX_SUBJECTS:
                self._spent = {name: each for name, each in self._spent.items() if now - each.at < 10 * _MINUTE_S}
            for quota, before in zip(quotas, left, strict=True):
                self._spent[quota.subject] = _Spent(before + tokens, now)

    def refund(self, quotas: list[Quota], tokens: int) -> None:
        """Take tokens back that did not become a request."""
        now = self._clock()
        with self._lock:
            for quota in quotas:
                self._spent[quota.subject] = _Spent(max(0.0, self._left(quota, now) - tokens), now)

    def _left(self, quota: Quota, now: float) -> float:
        spent = self._spent.get(quota.subject)
        return 0.0 if spent is None else spent.left(quota.value, now)

    def _check(self, quota: Quota, before: float, tokens: int) -> None:
        excess = before + min(tokens, quota.value) - quota.value
        if excess <= 0:
            return
        wait_s = min(max(1, math.ceil(excess * _MINUTE_S / quota.value)), _MAX_WAIT_S)
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{_LIMIT}: {quota.subject.label} has asked for {amount_text(round(before))} of {amount_text(quota.value)} "
            f"sample tokens a minute, and this request for {amount_text(tokens)} more: send it in {wait_s} s",
            # The SDK pauses after a 429 with this header (0.38, lib/public_interfaces/sampling_client.py).
            headers={"Retry-After": str(wait_s), "X-Tinker-Sampling-Backpressure": "1"},
            reason="quota",
        )


class Quotas:
    """The quotas that the API looks at before it stores a request. Without any, a request costs no query."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._limits = EngineLimits(store)
        self._sample_tokens = SampleTokens()
        self.view = QuotaView(store)

    @contextmanager
    def sampling(
        self, owner: str, key_id: int | None, session_id: SessionId, key: str, request: Request
    ) -> Generator[Callable[[], None]]:
        """Count the tokens of a sample. The context calls what it receives once the sample is stored as a new request.

        Raises ApiError 429 if they exceed a quota, unless the request with this idempotency key is stored already.
        """
        quotas = self._of_sample(owner, key_id, session_id) if self.view.rules.has(_LIMIT) else []
        if not quotas or not isinstance(request, Sample):
            yield lambda: None
            return
        tokens = self._tokens(request)
        try:
            self._sample_tokens.spend(quotas, tokens)
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
                self._sample_tokens.refund(quotas, tokens)

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

    def _of_sample(self, owner: str, key_id: int | None, session_id: SessionId) -> list[Quota]:
        rules, project_id = self.view.rules, None
        if rules.has(_LIMIT, kinds=("project",)):
            account = self._store.read(lambda tx: allowances.account_of(tx, session_id))
            project_id = account and account.project_id
        return rules.of_account(_LIMIT, Account(owner, key_id, project_id))

    def _tokens(self, request: Sample) -> int:
        most = request.params.max_tokens
        if most is None:
            most = max(1, (self._limits.current().max_context_length or 0) - request.prompt.size)
        return request.prompt.size + request.num_samples * most
