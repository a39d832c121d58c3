"""Parity and speed of one GPU: compares its results with the CPU, and its speed with its peak.

The parts of a run, in this order:

- `parity`: the tests of tests/gpu;
- `suites`: attention kernels against plain JAX, and the backend suite;
- `training`, `decoding-64` and `decoding-256` for each model.

Each part runs in a separate process and is recorded as soon as it is done. A run skips parts that have a record of this
commit, and starts no part that may not end in the time left. So it can be stopped and continued.

Models have published shapes and random weights in bfloat16. As in a server, the KV cache and the slots of adapters are
in memory while a model is trained, and the memory plan chooses the size of micro-batches. A training step has 32,768
tokens in sequences of 2,048 and an adapter of rank 32. Its speed is compared with the peak FLOPs of the data sheet, and
with the measured rate of a matrix product. Samples have 1,000 tokens on average, different prompts and one adapter.
Decoding speed is compared with the time to read weights and KV cache, at the memory bandwidth of the data sheet and as
measured.

`--models tiny` shows on any machine that the program works.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench_aot import load, save
from benchmarks.bench_sampling import Work, compute_least_work, make_request
from benchmarks.bench_training import compute_least_flops, make_example
from benchmarks.common import compute_quartiles, describe_machine, get_commit
from benchmarks.device_profile import profile
from benchmarks.meters import Bandwidth, CompileCounter, MatmulRate, measure_cost, peak_memory_mb
from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.shapes import FIRST_CHUNK, MAX_PROMPTS_TOGETHER
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.tools.plan.hardware import KINDS, DeviceKind
from tests.support.model_configs import QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "gpu.json"
TINY = {
    **QWEN3_600M,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3_600M,
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B-8": {**QWEN3_30B_A3B, "num_hidden_layers": 8},
    "tiny": TINY,
}
"""Configurations by name. Qwen3-30B-A3B has only 8 of its 48 layers, so that it compiles faster."""
TESTS = {
    "parity": ("-m", "gpu", "tests/gpu"),
    "suites": (
        "-m",
        "",
        "tests/unit/layers/test_kernels.py",
        "tests/unit/layers/test_experts.py",
        "tests/contract/test_jax.py::TestJax",
    ),
}
"""Arguments of pytest for the parts that are tests. Their processes share the GPU, and compile on all cores."""
TRAINING = "training"
EXPECTED_S = {
    "parity": 240.0,
    "suites": 240.0,
    "Qwen3-0.6B": 100.0,
    "Qwen3-4B": 120.0,
    "Qwen3-8B": 130.0,
    "Qwen3-30B-A3B-8": 100.0,
    "tiny": 5.0,
}
"""How long a part may take, by test or by model. A part is not started if less time is left."""
RANK = 32
WARM_UP_SLICES = 2
"""Slices of all samples that are not timed."""
ADAPTER, SAMPLER = ModelId("adapter"), SamplerId("adapter")


@dataclass(frozen=True, slots=True)
class Scale:
    """The lengths of sequences and samples, in tokens."""

    rows: int
    """Sequences of a training step."""
    length: int
    prompt: int
    new: int
    """New tokens after the prompt. Only the middle ones are timed."""


FULL, SMALL = Scale(16, 2048, 912, 176), Scale(2, 128, 48, 112)


def get_scale(model: str) -> Scale:
    return SMALL if model == "tiny" else FULL


def list_parts(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a part and its model, in the order of a run."""
    tasks = (TRAINING, *(f"decoding-{slots}" for slots in (64, 256)))
    return [("parity", ""), ("suites", ""), *((task, name) for name in names for task in tasks)]


def start_backend(folder: Path, **settings: Any) -> JaxBackend:
    """Start a backend with the defaults of a server, apart from `settings`: KV cache and adapters are in memory."""
    config = JaxConfig(load_format="dummy", dtype="bfloat16", warmup=False, **settings)
    backend = JaxBackend(str(folder), config)
    backend.start()
    backend.create_model(ADAPTER, ModelSpec(lora=LoraSpec(rank=RANK, seed=0)))
    return backend


def train(shape: models.ModelConfig, folder: Path, scale: Scale, repeats: int) -> dict[str, Any]:
    """Time training steps, each with forward_backward and optim_step."""
    backend, draw = start_backend(folder), np.random.default_rng(0)
    examples = [make_example(RequestId("r"), ADAPTER, scale.length, shape.vocab_size, draw) for _ in range(scale.rows)]
    batch = PreparedModelPassBatch(examples=tuple(examples))

    def step() -> None:
        backend.forward_backward(batch)
        backend.optim_step(ADAPTER, OptimizerParams())

    first = measure_cost(step)

    compiles = CompileCounter()
    with wait_for_measurements():
        seconds = [measure_cost(step).wall_s for _ in range(repeats)]
        late, rates, of_step = compiles.take()["compiles"], _measure_rates(), profile(step)

    tokens, flops = scale.rows * scale.length, compute_least_flops(shape, RANK, [scale.length] * scale.rows, True)
    return {
        "tokens_per_s": compute_quartiles([tokens / duration for duration in seconds], 1),
        **_compute_shares([flops / duration for duration in seconds], rates["peak_flops"], rates["flops"]),
        "first_step_s": round(first.wall_s, 1),
        "compiles_after_warm_up": late,
        "micro_batches": (backend.meters().micro_batches or 0) // (repeats + 1),
        "peak_memory_mb": peak_memory_mb(),
        "rates": rates,
        "profile": of_step,
    }


