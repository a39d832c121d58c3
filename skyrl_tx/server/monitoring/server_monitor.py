"""Samples the state of the whole server each ten seconds: for the gauges of `/metrics`, and as a row of its history."""

import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sqlmodel import Session

from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.server.http.long_poll import ResultWatcher
from skyrl_tx.server.monitoring.metrics import ApiMetrics
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import engine_state, totals
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.errors import StoreError
from skyrl_tx.store.pauses import collect_pauses
from skyrl_tx.store.tables import EngineStateRow
from skyrl_tx.store.totals import StoreTotals

_log = logging.getLogger(__name__)
_RATES: Mapping[str, str] = {
    "training_tokens": "training_tokens_per_s",
    "generation_tokens": "sampled_tokens_per_s",
    "prompt_tokens": "prompt_tokens_per_s",
    "prompt_tokens_cached": "prompt_tokens_cached_per_s",
    "requests_completed": "requests_completed_per_s",
    "requests_failed": "requests_failed_per_s",
    "optim_steps": "optim_steps_per_s",
}
"""The engine's totals, and the names of their rates."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The engine's published state, and what it counted since its start."""

    boot_id: str
    at: float
    meters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_row(cls, row: EngineStateRow | None) -> "EngineReading | None":
        """Return the word of a row; None while the engine has published no meters."""
        return None if row is None or row.meters is None else cls(row.boot_id, row.updated_at, row.meters)


def compute_rates(before: EngineReading | None, after: EngineReading | None) -> dict[str, float]:
    """Return what the engine did a second, and its share of time for each work, between two words of one engine."""
    if before is None or after is None or before.boot_id != after.boot_id or after.at <= before.at:
        return {}
    seconds = after.at - before.at
    found = {
        name: round(max(after.meters["totals"].get(total, 0) - before.meters["totals"].get(total, 0), 0) / seconds, 3)
        for total, name in _RATES.items()
    }
    for work, value in after.meters["device_seconds"].items():
        busy_s = max(value - before.meters["device_seconds"].get(work, 0.0), 0.0)
        found[f"{work}_share"] = round(min(busy_s / seconds, 1.0), 4)
    return found


def combine_engines(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of several engines as those of one server.

    Shares of time are means, memory is that of the fullest device, and the requests since a snapshot the most.
    """
    found: dict[str, list[float]] = {}
    for values in each:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {
        name: max(values)
        if name.startswith("memory_") or name == "effects_since_snapshot"
        else sum(values) / len(values)
        if name.endswith("_share")
        else sum(values)
        for name, values in found.items()
    }


def read_gauges(word: EngineReading | None) -> dict[str, float]:
    """Return the engine's queues, places, slots, caches and memory."""
    if word is None:
        return {}
    meters = word.meters
    found: dict[str, float] = {
        f"{queue}_{name}": n for queue, each in meters["queues"].items() for name, n in each.items()
    }
    found |= meters["places"]
    backend = dict(meters["backend"])
    memory = cast(list[dict[str, int]], backend.pop("device_memory", []))
    if memory:
        found["memory_used_bytes"] = max(each["used_bytes"] for each in memory)
        found["memory_limit_bytes"] = max(each["limit_bytes"] for each in memory)
    slots = ("decode_slots", "decode_slots_used", "kv_cache_tokens", "kv_cache_tokens_used", "prefix_cache_tokens")
    return found | {name: backend[name] for name in slots if name in backend}


class ServerMonitor:
    """A thread that samples at times which are multiples of ten seconds, and once at its start.

    Several API processes sample at the same times, and the first one writes the row. Rates come from what the engine
    published, so the rows of all processes would be equal, except for the open polls.
    """

    def __init__(self, settings: ApiSettings, store: Store, metrics: ApiMetrics, results: ResultWatcher) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._results = results
        self._before: dict[int, EngineReading] = {}
        self._boot_ids: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = ServiceThread("server-sampler", self._repeat)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _repeat(self) -> None:
        self._try_collect(None)
        while True:
            next_at = (int(time.time()) // engine_state.PERIOD_S + 1) * engine_state.PERIOD_S
            if self._ended.wait(max(next_at - time.time(), 0.0)):
                return
            self._try_collect(next_at)

    def _try_collect(self, at: int | None) -> None:
        try:
            values = self.collect(time.time())
            if at is not None:
                self._store.write(lambda tx: _write(tx, at, values))
        except (StoreError, OSError) as error:  # people see a gap; other parts report the cause
            _log.debug("the state of the server was not sampled: %s", error)

    def collect(self, now: float) -> dict[str, float]:
        """Read the state of the server and set the gauges; return the values of a row."""

        def look(tx: Session) -> tuple[list[EngineStateRow], float, StoreTotals]:
            rows = engine_state.list_engines(tx)
            return rows, engine_state.get_shared_time(tx), totals.read_totals(tx, now, collect_pauses(*rows))

        rows, shared_now, found = self._store.read(look)
        metrics = self._metrics
        silence_s = self._settings.engine_silence_s
        ready = [row for row in rows if engine_state.is_ready(row, shared_now, silence_s)]
        self._set_engines(rows, len(ready))
        disk_free = shutil.disk_usage(self._settings.data_dir).free
        oldest_s = 0.0 if found.oldest_at is None else max(now - found.oldest_at, 0.0)
        metrics.oldest_request_s.set(oldest_s)
        metrics.sessions_active.set(found.num_active_sessions)
        metrics.disk_free.set(disk_free)
        self._set_store_sizes()
        published = {row.number: word for row in ready if (word := EngineReading.from_row(row)) is not None}
        values = {
            "engine_ready": float(bool(ready)),
            "requests_open": found.num_open,
            "oldest_request_s": round(oldest_s, 1),
            "sessions_active": found.num_active_sessions,
            "polls_waiting": self._results.num_waiting,
            "disk_free_bytes": disk_free,
            **combine_engines([read_gauges(word) for word in published.values()]),
            **combine_engines([compute_rates(self._before.get(number), word) for number, word in published.items()]),
        }
        self._before = published
        return values

    def _set_engines(self, rows: Sequence[EngineStateRow], num_ready: int) -> None:
        """Set the gauges of the status of the engines."""
        self._metrics.engine_ready.set(num_ready)
        for row in rows:
            if row.boot_id != (before := self._boot_ids.get(row.number)):
                if before is not None:
                    self._metrics.engine_starts.inc()
                self._boot_ids[row.number] = row.boot_id

    def _set_store_sizes(self) -> None:
        if self._settings.database_url is None:
            for part, name in ("db", DATABASE_NAME), ("wal", f"{DATABASE_NAME}-wal"):
                path = self._settings.data_dir / name
                self._metrics.store_bytes.labels(part).set(path.stat().st_size if path.exists() else 0)


def _write(tx: Session, at: int, values: Mapping[str, float]) -> None:
    engine_state.add(tx, at, values)
    engine_state.thin(tx, at)
