"""Bounds the bytes of request bodies that are held at the same time, in all and for each owner."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from skyrl_tx.api.errors import ApiError

_MAX_WAIT_S = 20.0
"""Shorter than the 60 s after which the SDK gives up an attempt."""
_SMALL = 2**16
"""Smaller bodies are not counted: the number of connections bounds them, and heartbeats never wait."""
# The SDK sends the request again after a 429, and the sampling client pauses first (0.38, sampling_client.py).
_HEADERS = {"Retry-After": "1", "X-Tinker-Sampling-Backpressure": "1"}


class BodyBudget:
    """A number of bytes that the requests of one event loop share; an owner gets at most half of them.

    A request that needs more than that waits until it is its owner's only one, or the only one of all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, deque[tuple[int, asyncio.Future[None]]]] = defaultdict(deque)

    @property
    def num_bytes(self) -> int:
        """The bytes that are held now."""
        return self._num_bytes

    @asynccontextmanager
    async def hold(self, owner: str, num_bytes: int) -> AsyncGenerator[None]:
        """Hold bytes inside the context. Raises ApiError 429 if there is no place for them for 20 s."""
        if num_bytes <= _SMALL:
            yield
            return
        if self._waiting or not self._fits(owner, num_bytes) or not self._has_place(num_bytes):
            await self._wait(owner, num_bytes)
        else:
            self._take(owner, num_bytes)
        try:
            yield
        finally:
            self._take(owner, -num_bytes)
            self._admit()

    async def _wait(self, owner: str, num_bytes: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = num_bytes, place
        self._waiting[owner].append(entry)
        self._admit()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # admitted while the wait ended
                self._take(owner, -num_bytes)
            else:
                self._waiting[owner].remove(entry)
            self._admit()
            if isinstance(error, TimeoutError):
                detail = f"requests of {owner!r} already hold {self._held.get(owner, 0)} bytes: send this one later"
                raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, headers=_HEADERS) from error
            raise

    def _admit(self) -> None:
        """Let waiting requests in, those of the owner who holds least first; each owner's in their order."""
        for owner in [owner for owner, queue in self._waiting.items() if not queue]:
            del self._waiting[owner]
        while self._waiting:
            may_hold_more = [owner for owner, queue in self._waiting.items() if self._fits(owner, queue[0][0])]
            if not may_hold_more:
                return
            owner = min(may_hold_more, key=lambda each: self._held.get(each, 0))
            num_bytes, place = self._waiting[owner][0]
            if not self._has_place(num_bytes):
                return  # its turn is next: smaller ones of others must not delay it without end
            self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not place.done():
                self._take(owner, num_bytes)
                place.set_result(None)

    def _fits(self, owner: str, num_bytes: int) -> bool:
        """Whether a request fits into its owner's half."""
        held = self._held.get(owner, 0)
        return not held or held + num_bytes <= self._max_bytes // 2

    def _has_place(self, num_bytes: int) -> bool:
        """Whether a request fits into the whole."""
        return not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes

    def _take(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._held[owner] += num_bytes
        if not self._held[owner]:
            del self._held[owner]
