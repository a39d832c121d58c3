"""The Prometheus metrics of one API process, and samples of the state of the server.

Requests only update counters and `HttpGroup`, which takes about a microsecond each. `ServerMonitor`
samples the server every ten seconds. The values become the gauges of `/metrics`, so that a scrape
reads neither the database nor the disk, and one row of the server's history.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from sqlmodel import Session

from skyrl_tx import __version__
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.server.errors import Refusal
from skyrl_tx.server.http.long_poll import ResultWatcher
from skyrl_tx.server.http.request_guard import HttpGroups
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import StoreError, engine_state, totals
from skyrl_tx.store.database import Store
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.engine_state import collect_pauses
from skyrl_tx.store.tables import EngineStateRow
from skyrl_tx.store.totals import StoreTotals

_log = logging.getLogger(__name__)
_AUTH_REASONS = "missing_key", "wrong_key", "ended_key", "throttled", "scope"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 45.0)
_WAKEUPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WRITES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

_RATES: Mapping[str, str] = {
    "training_tokens": "training_tokens_per_s",
    "generation_tokens": "sampled_tokens_per_s",
    "prompt_tokens": "prompt_tokens_per_s",
    "prompt_tokens_cached": "prompt_tokens_cached_per_s",
    "requests_completed": "requests_completed_per_s",
    "requests_failed": "requests_failed_per_s",
    "optim_steps": "optim_steps_per_s",
}
"""The engine's totals, and the names of the rates that are computed from them."""
_BACKEND_RATES = (
    ("padding_tokens", "padding_tokens_per_s", math.inf),
    ("compile_seconds", "compile_share", 1.0),
)
"""Totals of a backend, the names of their rates, and the largest value of each rate."""
_GROUPS = "totals", "device_seconds", "queues", "places", "backend"
"""The groups of metrics that an engine publishes."""


class ApiMetrics:
    """All metrics of one API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace="skyrl_tx", registry=self.registry)
        gauge = partial(Gauge, namespace="skyrl_tx", registry=self.registry)
        histogram = partial(Histogram, namespace="skyrl_tx", registry=self.registry)

        # Requests by group of routes
        http_requests = counter("http_requests", "HTTP responses, by group of routes and status.", ["group", "code"])
        http_seconds = histogram(
            "http_request_duration_seconds", "From head to end of the response.", ["group"], buckets=_SECONDS
        )
        self.http = HttpGroups(http_requests, http_seconds)

        # Long polls, refusals and commits
        self.polls_waiting = gauge("polls_waiting", "Open long polls.")
        self.poll_wakeup_s = histogram(
            "poll_wakeup_seconds", "From a result's commit to the wake-up of its long poll.", buckets=_WAKEUPS_S
        )
        self._backpressure = counter(
            "backpressure", "Requests that were refused and should be sent again later.", ["reason"]
        )
        self._auth_failures = counter("auth_failures", "Calls that were refused because of their API key.", ["reason"])
        self.store_write_s = histogram("store_write_seconds", "Commits of the API to the store.", buckets=_WRITES_S)
        for reason in _AUTH_REASONS:
            self._auth_failures.labels(reason)
        for reason in ("queue_full", "bodies_full", "calls_full", "quota"):
            self._backpressure.labels(reason)

        # Set by ServerMonitor
        self.oldest_request_s = gauge(
            "oldest_request_seconds", "Age of the oldest request that has no result and is not waiting for a quota."
        )
        self.sessions_active = gauge("sessions_active", "Sessions with a heartbeat in the last minute.")
        self.store_bytes = gauge("store_bytes", "Size of the SQLite database and of its log.", ["part"])
        self.disk_free = gauge("disk_free_bytes", "Free space of the disk of the data directory.")
        self.engine_up = gauge("engine_up", "Whether the engine sent its metrics within a second.")
        self.engine_ready = gauge("engine_ready", "Whether the engine executes requests, by its published status.")
        self.engine_starts = counter("engine_starts", "Starts of the engine that this process noticed.")

        self._build = Info("build", "The release.", namespace="skyrl_tx", registry=self.registry)
        self._build.info({"version": __version__})

    def count_refusal(self, reason: Refusal | None) -> None:
        """Count a refused request, if its refusal has a reason."""
        if reason in _AUTH_REASONS:
            self._auth_failures.labels(reason).inc()
        elif reason is not None:
            self._backpressure.labels(reason).inc()


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The engine's published metrics at one point in time."""

    boot_id: str
    at: float
    meters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_row(cls, row: EngineStateRow | None) -> "EngineReading | None":
        """Return the reading of a row. None if the engine has not published metrics yet.

        A group of metrics that an engine of another release does not publish is empty.
        """
        if row is None or row.meters is None:
            return None
        return cls(row.boot_id, row.updated_at, {**{group: {} for group in _GROUPS}, **row.meters})


