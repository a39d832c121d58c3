"""Soak test (`make soak`): thousands of long polls are open while hundreds of sessions train and sample.

Prints one row per minute: memory of API and engine, failures, and wake-up latency, the time from the completion of a
request in the database until a client with an open poll has the result. Clients share the machine with the server.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skyrl_tx.process.setup import raise_file_limit
from tests.support.database_rows import rows, size_bytes
from tests.support.live_server import LiveServer
from tests.support.postgresql_server import PostgresqlServer
from tests.support.soak.clients import TOKENS_PER_SAMPLE, Arrival, Clients

HEADER = (
    "| minute | API MiB | engine MiB | database MiB | completed | pending | 5xx | failed "
    "| wake-up p50 ms | p95 ms | client lag p95 ms | load |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
_INTERVAL_S = 5.0
_LAG_EVERY_S = 0.02
_MAX_ARRIVALS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """Measurements of one minute, and at its end."""

    number: float
    api_bytes: int
    engine_bytes: int
    database_bytes: int
    num_done: int
    num_pending: int
    num_5xx: int
    """Including lost connections."""
    failures: Sequence[str]
    wakes_ms: Sequence[float]
    lags_ms: Sequence[float]
    """Lag of the clients' event loop, which is part of each wake-up latency."""
    load: float

    def __str__(self) -> str:
        median, p95 = np.percentile(self.wakes_ms, [50, 95]) if self.wakes_ms else (np.nan, np.nan)
        lag = np.percentile(self.lags_ms, 95)
        sizes = " | ".join(str(size >> 20) for size in (self.api_bytes, self.engine_bytes, self.database_bytes))
        counts = f"{self.num_done:,} | {self.num_pending:,} | {self.num_5xx} | {len(self.failures)}"
        return f"| {self.number:g} | {sizes} | {counts} | {median:.0f} | {p95:.0f} | {lag:.0f} | {self.load:.1f} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Load and duration of a soak test."""

    minutes: float = 15.0
    num_sessions: int = 200
    num_futures: int = 10_000
    step_delay_s: float = 0.03
    slots: int = 2
    """Number of samples that run concurrently."""
    datum_tokens: int = 256
    """Tokens of the one datum of a pass. A batch holds 4,096, so passes of 4 tokens of all models run together."""
    row_s: float = 60.0
    """Duration that one row covers."""
    database_url: str | None = None
    """URL of a PostgreSQL database; None selects SQLite."""

    def flags(self) -> list[str]:
        """Return the flags of the server; its backend is slow, so that futures are pending."""
        flags = ["--base-model", "fake", "--backend", "fake"]
        flags += ["--backend-config.step-delay-s", str(self.step_delay_s)]
        flags += ["--backend-config.max-sample-tokens", str(self.slots * TOKENS_PER_SAMPLE)]
        flags += ["--backend-config.max-models", str(self.num_sessions)]
        return [*flags, "--database-url", self.database_url] if self.database_url is not None else flags


def soak(plan: Plan) -> list[Minute]:
    """Run server and clients; print each row when it is complete."""
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        data_dir = Path(name, "data")
        with LiveServer(data_dir, flags=plan.flags()) as server:
            try:
                minutes = asyncio.run(_watch(plan, server, data_dir))
                print(*[line for line in server.log.splitlines() if " ERROR " in line][:10], sep="\n")
                return minutes
            except BaseException as error:
                error.add_note(server.log[-4000:])
                raise


async def _watch(plan: Plan, server: LiveServer, data_dir: Path) -> list[Minute]:
    clients = Clients(server.url, "fake", plan.num_sessions, plan.num_futures, plan.datum_tokens)
    work = asyncio.create_task(clients.run())
    minutes: list[Minute] = []
    try:
        while len(minutes) * plan.row_s < plan.minutes * 60:
            minutes.append(await _minute(plan, server, data_dir, clients, work, len(minutes)))
            print(minutes[-1], flush=True)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return minutes


async def _minute(
    plan: Plan, server: LiveServer, data_dir: Path, clients: Clients, work: asyncio.Task[None], index: int
) -> Minute:
    measurements, end = clients.measurements, time.monotonic() + plan.row_s
    before, done, first_failure = measurements.statuses.copy(), measurements.num_done, len(measurements.failures)
    wakes: list[float] = []
    lags: list[float] = []

    while time.monotonic() < end:
        lags += await _lags_ms(min(_INTERVAL_S, max(end - time.monotonic(), 0)))
        if work.done():
            work.result()
        wakes += await asyncio.to_thread(_wakes_ms, plan, data_dir, measurements.take_arrivals()[-_MAX_ARRIVALS:])

    statuses = measurements.statuses - before
    return Minute(
        number=(index + 1) * plan.row_s / 60,
        api_bytes=_resident(server.pid),
        engine_bytes=_resident(server.engine_pid),
        database_bytes=size_bytes(data_dir, plan.database_url),
        num_done=measurements.num_done - done,
        num_pending=measurements.num_pending,
        num_5xx=sum(number for status, number in statuses.items() if status == 0 or status >= 500),
        failures=measurements.failures[first_failure:],
        wakes_ms=wakes,
        lags_ms=lags,
        load=os.getloadavg()[0],
    )


async def _lags_ms(duration_s: float) -> list[float]:
    """Measure the lag of this event loop repeatedly for a duration."""
    lags: list[float] = []
    started_at = due_at = time.monotonic()
    while due_at < started_at + duration_s:
        due_at = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append((time.monotonic() - due_at) * 1e3)
    return lags


def _wakes_ms(plan: Plan, data_dir: Path, arrivals: Sequence[Arrival]) -> list[float]:
    """Return the wake-up latencies of results whose polls were open before their completion."""
    names = ", ".join(f"'{arrival.request_id}'" for arrival in arrivals)
    wanted = f"SELECT request_id, completed_at FROM requests WHERE request_id IN ({names})"
    completed_at: dict[str, float] = dict(rows(data_dir, plan.database_url, wanted)) if arrivals else {}
    return [
        (arrival.arrived_at - completed_at[arrival.request_id]) * 1e3
        for arrival in arrivals
        if completed_at.get(arrival.request_id, 0.0) > arrival.polled_at
    ]


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def main() -> None:
    """Run the soak test; the exit status is 1 if a call got a 5xx or a request failed."""
    plan = Plan()
    parser = argparse.ArgumentParser(description="Keep thousands of long polls open while sessions train and sample.")
    parser.add_argument("--minutes", type=float, default=plan.minutes)
    parser.add_argument("--sessions", type=int, default=plan.num_sessions)
    parser.add_argument("--futures", type=int, default=plan.num_futures, help="number of pending futures")
    parser.add_argument(
        "--step-delay-s", type=float, default=plan.step_delay_s, help="duration of a step of the fake backend"
    )
    parser.add_argument("--datum-tokens", type=int, default=plan.datum_tokens, help="tokens of the one datum of a pass")
    parser.add_argument("--postgresql", action="store_true", help="start a PostgreSQL server and use it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the server first
    print(HEADER, flush=True)

    with PostgresqlServer(is_durable=True) if arguments.postgresql else nullcontext() as postgresql:
        minutes = soak(
            Plan(
                minutes=arguments.minutes,
                num_sessions=arguments.sessions,
                num_futures=arguments.futures,
                step_delay_s=arguments.step_delay_s,
                datum_tokens=arguments.datum_tokens,
                database_url=None if postgresql is None else postgresql.new_database(),
            )
        )

    raise SystemExit(1 if any(minute.num_5xx or minute.failures for minute in minutes) else 0)
