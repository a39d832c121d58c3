"""Answers go before questions: results that are there reach their clients before new requests are taken."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress


class Precedence:
    """Who goes first, of the calls of one event loop.

    Hundreds of requests may be answered at once, and each client that has its result asks for the next thing, which
    takes longer than handing over a result: without this the last of them wait for the requests of the first.
    """

    def __init__(self, *, longest_s: float = 0.25) -> None:
        """Nothing waits longer than `longest_s`."""
        self._longest_s = longest_s
        self._num_answering = 0
        self._is_clear = asyncio.Event()
        self._is_clear.set()

    @contextmanager
    def answering(self) -> Generator[None]:
        """A result is read and written out inside."""
        self._num_answering += 1
        self._is_clear.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._is_clear.set()

    async def give_way(self) -> None:
        """Wait until all results are on their way; not for long, as there may always be more."""
        if self._num_answering:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_clear.wait(), self._longest_s)
