"""The limits of the running engine, as far as the endpoints check them before they queue a request."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from typing import cast

from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store

_MAX_AGE_S = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine that ran last. None: no engine has published its own yet."""

    max_context_length: int | None = None
    max_topk: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""


class EngineLimits:
    """Reads the engine's published capabilities, at most every two seconds. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._limits = Limits()

    def current(self) -> Limits:
        """Return the limits."""
        with self._lock:
            if time.monotonic() - self._read_at >= _MAX_AGE_S:
                self._limits = self._read()
                self._read_at = time.monotonic()
            return self._limits

    def _read(self) -> Limits:
        state = self._store.read(engine_state.get)
        if state is None or not state.capabilities:
            return Limits()
        published = state.capabilities
        fingerprint = json.dumps(published.get("fingerprint", {}), sort_keys=True).encode()
        return Limits(
            max_context_length=cast(int | None, published.get("max_context_length")),
            max_topk=cast(int, published.get("max_topk_logprobs", 0)),
            eos_token_ids=frozenset(cast(list[int], published.get("eos_token_ids", []))),
            fingerprint=f"fp_{hashlib.sha256(fingerprint).hexdigest()[:12]}",
        )