def decode(shape: models.ModelConfig, folder: Path, scale: Scale, slots: int) -> dict[str, Any]:
    """Time the decode slices in which all slots have a sample, and the prefill of their prompts before."""
    longest = scale.prompt + scale.new
    backend = start_backend(
        folder,
        sample_slots=slots,
        max_sample_tokens=slots * longest,
        max_context_length=longest,
        prefix_cache_tokens=0,
        prefill_tokens=slots * longest,  # all prompts, then slices of all samples
    )
    backend.load_sampler(SAMPLER, backend.capture(ADAPTER, {StatePart.WEIGHTS}))
    backend.delete_model(ADAPTER)
    draw = np.random.default_rng(0)

    def begin(lengths: Sequence[int], new: int) -> None:
        """Begin a sample from each of new prompts of such lengths."""
        prompts = [draw.integers(2, shape.vocab_size, length).astype(np.int32) for length in lengths]
        requests = [make_request(str(index), prompt, SAMPLER, 1, new) for index, prompt in enumerate(prompts)]
        backend.begin_sample(PreparedSampleBatch(requests=tuple(requests)))

    def step() -> int:
        """Return how many tokens a step of the backend drew."""
        return sum(len(delta.tokens) for delta in backend.step_sample())

    def steps(left: int) -> Iterator[tuple[float, int]]:
        """Step until a number of tokens is drawn; yield seconds and tokens of each step."""
        while left > 0:
            before = time.perf_counter()
            tokens = step()
            left -= tokens
            yield time.perf_counter() - before, tokens

    # Warm up with chunks of all sizes.
    first = measure_cost(lambda: [begin(choose_warm_up_lengths(slots, scale), 2), list(steps(2 * slots))])
    most, compiles = slots * JaxConfig().decode_slice_tokens, CompileCounter()

    with wait_for_measurements():
        begin([scale.prompt] * slots, scale.new)
        found = list(steps(slots * scale.new - (2 + WARM_UP_SLICES) * most))
        late, drawn = compiles.take()["compiles"], [tokens for _, tokens in found]
        of_decoding = profile(lambda: drawn.extend([step(), step()]))
        list(steps(slots * scale.new - sum(drawn)))
        begin([scale.prompt] * MAX_PROMPTS_TOGETHER, 1)
        rates, of_prefill = _measure_rates(), profile(lambda: list(steps(MAX_PROMPTS_TOGETHER)))

    # Full slices are decoding, the rest is prefill.
    whole = [seconds for seconds, tokens in found if tokens == most][WARM_UP_SLICES:]
    work = Work(slots, scale.prompt, 1, scale.new)
    num_bytes = compute_least_work(shape, work, RANK, 1)[1] / 2  # that is for float32
    bytes_per_slice = num_bytes * most / slots
    prefill_s = sum(seconds for seconds, tokens in found if tokens < most)

    return {
        "tokens_per_s": compute_quartiles([most / duration for duration in whole], 1),
        "ms_per_step": compute_quartiles([1e3 * duration * slots / most for duration in whole], 2),
        **_compute_shares([bytes_per_slice / duration for duration in whole], rates["peak_bytes"], rates["bytes"]),
        "prompt_tokens_per_s": round(slots * scale.prompt / prefill_s, 1),
        "first_samples_s": round(first.wall_s, 1),
        "compiles_after_warm_up": late,
        "slices_s": [round(seconds, 4) for seconds, _ in found],
        "peak_memory_mb": peak_memory_mb(),
        "rates": rates,
        "profile_of_prefill": of_prefill,
        "profile_of_decoding": of_decoding,
    }


def choose_warm_up_lengths(slots: int, scale: Scale) -> list[int]:
    """Return prompt lengths whose chunks have all sizes: a group of long prompts, and prompts of a single chunk."""
    return [scale.prompt] * MAX_PROMPTS_TOGETHER + [min(scale.prompt, FIRST_CHUNK)] * (slots - MAX_PROMPTS_TOGETHER)


