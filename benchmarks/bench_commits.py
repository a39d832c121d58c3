"""What it costs to have each request on disk before it is acknowledged, and what committing in groups gives back.

Threads store small requests through `Store.write`, each waiting for its own, as the API's calls do. Two stores take
turns: one as it is (`synchronous=FULL`, an fsync of the log for each group), one with NORMAL, which loses its last
transactions when the power is cut. The store offers no such setting; the benchmark puts it in by its own connections.
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

from common import machine, quantile, quartiles, report

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import futures, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest

MODES = ("FULL", "NORMAL")


class _Normal(sqlite3.Connection):
    """A connection that asks for less than the store tells it to."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("synchronous=FULL", "synchronous=NORMAL"), *parameters)


@contextmanager
def opened(directory: Path, mode: str) -> Iterator[Store]:
    """Open a store whose connections sync as the mode says."""
    connect = sqlite3.dbapi2.connect
    factory = _Normal if mode == "NORMAL" else sqlite3.Connection
    with mock.patch(
        "sqlite3.dbapi2.connect", lambda *args, **options: connect(*args, **{**options, "factory": factory})
    ):
        store = Store.open(directory, role="api")
        (level,) = store.read(lambda tx: tx.connection().exec_driver_sql("PRAGMA synchronous").one())
        assert level == {"FULL": 2, "NORMAL": 1}[mode], level
        store.write(lambda tx: None)  # the writer's connection too
    yield store
    store.close()


def begin(store: Store) -> SessionId:
    """Begin a session for the requests."""
    about: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": None, "project_id": None}
    return store.write(lambda tx: sessions.create(tx, owner="local", display_name=None, now=time.time(), **about))


def burst(store: Store, session_id: SessionId, body: bytes, num_threads: int, seconds: float) -> dict[str, float]:
    """Store requests from so many threads for some seconds; how many a second, and how long each took."""
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
    latencies = [each for mine in taken for each in mine]
    return {
        "requests_per_s": len(latencies) / elapsed,
        "median_ms": 1e3 * quantile(latencies, 0.5),
        "p95_ms": 1e3 * quantile(latencies, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8, 64], help="how many submit at once")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one burst")
    parser.add_argument("--body-bytes", type=int, default=300)
    parser.add_argument("--directory", type=Path, help="where the databases are made; default: a temporary directory")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, ExitStack() as stack:
        stores = {mode: stack.enter_context(opened(Path(directory) / mode, mode)) for mode in MODES}
        known = {mode: begin(store) for mode, store in stores.items()}
        body = bytes(options.body_bytes)
        for num_threads in options.threads:
            runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
            for _ in range(options.repeats):
                for mode, store in stores.items():
                    runs[mode].append(burst(store, known[mode], body, num_threads, options.seconds))
            figures: dict[str, Any] = {
                mode: {name: quartiles([run[name] for run in mine], 2) for name in mine[0]}
                for mode, mine in runs.items()
            }
            ratios = [
                full["requests_per_s"] / normal["requests_per_s"]
                for full, normal in zip(runs["FULL"], runs["NORMAL"], strict=True)
            ]
            results[f"{num_threads} threads"] = {**figures, "FULL / NORMAL, requests per s": quartiles(ratios)}
    report("commits", machine("sqlalchemy", "sqlmodel"), results)


if __name__ == "__main__":
    main()
