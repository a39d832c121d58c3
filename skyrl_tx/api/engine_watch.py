"""Whether the engine is at work, for those who wait for it."""

import asyncio
import time

from fastapi.concurrency import run_in_threadpool

from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store

_LOOK_EVERY_S = 0.5


class EngineWatch:
    """What the engine last said of itself, in the store; thousands of calls that end at once share a look."""

    def __init__(self, store: Store, silence_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._looked_at = float("-inf")
        self._seen: str | None = None
        self._looking = asyncio.Lock()

    def trouble(self) -> str | None:
        """Why no work is being done at the moment; None while the engine is up."""
        state = self._store.read(engine_state.get)
        if state is None:
            return "the engine has not started yet"
        silence_s = time.time() - state.updated_at
        if silence_s > self._silence_s:
            silence = f"the engine has been silent for {silence_s:.0f} s"
            return silence if self._store.trouble is None else f"{silence}; {self._store.trouble}"
        if state.status != "ready":
            return f"the engine is {state.status}" + (f": {state.detail}" if state.detail else "")
        return f"the engine waits: {state.detail}" if state.detail else None

    async def recent_trouble(self) -> str | None:
        """The same as it was half a second ago, at most. Called on one event loop."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                self._seen = await run_in_threadpool(self.trouble)
                self._looked_at = time.monotonic()
            return self._seen
