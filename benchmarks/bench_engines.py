"""Throughput of multiple engines on one PostgreSQL database, compared with one engine.

`skyrl-tx serve --engines N` runs the fake backend, which waits `--step-delay-s` per step instead of computing. So the
engines need little CPU, and the numbers show the cost of sharing a database. Each tenant trains a model over HTTP with
one pass in flight, or samples with one request in flight. The benchmark counts the requests that get their results
within `--seconds`.

`--work bursts` instead measures bursts that load the engines unevenly. As many new sampling clients as there are
engines send `BURST_REQUESTS` requests of `BURST_SAMPLES` samples each, all at once. All requests of one client prefer
the same engine, and two clients may prefer the same engine too. Ideally all engines are busy until the end.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import report
from tests.support.live_server import LiveServer
from tests.support.postgresql_server import PostgresqlServer

_WARM_UP_S = 3.0
BURST_REQUESTS = 4
BURST_SAMPLES = 8
_TOKENS = list(range(1, 17))
_DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": _TOKENS[:-1]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": _TOKENS[1:], "dtype": "int64", "shape": [15]},
        "weights": {"data": [1.0] * 15, "dtype": "float32", "shape": [15]},
    },
}
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": _TOKENS}]}


class Tenant:
    """One client with its own session, and its own model or sampling session."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._session_id = self._model_id = self._sampler_id = ""
        self._num_sent = 0

    async def _post(self, endpoint: str, **body: Any) -> dict[str, Any]:
        answer = await self._http.post(f"/api/v1/{endpoint}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def _result(self, handle: dict[str, Any]) -> dict[str, Any]:
        """Poll until the result of a request is there. Raises RuntimeError if it failed."""
        while True:
            answer = await self._http.post("/api/v1/retrieve_future", json={"request_id": handle["request_id"]})
            if answer.status_code == HTTPStatus.REQUEST_TIMEOUT:
                continue
            answer.raise_for_status()
            if "error" in (found := answer.json()):
                raise RuntimeError(found["error"])
            return found

    async def open(self, work: str) -> None:
        """Create the session, and what the work needs."""
        self._session_id = (await self._post("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        self._num_sent = 0
        if work == "train":
            config = {"rank": 8, "seed": 1}
            new = {"session_id": self._session_id, "model_seq_id": 0, "base_model": "fake", "lora_config": config}
            self._model_id = (await self._result(await self._post("create_model", **new)))["model_id"]
        else:
            new = {"session_id": self._session_id, "sampling_session_seq_id": 0, "base_model": "fake"}
            self._sampler_id = (await self._post("create_sampling_session", **new))["sampling_session_id"]

    async def train(self) -> None:
        """Run one pass of one sequence: one step of the backend."""
        self._num_sent += 1
        passed = {"data": [_DATUM], "loss_fn": "cross_entropy"}
        ids = {"model_id": self._model_id, "seq_id": self._num_sent}
        await self._result(await self._post("forward_backward", **ids, forward_backward_input=passed))

    async def sample(self, num_samples: int = 1) -> None:
        """Draw samples of 16 tokens. Each token is one decode step of a backend with one slot."""
        self._num_sent += 1
        ids = {"sampling_session_id": self._sampler_id, "seq_id": self._num_sent}
        params = {"max_tokens": 16, "temperature": 1.0, "seed": self._num_sent, "stop": []}
        await self._result(
            await self._post("asample", **ids, prompt=_PROMPT, num_samples=num_samples, sampling_params=params)
        )


async def count(url: str, work: str, num_tenants: int, seconds: float) -> float:
    """Return the results a second of all tenants together, after a warm-up."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers={"X-API-Key": "tml-local"}) as http:
        tenants = [Tenant(http) for _ in range(num_tenants)]
        await asyncio.gather(*(tenant.open(work) for tenant in tenants))
        num_done, started = 0, time.monotonic()

        async def repeat(run: Callable[[], Awaitable[None]]) -> None:
            nonlocal num_done
            while time.monotonic() < started + _WARM_UP_S + seconds:
                await run()
                num_done += started + _WARM_UP_S <= time.monotonic() < started + _WARM_UP_S + seconds

        await asyncio.gather(*(repeat(tenant.train if work == "train" else tenant.sample) for tenant in tenants))
    return num_done / seconds


async def time_bursts(url: str, num_tenants: int, num_bursts: int) -> list[float]:
    """Return the seconds of each burst."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers={"X-API-Key": "tml-local"}) as http:
        seconds: list[float] = []
        for _ in range(num_bursts):
            tenants = [Tenant(http) for _ in range(num_tenants)]
            await asyncio.gather(*(tenant.open("sample") for tenant in tenants))
            started = time.monotonic()
            await asyncio.gather(*(tenant.sample(BURST_SAMPLES) for tenant in tenants for _ in range(BURST_REQUESTS)))
            seconds.append(round(time.monotonic() - started, 2))
    return seconds


@contextmanager
def run_server(options: argparse.Namespace, database: PostgresqlServer, num_engines: int) -> Generator[str]:
    """Run a server with a number of engines, and yield its URL when all are ready."""
    flags = ["--base-model", "fake", "--backend", "fake", "--backend-config.sample-slots", "1"]
    flags += ["--backend-config.step-delay-s", str(options.step_delay_s)]
    flags += ["--database-url", database.new_database(), "--engines", str(num_engines)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-engines-") as directory,
        LiveServer(Path(directory) / "data", flags=flags, ready_within_s=180) as server,
    ):
        if num_engines > 1:
            ready = re.compile(rf"({num_engines}) of {num_engines} engines are ready")
            server.wait_for(ready, within_s=180)
        yield server.url


def measure(options: argparse.Namespace, database: PostgresqlServer, work: str, num_engines: int) -> float:
    """Return the results a second of a server with a number of engines."""
    with run_server(options, database, num_engines) as url:
        return asyncio.run(count(url, work, options.tenants, options.seconds))


def measure_bursts(options: argparse.Namespace, database: PostgresqlServer) -> dict[str, Any]:
    """Return the seconds of bursts on several engines, their mean, and the ideal."""
    with run_server(options, database, options.engines) as url:
        seconds = asyncio.run(time_bursts(url, options.engines, options.bursts))
    ideal_s = BURST_REQUESTS * BURST_SAMPLES * options.step_delay_s
    return {"mean_s": round(sum(seconds) / len(seconds), 2), "ideal_s": round(ideal_s, 2), "seconds": seconds}


def main() -> None:
    """Measure one engine and several, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4, help="number of engines that is compared with one")
    parser.add_argument("--tenants", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--step-delay-s", type=float, default=0.1, help="time of each step of the fake backend")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--work", nargs="+", choices=("train", "sample", "bursts"), default=["train", "sample"])
    options = parser.parse_args()

    results: dict[str, Any] = {}
    with PostgresqlServer(is_durable=True) as database:
        if "bursts" in options.work:
            results["bursts"] = measure_bursts(options, database)

        for work in [work for work in options.work if work != "bursts"]:
            pairs = [
                {number: measure(options, database, work, number) for number in (1, options.engines)}
                for _ in range(options.repeats)
            ]
            results[work] = [
                {
                    "one_engine_per_s": round(pair[1], 2),
                    "engines_per_s": round(pair[options.engines], 2),
                    "times": round(pair[options.engines] / pair[1], 2),
                }
                for pair in pairs
            ]

    report("engines", options, results, ["sqlalchemy", "psycopg"])


if __name__ == "__main__":
    main()