def compute_rates(before: EngineReading | None, after: EngineReading | None) -> dict[str, float]:
    """Return the rates per second between two readings, and the share of time per kind of work.

    Returns {} unless both readings come from the same start of an engine.
    """
    if before is None or after is None or before.boot_id != after.boot_id or after.at <= before.at:
        return {}
    old, new = before.meters, after.meters

    def compute_rate(group: str, name: str) -> float:
        return max(new[group].get(name, 0) - old[group].get(name, 0), 0) / (after.at - before.at)

    rates = {name: round(compute_rate("totals", total), 3) for total, name in _RATES.items()}
    for work in new["device_seconds"]:
        rates[f"{work}_share"] = round(min(compute_rate("device_seconds", work), 1.0), 4)

    # Work of the backend, if it counts it
    for name, rate, most in _BACKEND_RATES:
        if name in old["backend"] and name in new["backend"]:
            rates[rate] = round(min(compute_rate("backend", name), most), 4)
    return rates


def combine_engines(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the values of multiple engines to one value each.

    Values are added, with two exceptions. Shares of time are averaged. For memory, and for requests
    since the last snapshot, the largest value counts.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for engine in engines for name in engine):
        values = [engine[name] for engine in engines if name in engine]
        if name.startswith("memory_") or name == "effects_since_snapshot":
            combined[name] = max(values)
        else:
            combined[name] = sum(values) / len(values) if name.endswith("_share") else sum(values)
    return combined


def read_gauges(reading: EngineReading | None) -> dict[str, float]:
    """Return the engine's current values: queues, adapter and decode slots, caches and memory."""
    if reading is None:
        return {}
    meters = reading.meters
    gauges: dict[str, float] = {
        f"{queue}_{name}": count for queue, counts in meters["queues"].items() for name, count in counts.items()
    }
    gauges |= meters["places"]
    backend = dict(meters["backend"])
    memory = cast(list[dict[str, int]], backend.pop("device_memory", []))
    if memory:
        gauges["memory_used_bytes"] = max(device["used_bytes"] for device in memory)
        gauges["memory_limit_bytes"] = max(device["limit_bytes"] for device in memory)
    slots = ("decode_slots", "decode_slots_used", "kv_cache_tokens", "kv_cache_tokens_used", "prefix_cache_tokens")
    return gauges | {name: backend[name] for name in slots if name in backend}


class ServerMonitor:
    """A thread that samples the server at multiples of ten seconds, and once at its start.

    It also removes expired uploads.

    Multiple API processes sample at the same times, and the first one writes the row. All of them
    would write almost the same values, because rates come from the numbers that the engines
    publish. Only the number of open polls differs.
    """

    def __init__(
        self,
        settings: ApiSettings,
        store: Store,
        metrics: ApiMetrics,
        results: ResultWatcher,
        remove_expired: Callable[[float], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._results = results
        self._remove_expired = remove_expired
        self._before: dict[int, EngineReading] = {}
        self._boot_ids: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = ServiceThread("server-sampler", self._repeat)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
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
            self._remove_expired(time.time())
            values = self.collect(time.time())
            if at is not None:
                self._store.write(lambda tx: _write(tx, at, values))
        except (StoreError, OSError) as error:  # the history has a gap, and other parts report the cause
            _log.debug("could not sample the state of the server: %s", error)

    def collect(self, now: float) -> dict[str, float]:
        """Read the state of the server, set the gauges, and return the values of a row."""

        def read(tx: Session) -> tuple[list[EngineStateRow], float, StoreTotals]:
            rows = engine_state.list_engines(tx)
            return rows, engine_state.get_shared_time(tx), totals.read_totals(tx, now, collect_pauses(*rows))

        rows, shared_now, store_totals = self._store.read(read)
        silence_s = self._settings.engine_silence_s
        ready = [row for row in rows if engine_state.is_ready(row, shared_now, silence_s)]
        oldest_at = store_totals.oldest_at
        oldest_s = 0.0 if oldest_at is None else max(now - oldest_at, 0.0)
        disk_free = shutil.disk_usage(self._settings.data_dir).free

        # The gauges of this process.
        self._set_engines(rows, len(ready))
        self._metrics.oldest_request_s.set(oldest_s)
        self._metrics.sessions_active.set(store_totals.num_active_sessions)
        self._metrics.disk_free.set(disk_free)
        self._set_store_sizes()

        # The values of a row of the history.
        readings = {row.number: reading for row in ready if (reading := EngineReading.from_row(row)) is not None}
        values = {
            "engine_ready": float(bool(ready)),
            "requests_open": store_totals.num_open,
            "oldest_request_s": round(oldest_s, 1),
            "sessions_active": store_totals.num_active_sessions,
            "polls_waiting": self._results.num_waiting,
            "disk_free_bytes": disk_free,
            **combine_engines([read_gauges(reading) for reading in readings.values()]),
            **combine_engines(
                [compute_rates(self._before.get(number), reading) for number, reading in readings.items()]
            ),
        }
        self._before = readings
        return values

    def _set_engines(self, rows: Sequence[EngineStateRow], num_ready: int) -> None:
        """Update the metrics of engine status: ready engines, and starts of engines."""
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
    engine_state.add_gauges(tx, at, values)
    engine_state.thin_gauges(tx, at)