@contextmanager
def wait_for_measurements() -> Iterator[None]:
    """Wait until no other part measures. Several parts may compile at the same time, if memory has room for them."""
    with (Path(tempfile.gettempdir()) / "skyrl_tx-bench_gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compute_shares(found: Sequence[float], peak: float, measured: float) -> dict[str, Any]:
    """Return shares of a rate of the data sheet, if the device is known, and of the measured one."""
    of_peak = {"share_of_peak": compute_quartiles([rate / peak for rate in found])} if peak else {}
    return {**of_peak, "share_of_measured_rate": compute_quartiles([rate / measured for rate in found])}


def _measure_rates() -> dict[str, float]:
    """Return the measured FLOP/s and bytes/s, and the rates of the data sheet (0 for an unknown device)."""
    device = jax.devices()[0]
    is_cpu, kind = device.platform == "cpu", find_kind(device.device_kind)
    flops = MatmulRate(1024) if is_cpu else MatmulRate(8192, jnp.bfloat16)
    band = Bandwidth() if is_cpu else Bandwidth(2 << 30)
    return {
        "flops": 1 / min(flops.sample().wall_s for _ in range(3)),
        "bytes": 1 / min(band.sample().wall_s for _ in range(3)),
        "peak_flops": kind.flops if kind else 0.0,
        "peak_bytes": kind.bytes_per_s if kind else 0.0,
    }


def find_kind(name: str) -> DeviceKind | None:
    """Return the kind of a device by the name that JAX gives it, such as `NVIDIA H100 80GB HBM3`."""
    parts = name.lower().replace("-", " ").split()
    known = [kind for kind in KINDS.values() if kind.family == "gpu" and kind.name.split("-")[0] in parts]
    if len(known) < 2:
        return known[0] if known else None
    exact = [kind for kind in known if all(part in name.lower() for part in kind.name.split("-")[1:])]
    return max(exact, key=lambda kind: len(kind.name), default=None)


def measure(task: str, model: str, repeats: int) -> dict[str, Any]:
    """Return the figures of a part, measured in this process."""
    content = MODELS[model]
    shape = models.find_family(content).config_from_hf(content)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        if task == TRAINING:
            return train(shape, Path(folder), get_scale(model), repeats)
        return decode(shape, Path(folder), get_scale(model), int(task.removeprefix("decoding-")))


def run_tests(task: str) -> dict[str, Any]:
    """Run the tests of a part, and return whether they passed, and the end of their output if not."""
    # Fixtures of pytest-benchmark, where it is installed, warn of processes, and warnings are errors.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:benchmark",
        "-n",
        str(min(os.cpu_count() or 1, 8)),
        *TESTS[task],
    ]

    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)

    print(run.stdout, flush=True)
    summary = run.stdout.strip().splitlines()[-1]
    return (
        {"passed": True, "summary": summary}
        if run.returncode == 0
        else {"passed": False, "summary": run.stdout[-6000:]}
    )


def measure_in_child(task: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a separate process, and return its results or the reason why there are none."""
    if task in TESTS:
        return run_tests(task)
    command = [sys.executable, "-m", "benchmarks.bench_gpu", "--part", task, "--models", model]
    command += ["--repeats", str(options.repeats)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    if run.returncode:
        return {"problem": run.stderr.strip()[-2000:]}
    return json.loads(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--minutes", type=float, default=9.0, help="time of a run; parts that remain are for the next")
    parser.add_argument("--records", type=Path, default=RECORDS, help="JSON file of the records")
    parser.add_argument("--again", action="store_true", help="also do parts that have a record of this commit")
    parser.add_argument("--skip-tests", action="store_true", help="only measure")
    parser.add_argument("--repeats", type=int, default=5, help="measured training steps")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.part:
        print(json.dumps(measure(options.part, options.models[0], options.repeats)))
        return

    end = time.monotonic() + 60 * options.minutes
    device = _read_device()
    if not device.startswith("gpu") and options.models != ["tiny"]:
        sys.exit(f"no GPU: the first device of JAX is {device}; --models tiny runs on any")

    # Leave out parts with a record of this commit.
    records, now = load(options.records), get_commit()
    known = {(record["options"]["part"], record["options"]["model"]) for record in records if record["commit"] == now}
    left = [part for part in list_parts(options.models) if options.again or part not in known]
    if options.skip_tests:
        left = [part for part in left if part[0] not in TESTS]

    for number, (task, model) in enumerate(left):
        if end - time.monotonic() < EXPECTED_S[model or task]:
            print(f"{len(left) - number} parts remain; run the same command again")
            break

        before = time.monotonic()
        results = measure_in_child(task, model, options)
        records.append(
            {
                "benchmark": "gpu",
                "date": datetime.now(UTC).date().isoformat(),
                "commit": now,
                "machine": {**describe_machine(("jax", "jaxlib", "numpy")), "device": device},
                "conditions": "one process on the GPU",
                "command": f"python -m benchmarks.bench_gpu {' '.join(sys.argv[1:])}".rstrip(),
                "options": {"part": task, "model": model},
                "results": results,
            }
        )
        save(options.records, records)

        shown = results.get("problem") or results.get("summary") or results.get("tokens_per_s")
        print(f"{task} {model}: {shown}, {time.monotonic() - before:.0f} s", flush=True)


def _read_device() -> str:
    """Return platform and kind of the first device, asked in another process, as each takes the GPU's memory."""
    code = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
