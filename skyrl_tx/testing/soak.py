"""`make soak`: thousands of futures wait while hundreds of sessions train and sample; what grows, what is slow.

Prints a row a minute: memory of API and engine, failures, and how long after its completion (as the database has it) a
result was in the hands of a client that waited for it. Clients share the machine with the server.
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

from skyrl_tx.listening import raise_file_limit
from skyrl_tx.testing.database_look import rows, size_bytes
from skyrl_tx.testing.live_server import LiveServer
from skyrl_tx.testing.postgresql_server import PostgresqlServer
from skyrl_tx.testing.soak_clients import TOKENS_A_SAMPLE, Arrival, Crowd

HEADER = (
    "| minute | API MiB | engine MiB | database MiB | futures done | waiting | 5xx | failed "
    "| wake-up p50 ms | p95 ms | clients' lag p95 ms | load |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
_LOOK_EVERY_S = 5.0
_LAG_EVERY_S = 0.02
_ARRIVALS_A_LOOK = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """What was seen in a minute, and at its end."""

    number: float
    api_bytes: int
    engine_bytes: int
    database_bytes: int
    num_done: int
    num_waiting: int
    num_5xx: int
    """Lost connections included."""
    failures: Sequence[str]
    wakes_ms: Sequence[float]
    lags_ms: Sequence[float]
    """How late the clients' own loop was, which is part of each wake-up."""
    load: float

    def __str__(self) -> str:
        median, p95 = np.percentile(self.wakes_ms, [50, 95]) if self.wakes_ms else (np.nan, np.nan)
        lag = np.percentile(self.lags_ms, 95)
        sizes = " | ".join(str(size >> 20) for size in (self.api_bytes, self.engine_bytes, self.database_bytes))
        counts = f"{self.num_done:,} | {self.num_waiting:,} | {self.num_5xx} | {len(self.failures)}"
        return f"| {self.number:g} | {sizes} | {counts} | {median:.0f} | {p95:.0f} | {lag:.0f} | {self.load:.1f} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much, and for how long."""

    minutes: float = 15.0
    num_sessions: int = 200
    num_futures: int = 10_000
    step_delay_s: float = 0.03
    slots: int = 2
    """Samples that are drawn at once."""
    datum_tokens: int = 256
    """Of the one datum of a pass. A batch takes 4,096: passes of 4 tokens are taken, and answered, all at once."""
    row_s: float = 60.0
    """Time that a row tells of."""
    database_url: str | None = None
    """A database of PostgreSQL; None: a file."""

    def flags(self) -> list[str]:
        """The server's; so slow a backend leaves time for futures to wait."""
        flags = ["--base-model", "fake", "--backend", "fake"]
        flags += ["--backend-config.step-delay-s", str(self.step_delay_s)]
        flags += ["--backend-config.max-sample-tokens", str(self.slots * TOKENS_A_SAMPLE)]
        flags += ["--backend-config.max-models", str(self.num_sessions)]
        return [*flags, "--database-url", self.database_url] if self.database_url is not None else flags


def soak(plan: Plan) -> list[Minute]:
    """Serve, and let clients wait; print each row once it is over."""
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
    crowd = Crowd(server.url, "fake", plan.num_sessions, plan.num_futures, plan.datum_tokens)
    work = asyncio.create_task(crowd.run())
    minutes: list[Minute] = []
    try:
        while len(minutes) * plan.row_s < plan.minutes * 60:
            minutes.append(await _minute(plan, server, data_dir, crowd, work, len(minutes)))
            print(minutes[-1], flush=True)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return minutes


async def _minute(
    plan: Plan, server: LiveServer, data_dir: Path, crowd: Crowd, work: asyncio.Task[None], index: int
) -> Minute:
    seen, end = crowd.seen, time.monotonic() + plan.row_s
    before, done, first_failure = seen.statuses.copy(), seen.num_done, len(seen.failures)
    wakes: list[float] = []
    lags: list[float] = []
    while time.monotonic() < end:
        lags += await _lags_ms(min(_LOOK_EVERY_S, max(end - time.monotonic(), 0)))
        if work.done():
            work.result()
        wakes += await asyncio.to_thread(_wakes_ms, plan, data_dir, seen.take_arrivals()[-_ARRIVALS_A_LOOK:])
    statuses = seen.statuses - before
    return Minute(
        number=(index + 1) * plan.row_s / 60,
        api_bytes=_resident(server.pid),
        engine_bytes=_resident(server.engine_pid),
        database_bytes=size_bytes(data_dir, plan.database_url),
        num_done=seen.num_done - done,
        num_waiting=seen.num_waiting,
        num_5xx=sum(number for status, number in statuses.items() if status == 0 or status >= 500),
        failures=seen.failures[first_failure:],
        wakes_ms=wakes,
        lags_ms=lags,
        load=os.getloadavg()[0],
    )


async def _lags_ms(duration_s: float) -> list[float]:
    """How late this loop comes to what it should do, again and again for a while."""
    lags: list[float] = []
    begun_at = due_at = time.monotonic()
    while due_at < begun_at + duration_s:
        due_at = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append((time.monotonic() - due_at) * 1e3)
    return lags


def _wakes_ms(plan: Plan, data_dir: Path, arrivals: Sequence[Arrival]) -> list[float]:
    """How long results were on their way to polls that were there before them."""
    names = ", ".join(f"'{arrival.request_id}'" for arrival in arrivals)
    wanted = f"SELECT request_id, completed_at FROM requests WHERE request_id IN ({names})"
    completed_at: dict[str, float] = dict(rows(data_dir, plan.database_url, wanted)) if arrivals else {}
    return [
        (arrival.arrived_at - completed_at[arrival.request_id]) * 1e3
        for arrival in arrivals
        if completed_at.get(arrival.request_id, 0.0) > arrival.asked_at
    ]


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def main() -> None:
    """Soak as told; the exit status says whether any call was answered with a 5xx."""
    plan = Plan()
    parser = argparse.ArgumentParser(description="Let thousands of futures wait while sessions train and sample.")
    parser.add_argument("--minutes", type=float, default=plan.minutes)
    parser.add_argument("--sessions", type=int, default=plan.num_sessions)
    parser.add_argument("--futures", type=int, default=plan.num_futures, help="that wait at once")
    parser.add_argument("--step-delay-s", type=float, default=plan.step_delay_s, help="of the fake backend")
    parser.add_argument("--datum-tokens", type=int, default=plan.datum_tokens, help="of which a pass has one")
    parser.add_argument("--postgresql", action="store_true", help="keep requests in one, which is started for it")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and to end the server before
    print(HEADER, flush=True)
    with PostgresqlServer(is_durable=True) if told.postgresql else nullcontext() as postgresql:
        minutes = soak(
            Plan(
                minutes=told.minutes,
                num_sessions=told.sessions,
                num_futures=told.futures,
                step_delay_s=told.step_delay_s,
                datum_tokens=told.datum_tokens,
                database_url=None if postgresql is None else postgresql.new_database(),
            )
        )
    raise SystemExit(1 if any(minute.num_5xx or minute.failures for minute in minutes) else 0)


if __name__ == "__main__":
    main()
