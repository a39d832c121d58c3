"""Size of the database file and of its write-ahead log as a function of completed requests.

One client trains and samples through the store and an engine with the fake backend, in one session that stays open. The
client marks each result as fetched, as the API does. Results and requests are pruned after seconds (`--retention-s`;
the defaults of a server are 600 s and 3,600 s), so that a run of minutes has the pruning of days. `--keep-all` disables
pruning.
"""

import argparse
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from sqlmodel import func, select

from benchmarks.common import report
from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import futures
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import OWNER, EngineHarness, forward_backward, optim_step, sample
from tests.support.live_engine import live_engine

SAMPLER = SamplingSessionId("bench:sample:0")


class Client:
    """Sends requests and fetches their results later."""

    def __init__(self, harness: EngineHarness, model_id: ModelId, in_flight: int) -> None:
        self._harness = harness
        self._model_id = model_id
        self._in_flight = in_flight
        self._bodies: list[requests.Request] = [forward_backward(), optim_step(), sample()]
        self._waiting: deque[RequestId] = deque()
        self.num_sent = 0

    def send(self, count: int) -> None:
        """Send `count` requests, with at most `in_flight` of them outstanding."""
        for _ in range(count):
            turn = self.num_sent % len(self._bodies)
            request, number = self._bodies[turn], self.num_sent + 1
            is_sample = isinstance(request, requests.Sample)
            stem = f"sample/{SAMPLER}" if is_sample else f"model/{self._model_id}"
            where: dict[str, Any] = {"sampling_session_id": SAMPLER} if is_sample else {"model_id": self._model_id}

            new = NewRequest(
                key=f"{stem}/{number}",
                kind=codec.get_kind(request),
                owner=OWNER,
                session_id=self._harness.session_id,
                body=codec.encode(request),
                seq_id=number,
                **where,
            )

            self._harness.api.write_soon(lambda tx, new=new: futures.submit(tx, new, time.time()))
            self._waiting.append(futures.make_request_id(new.key))
            self.num_sent += 1
            if len(self._waiting) >= self._in_flight:
                self.fetch(self._in_flight // 2)

    def fetch(self, keep: int) -> None:
        """Wait for all but the last `keep` requests and mark their results as fetched."""
        store = self._harness.api
        wanted = [self._waiting.popleft() for _ in range(len(self._waiting) - keep)]
        while len(answered := store.read(lambda tx: futures.get_outcomes(tx, wanted))) < len(wanted):
            store.wait(0.2)
        assert set(answered.values()) == {"done"}
        store.write(lambda tx: futures.mark_fetched(tx, wanted, time.time()))


def get_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="requests to send in all")
    parser.add_argument("--every", type=int, default=10_000, help="requests between two rows of the output")
    parser.add_argument("--in-flight", type=int, default=240, help="requests outstanding at most")
    parser.add_argument(
        "--retention-s", type=float, nargs=2, default=(2.0, 4.0), help="retention of results and of requests"
    )
    parser.add_argument("--keep-all", action="store_true", help="prune nothing")
    options = parser.parse_args()

    results_s, requests_s = (1e9, 1e9) if options.keep_all else options.retention_s
    table: list[dict[str, float]] = []

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        harness = EngineHarness(directory)
        settings = EngineSettings(
            data_dir=directory,
            base_model="tiny",
            gap_timeout_s=0.0,
            result_retention_s=results_s,
            request_retention_s=requests_s,
            housekeeping_interval_s=0.5,
            snapshot_interval_s=1.0,
        )

        with live_engine(settings, FakeBackend("tiny", FakeConfig(vocab_size=128))):
            model_id, _ = harness.create()
            client, start = Client(harness, model_id, options.in_flight), time.perf_counter()
            while client.num_sent < options.requests:
                client.send(min(options.every, options.requests - client.num_sent))
                client.fetch(0)

                num_rows = harness.api.read(lambda tx: tx.exec(select(func.count()).select_from(RequestRow)).one())
                table.append(
                    {
                        "requests": client.num_sent,
                        "rows": num_rows,
                        "database_kib": get_size(directory / "skyrl_tx.db") // 1024,
                        "wal_kib": get_size(directory / "skyrl_tx.db-wal") // 1024,
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                )
        harness.close()

    sizes = [row["database_kib"] for row in table]
    half = len(sizes) // 2
    growth = {"largest size, second half / first half": round(max(sizes[half:]) / max(sizes[:half]), 3)}
    report("database", options, {"table": table, **growth}, ("sqlalchemy", "sqlmodel"))


if __name__ == "__main__":
    main()
