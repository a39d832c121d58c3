"""Cost of open consoles: CPU of the API process, and the latency of SDK calls.

Each console polls the overview, as the page does, and the curves of a run, every two seconds. Blocks of SDK calls
without and with the consoles take turns on one server with the fake backend. The consoles are a process of their own,
which needs CPU too: on few cores it adds to the latency.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import tinker

from benchmarks.bench_api import BASE_MODEL, one_datum
from benchmarks.common import report, summary
from tests.support.live_server import LiveServer

POLL_S = 2.0
_PAGE_HEADERS = {"Sec-Fetch-Site": "same-origin", "HX-Request": "true"}


def train(client: tinker.TrainingClient, steps: int) -> None:
    """Make steps without waiting for each."""
    for _ in range(steps):
        client.forward_backward([one_datum()], "cross_entropy")
        last = client.optim_step(tinker.AdamParams(learning_rate=1e-3))
    last.result()


def call_ms(client: tinker.TrainingClient) -> float:
    """Return the milliseconds of one round trip."""
    start = time.perf_counter()
    client.forward([one_datum()], "cross_entropy").result()
    return (time.perf_counter() - start) * 1e3


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(url: str, run_id: str, consoles: int, is_open: Any) -> None:
    """Poll as open pages do while `is_open` is set; runs in a process of its own."""

    async def console(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, headers=_PAGE_HEADERS, timeout=30) as client:
            await asyncio.sleep(POLL_S * number / consoles)
            since = 0
            while True:
                start = time.monotonic()
                if is_open.is_set():
                    (await client.get("/overview")).raise_for_status()
                    answer = await client.get(f"/console/data/training_runs/{run_id}/curves", params={"since": since})
                    since = answer.raise_for_status().json()["step"][-1]
                await asyncio.sleep(max(POLL_S - (time.monotonic() - start), 0.0))

    async def everyone() -> None:
        await asyncio.gather(*(console(number) for number in range(consoles)))

    asyncio.run(everyone())


def measure(server: LiveServer, client: tinker.TrainingClient, options: argparse.Namespace) -> dict[str, Any]:
    """Return latencies and CPU without and with consoles, and the ratios of neighbouring blocks."""
    context = multiprocessing.get_context("spawn")
    is_open = context.Event()
    arguments = (server.url, client.model_id, options.consoles, is_open)
    consoles = context.Process(target=watch, args=arguments, daemon=True)
    consoles.start()
    latencies: dict[bool, list[float]] = {False: [], True: []}
    shares: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(options.blocks):
            for with_consoles in (False, True):
                is_open.set() if with_consoles else is_open.clear()
                time.sleep(POLL_S)  # until all consoles do so
                spent, start = cpu_s(server.pid), time.perf_counter()
                while time.perf_counter() - start < options.block_s:
                    latencies[with_consoles].append(call_ms(client))
                    time.sleep(0.02)
                shares[with_consoles].append((cpu_s(server.pid) - spent) / (time.perf_counter() - start))
    finally:
        consoles.terminate()
        consoles.join()
    return {
        "call_ms_without": summary(latencies[False]),
        "call_ms_with": summary(latencies[True]),
        "api_cores_without": summary(shares[False]),
        "api_cores_with": summary(shares[True]),
        "median_latency_ratio": round(statistics.median(latencies[True]) / statistics.median(latencies[False]), 3),
        "cores_of_one_console": round(
            (statistics.median(shares[True]) - statistics.median(shares[False])) / options.consoles, 5
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consoles", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--block-s", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the run that the consoles show")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer(Path(folder)) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service,
    ):
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result()
        train(client, options.steps)
        results = measure(server, client, options)
    report("console", options, results, ["skyrl-tx", "tinker", "fastapi", "jinja2"])


if __name__ == "__main__":
    main()
