"""Requests of many lengths on a cold server compared with the same requests when all programs are compiled.

Each run is a separate process that starts a backend with an empty compilation cache. A step is forward_backward of one
sequence and optim_step, including the wait for the results. The lengths are spread evenly and shuffled. `--samples`
draws some samples between the steps; their time is reported separately, and training programs are compiled meanwhile.
The run then repeats everything with all programs compiled. Runs with and without background compilation alternate.

`compile_s` is the time of the compiler in the cold half, without tracing and lowering.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import compute_quartiles, report
from benchmarks.meters import CompileCounter, Cost, measure_cost
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import MAX_TRAINING_COMPILE_THREADS, JaxConfig, count_compile_threads
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.launch.engine_process import FULL_COLLECTION_AFTER
from skyrl_tx.process.setup import restart_with_huge_pages, tune_interpreter
from skyrl_tx.testing.tiny_models import PRESETS, write_preset

MODEL = ModelId("model")


def make_example(number: int, length: int) -> PassExample:
    tokens = np.random.default_rng(number).integers(0, 500, length + 1).astype(np.int32)
    return PassExample(
        request_id=RequestId(f"request {number}"),
        model_id=MODEL,
        tokens=tokens[:-1],
        loss="cross_entropy",
        loss_inputs={"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)},
        loss_config={},
    )


def make_sample_request(number: int, length: int) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(f"sample {number}"),
        sampler=None,
        prompt=np.arange(length, dtype=np.int32),
        num_samples=1,
        params=SamplingParams(seed=number, max_tokens=16, eos_stops=False),
        options=PromptOptions(),
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a cold and a warm half in this process."""
    draw = np.random.default_rng(0)
    lengths = draw.permutation(np.linspace(options.shortest, options.longest, options.requests).astype(int)).tolist()
    with tempfile.TemporaryDirectory() as cache:
        config = JaxConfig(compile_cache_dir=Path(cache), compile_threads=options.threads, max_sample_tokens=8192)
        backend, compiles = JaxBackend(options.model, config), CompileCounter()
        started = measure_cost(backend.start)
        backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=32, seed=0)))
        time.sleep(options.idle_s)
        result: dict[str, Any] = {"start_s": round(started.wall_s, 2), "tokens": sum(lengths)}
        for half in "cold", "warm":
            steps: list[Cost] = []
            samples: list[Cost] = []
            compiles.take()
            for number, length in enumerate(lengths):
                batch = PreparedModelPassBatch(examples=(make_example(number, length),))

                def step(batch: PreparedModelPassBatch = batch) -> None:
                    backend.forward_backward(batch)
                    backend.optim_step(MODEL, OptimizerParams())

                steps.append(measure_cost(step))
                if options.samples and number % (options.requests // options.samples) == 0:
                    request = PreparedSampleBatch(requests=(make_sample_request(number, min(length, 200)),))
                    samples.append(measure_cost(lambda request=request: backend.sample(request)))
            result[half] = {
                "s": round(sum(cost.wall_s for cost in steps), 2),
                "cpu_s": round(sum(cost.cpu_s for cost in steps), 2),
                "worst_step_s": round(max(cost.wall_s for cost in steps), 2),
                "samples_s": round(sum(cost.wall_s for cost in samples), 2),
                **compiles.take(),
            }
            while half == "cold" and backend.meters().progress is not None:
                time.sleep(0.1)
        backend.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30M", help=f"{', '.join(PRESETS)}, or the directory of a model")
    parser.add_argument("--requests", type=int, default=64, help="number of lengths")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest sequence")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest sequence")
    parser.add_argument("--samples", type=int, default=0, help="samples between the steps")
    parser.add_argument("--idle-s", type=float, default=0.0, help="seconds between the start and the first request")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument(
        "--threads", type=int, help="threads that compile in the background; unset: half of the cores, and 0, in turn"
    )
    parser.add_argument("--one-run", action="store_true", help="measure once, in this process")
    options = parser.parse_args()

    if options.one_run:
        json.dump(run(options), sys.stdout)
        return

    kinds = (
        {"in the background": count_compile_threads(MAX_TRAINING_COMPILE_THREADS), "on first use": 0}
        if options.threads is None
        else {"run": options.threads}
    )

    with tempfile.TemporaryDirectory() as directory:
        model = write_preset(options.model, Path(directory)) if options.model in PRESETS else Path(options.model)
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, threads in kinds.items():
                found[kind].append(_run_in_child(options, model, threads))

    # Summarize the runs of each kind.
    results: dict[str, Any] = {}
    for kind, runs in found.items():
        halves = {
            half: {name: [run[half][name] for run in runs] for name in runs[0][half]} for half in ("cold", "warm")
        }
        results[kind] = {
            "tokens": runs[0]["tokens"],
            **{
                half: {name: compute_quartiles(values, 2) for name, values in of.items()} for half, of in halves.items()
            },
            "cold / warm": compute_quartiles([run["cold"]["s"] / run["warm"]["s"] for run in runs], 2),
            "cold / warm, CPU s": compute_quartiles([run["cold"]["cpu_s"] / run["warm"]["cpu_s"] for run in runs], 2),
        }

    report("cold", options, results, ("jax", "jaxlib", "numpy"))


def _run_in_child(options: argparse.Namespace, model: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_cold", "--one-run", "--model", str(model)]
    for name in ("requests", "shortest", "longest", "samples", "idle_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    if "--one-run" in sys.argv:  # as the engine process does
        restart_with_huge_pages()
        tune_interpreter(full_collection_after=FULL_COLLECTION_AFTER)
    main()
