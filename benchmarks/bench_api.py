"""Latency that the server adds to one SDK call, and a thousand sampling calls that wait at the same time.

The SDK calls `forward(...).result()` for one short datum, alternating between `skyrl-tx serve` with the fake backend
and an HTTP stub that replies immediately with the same bytes. The difference of each pair is the added latency.
Targets: median at most 10 ms, 95th percentile at most 30 ms.

With `--against DIRECTORY`, another checkout, both servers run at once and serve blocks of the same calls in turns. The
CPU time of API and engine per call, and the latency of a call, are compared block by block.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import tinker

from benchmarks.common import report, summarize
from benchmarks.http_stub import run_stub
from skyrl_tx import DISTRIBUTION
from skyrl_tx.process.setup import raise_file_limit
from tests.support.live_server import LiveServer

BASE_MODEL = "fake"
TARGET_MEDIAN_MS = 10.0
TARGET_P95_MS = 30.0


def make_datum() -> tinker.Datum:
    tokens = list(range(1, 17))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[15]),
            "weights": tinker.TensorData(data=[1.0] * 15, dtype="float32", shape=[15]),
        },
    )


def create_training_client(url: str) -> tinker.TrainingClient:
    return (
        tinker.ServiceClient(base_url=url, api_key="tml-local").create_lora_training_client(BASE_MODEL, rank=8).result()
    )


def measure_forward_ms(client: tinker.TrainingClient, data: list[tinker.Datum]) -> float:
    start = time.perf_counter()
    client.forward(data, "cross_entropy").result()
    return (time.perf_counter() - start) * 1e3


def measure_latency(url: str, num_pairs: int) -> dict[str, Any]:
    data = [make_datum()]
    with run_stub(url) as stub:
        ours, floor = create_training_client(url), create_training_client(stub.url)
        for client in (ours, floor):
            measure_forward_ms(client, data)

        stub.replay()
        for _ in range(20):  # warms up connections, imports and caches
            measure_forward_ms(floor, data)
            measure_forward_ms(ours, data)
        pairs = [(measure_forward_ms(ours, data), measure_forward_ms(floor, data)) for _ in range(num_pairs)]

    added = summarize([server - bare for server, bare in pairs])
    return {
        "server_ms": summarize([server for server, _ in pairs]),
        "stub_ms": summarize([bare for _, bare in pairs]),
        "added_ms": added,
        "within_targets": added["median"] <= TARGET_MEDIAN_MS and added["p95"] <= TARGET_P95_MS,
    }


def measure_waiting(url: str, num_calls: int, max_tokens: int) -> dict[str, Any]:
    """Send all calls before any of them can complete, then wait for all results."""
    client = (
        tinker.ServiceClient(base_url=url, api_key="tml-local").create_sampling_client(base_model=BASE_MODEL).result()
    )
    params = tinker.SamplingParams(max_tokens=max_tokens, temperature=1.0)

    start = time.perf_counter()
    futures = [client.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params) for _ in range(num_calls)]
    errors: list[str] = []
    for future in futures:
        try:
            future.result()
        except Exception as error:  # counted and reported
            errors.append(f"{type(error).__name__}: {error}")

    return {
        "calls": num_calls,
        "errors": len(errors),
        "first_errors": errors[:3],
        "seconds": round(time.perf_counter() - start, 2),
    }


class Calls(Protocol):
    """Makes a block of calls; returns the latency of each in milliseconds, empty if they overlap."""

    def __call__(self, url: str, count: int) -> list[float]: ...


class Blocks:
    """Blocks of calls, with one client for each server."""

    def __init__(self, urls: list[str]) -> None:
        self._training = {url: create_training_client(url) for url in urls}
        self._sampling = {
            url: tinker.ServiceClient(base_url=url, api_key="tml-local")
            .create_sampling_client(base_model=BASE_MODEL)
            .result()
            for url in urls
        }

    def passes(self, url: str, count: int) -> list[float]:
        data = [make_datum()]
        return [measure_forward_ms(self._training[url], data) for _ in range(count)]

    def samples(self, url: str, count: int) -> list[float]:
        params = tinker.SamplingParams(max_tokens=32, temperature=1.0)
        prompt = tinker.ModelInput.from_ints(list(range(1, 65)))
        for future in [self._sampling[url].sample(prompt, 4, params) for _ in range(count)]:
            future.result()
        return []


def read_cpu_s(server: LiveServer) -> float:
    """Return the CPU time of API and engine so far."""
    ticks = 0
    for pid in (server.pid, server.engine_pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def compare(servers: list[LiveServer], calls: Calls, num_blocks: int, count: int) -> dict[str, Any]:
    """Return CPU milliseconds per call of the servers, the ratio to the first one, and their latencies."""
    spent: list[list[float]] = [[], []]
    latencies: list[list[float]] = [[], []]

    # Warm up both servers.
    for server in servers:
        calls(server.url, count)

    # Alternate which server comes first.
    for block in range(num_blocks):
        for index in (0, 1) if block % 2 else (1, 0):
            before = read_cpu_s(servers[index])
            latencies[index] += calls(servers[index].url, count)
            spent[index].append((read_cpu_s(servers[index]) - before) / count * 1e3)

    ratios = [new / old for old, new in zip(*spent, strict=True)]
    return {
        "cpu_ms": [summarize(values) for values in spent],
        "ratio": {**summarize(ratios), "of_sums": round(sum(spent[1]) / sum(spent[0]), 4)},
        "median_of_differences_ms": round(statistics.median(n - o for o, n in zip(*spent, strict=True)), 4),
        "latency_ms": [summarize(values) for values in latencies if values],
    }


def make_environment(checkout: Path) -> dict[str, str]:
    """Return an environment in which Python imports a checkout. Raises RuntimeError if it imports another one."""
    # Without PYTHONSAFEPATH, the working directory comes before PYTHONPATH.
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    program = [sys.executable, "-c", "import skyrl_tx; print(skyrl_tx.__file__)"]
    imported = Path(subprocess.check_output(program, env=environment, text=True).strip())
    if not imported.is_relative_to(checkout.resolve()):
        raise RuntimeError(f"{imported} is imported instead of {checkout}")
    return environment


def compare_with(checkout: Path, num_blocks: int, count: int) -> dict[str, Any]:
    """Compare this checkout with another one."""
    flags = ["--base-model", BASE_MODEL, "--backend", "fake"]
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as directory:
        environments = [make_environment(tree) for tree in (checkout, here)]
        with (
            LiveServer(Path(directory) / "other", flags=flags, environment=environments[0]) as other,
            LiveServer(Path(directory) / "here", flags=flags, environment=environments[1]) as ours,
        ):
            servers = [other, ours]
            blocks = Blocks([server.url for server in servers])
            return {
                "passes": compare(servers, blocks.passes, num_blocks, count),
                "samples": compare(servers, blocks.samples, num_blocks, count),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="forward calls to the server and to the stub each")
    parser.add_argument("--calls", type=int, default=1000, help="sampling calls that wait at the same time")
    parser.add_argument("--against", type=Path, help="checkout to compare the CPU time of requests with")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of calls of each server, with --against")
    parser.add_argument("--block-calls", type=int, default=200, help="calls of a block, with --against")
    options = parser.parse_args()

    raise_file_limit()
    packages = (DISTRIBUTION, "tinker", "uvicorn", "fastapi")
    if options.against is not None:
        results = compare_with(options.against, options.blocks, options.block_calls)
        report("api", options, results, packages)
        return

    with tempfile.TemporaryDirectory() as directory:
        flags = ["--base-model", BASE_MODEL, "--backend", "fake"]
        with LiveServer(Path(directory) / "latency", flags=flags) as server:
            latency = measure_latency(server.url, options.pairs)
        # The delay is long enough for the last call to arrive before the first one completes.
        flags += ["--backend-config.step-delay-s", "1.0", "--backend-config.max-sample-tokens", "10000000"]
        with LiveServer(Path(directory) / "waiting", flags=flags) as server:
            waiting = measure_waiting(server.url, options.calls, max_tokens=128)

    report("api", options, {"latency": latency, "waiting": waiting}, packages)


if __name__ == "__main__":
    main()
