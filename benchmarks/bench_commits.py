"""Throughput of durable commits (`synchronous=FULL`) compared with `synchronous=NORMAL`.

Threads store small requests through `Store.write`; each thread waits for its commit, as the API does. Two SQLite stores
alternate: one with the product's setting FULL (one fsync of the write-ahead log per group commit), one with NORMAL,
which can lose the last transactions at a power failure. The store has no such setting, so the benchmark replaces the
connection class.
"""

import argparse
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import compute_quartiles, quantile, report
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest

MODES = ("FULL", "NORMAL")


class _Normal(sqlite3.Connection):
    """A connection that replaces the store's `synchronous=FULL` by NORMAL."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("synchronous=FULL", "synchronous=NORMAL"), *parameters)


@contextmanager
def open_store(directory: Path, mode: str) -> Iterator[Store]:
    """Open a store whose connections use the given `synchronous` mode."""
    connect = sqlite3.connect
    factory = _Normal if mode == "NORMAL" else sqlite3.Connection
    with mock.patch(
        "sqlite3.dbapi2.connect", lambda *args, **options: connect(*args, **{**options, "factory": factory})
    ):
        store = Store.open(directory, role="api")
        (level,) = store.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA synchronous").one())
        assert level == {"FULL": 2, "NORMAL": 1}[mode], level
        store.write(lambda tx: None)  # opens the writer's connection, too
    yield store
    store.close()


def create_session(store: Store) -> SessionId:
    """Create the session of the requests."""
    about: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": None, "project_id": None}
    return store.write(lambda tx: sessions.create(tx, owner="local", now=time.time(), **about))


def measure_burst(
    store: Store, session_id: SessionId, body: bytes, num_threads: int, seconds: float
) -> dict[str, float]:
    """Store requests from `num_threads` threads for `seconds`; return the rate and the latency of one request."""
    new = NewRequest(key="", kind="optim_step", owner="local", session_id=session_id, body=body)
    taken: list[list[float]] = [[] for _ in range(num_threads)]
    end = time.perf_counter() + seconds

    def submit(mine: list[float]) -> None:
        now = time.perf_counter()
        while now < end:
            store.write(lambda tx: futures.submit(tx, new, 0.0))
            before, now = now, time.perf_counter()
            mine.append(now - before)

    threads = [threading.Thread(target=submit, args=(mine,)) for mine in taken]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    latencies = [latency for mine in taken for latency in mine]
    return {
        "requests_per_s": len(latencies) / elapsed,
        "median_ms": 1e3 * quantile(latencies, 0.5),
        "p95_ms": 1e3 * quantile(latencies, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8, 64], help="numbers of threads to measure")
    parser.add_argument("--repeats", type=int, default=7, help="bursts of each mode")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a burst")
    parser.add_argument("--body-bytes", type=int, default=300, help="size of a request body")
    parser.add_argument(
        "--directory", type=Path, help="parent of the databases; default: the system's temporary directory"
    )
    options = parser.parse_args()

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, ExitStack() as stack:
        stores = {mode: stack.enter_context(open_store(Path(directory) / mode, mode)) for mode in MODES}
        known = {mode: create_session(store) for mode, store in stores.items()}
        body = bytes(options.body_bytes)

        for num_threads in options.threads:
            runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
            for _ in range(options.repeats):
                for mode, store in stores.items():
                    runs[mode].append(measure_burst(store, known[mode], body, num_threads, options.seconds))

            figures: dict[str, Any] = {
                mode: {name: compute_quartiles([run[name] for run in mine], 2) for name in mine[0]}
                for mode, mine in runs.items()
            }
            ratios = [
                full["requests_per_s"] / normal["requests_per_s"]
                for full, normal in zip(runs["FULL"], runs["NORMAL"], strict=True)
            ]
            results[f"{num_threads} threads"] = {**figures, "FULL / NORMAL, requests per s": compute_quartiles(ratios)}

    report("commits", options, results, ("sqlalchemy", "sqlmodel"))


if __name__ == "__main__":
    main()
