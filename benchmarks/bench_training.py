"""Training throughput of the JAX backend, and its share of the machine's matmul rate.

The contestants of a scenario alternate step by step, and the rate of a plain matrix product is measured before each
step, so that all of them meet the same load of the machine. A step is forward_backward and optim_step, including the
wait for the results. Ratios compare neighbouring steps, by CPU seconds and by wall time.

The share of the matmul rate compares a step with the least arithmetic it needs: 4 FLOPs per frozen parameter and token,
6 per LoRA parameter and token, and causal attention; of experts, only those chosen for a token count. Padding and
recomputation do not count.

Scenarios:
  steady   one model and equal sequence lengths; with --against-peft compared with transformers + peft
  ragged   random sequence lengths compared with equal lengths
  tenants  many models with one request each compared with one model that sends the same tokens
  slots    2 compared with 64 configured adapter slots
  optim    one optim_step on an idle backend compared with one among many models
  host     CPU time of Python in a step, from the stored request to the stored result
"""

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import compute_quartiles, report
from benchmarks.meters import CompileCounter, Cost, MatmulRate, measure_cost, peak_memory_mb, reset_peak_memory
from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory_plan import DEFAULT_MICRO_BATCH_TOKENS
from skyrl_tx.contract import codec
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams
from skyrl_tx.engine.prepare import combine_pass_results, make_pass_examples
from skyrl_tx.models.flops import count_adapter_macs, count_frozen_macs, count_mixing_macs
from skyrl_tx.process.setup import restart_with_huge_pages
from skyrl_tx.testing.tiny_models import PRESETS, write_preset
from skyrl_tx.weights import hf
from tests.support.client_environments import TORCH, prepare

SCENARIOS = ("steady", "ragged", "tenants", "slots", "optim", "host")
RAGGED_LENGTHS = (20, 700)
EQUAL_LENGTH = 384  # close to the mean of the random lengths; needs no padding
NUM_TENANTS = 32
TENANT_RANKS = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A trainer to measure, with the tokens and FLOPs of one step."""

    name: str
    step: Callable[[], Cost]
    tokens: int
    flops: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """One model, with the sequence lengths of each of its requests."""

    rank: int
    requests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """Options that all scenarios share."""

    model: Path
    rank: int
    train_unembed: bool
    micro_batch_tokens: int

    @property
    def shape(self) -> models.ModelConfig:
        content = hf.read_json(self.model, "config.json")
        return models.find_family(content).config_from_hf(content)

    def start_backend(self, num_slots: int = NUM_TENANTS) -> JaxBackend:
        config = JaxConfig(
            max_lora_adapters=num_slots,
            micro_batch_tokens=self.micro_batch_tokens,
            compile_cache_dir=None,  # so that compile times are measured
            sample_slots=1,
            max_sample_tokens=8192,
        )
        backend = JaxBackend(str(self.model), config)
        backend.start()
        return backend

    def make_contestant(self, name: str, backend: JaxBackend, tenants: Sequence[Tenant]) -> Contestant:
        """Create the tenants' models; a step sends all requests as one pass, then steps each model."""
        vocab_size, draw = self.shape.vocab_size, np.random.default_rng(0)
        examples: list[PassExample] = []
        for number, tenant in enumerate(tenants):
            model = ModelId(f"{name}, model {number}")
            spec = LoraSpec(rank=tenant.rank, seed=number, train_unembed=self.train_unembed)
            backend.create_model(model, ModelSpec(lora=spec))
            for index, lengths in enumerate(tenant.requests):
                request = RequestId(f"{model}, request {index}")
                examples += [make_example(request, model, length, vocab_size, draw) for length in lengths]
        batch = PreparedModelPassBatch(examples=tuple(examples))
        names = sorted({example.model_id for example in examples})

        def step() -> None:
            backend.forward_backward(batch)
            for model in names:
                backend.optim_step(model, OptimizerParams())

        return Contestant(
            name=name,
            step=lambda: measure_cost(step),
            tokens=sum(example.tokens.size for example in examples),
            flops=sum(
                compute_least_flops(self.shape, tenant.rank, lengths, self.train_unembed)
                for tenant in tenants
                for lengths in tenant.requests
            ),
        )


def make_example(
    request: RequestId, model: ModelId, length: int, vocab_size: int, draw: np.random.Generator
) -> PassExample:
    tokens = draw.integers(0, vocab_size, length + 1).astype(np.int32)
    return PassExample(
        request_id=request,
        model_id=model,
        tokens=tokens[:-1],
        loss="cross_entropy",
        loss_inputs={"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)},
        loss_config={},
    )


def compute_least_flops(shape: models.ModelConfig, rank: int, lengths: Sequence[int], train_unembed: bool) -> float:
    """Return the least FLOPs of forward and backward for these sequences."""
    frozen, lora = count_frozen_macs(shape), count_adapter_macs(shape, rank)
    if not train_unembed:
        lora -= rank * (shape.hidden_size + shape.vocab_size)
    # The backward pass has no product for frozen weights, and two for each other product.
    return sum((4 * frozen + 6 * lora) * length + 6 * count_mixing_macs(shape, length) for length in lengths)


def measure(contestants: Sequence[Contestant], repeats: int, compiles: CompileCounter) -> dict[str, Any]:
    """Warm up all contestants, then alternate their steps."""
    compiles.take()
    reset_peak_memory()
    warm: dict[str, Any] = {}
    for contestant in contestants:
        first = contestant.step()
        warm[contestant.name] = {"first_step_s": round(first.wall_s, 2), **compiles.take()}
        contestant.step()

    # Measure the machine before each step.
    rate = MatmulRate()
    compiles.take()
    matmul: list[Cost] = []
    costs: dict[str, list[Cost]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            matmul.append(rate.sample())
            costs[contestant.name].append(contestant.step())

    late = compiles.take()
    wall_per_flop = statistics.median(cost.wall_s for cost in matmul)
    cpu_per_flop = statistics.median(cost.cpu_s for cost in matmul)
    results: dict[str, Any] = {
        "matmul_gflops_per_s": round(1e-9 / wall_per_flop, 1),
        "matmul_gflops_per_cpu_s": round(1e-9 / cpu_per_flop, 1),
        "compiles_after_warm_up": late["compiles"],
        "peak_memory_mb": peak_memory_mb(),
    }

    for contestant in contestants:
        own = costs[contestant.name]
        results[contestant.name] = {
            "tokens": contestant.tokens,
            "step_s": compute_quartiles([cost.wall_s for cost in own]),
            "tokens_per_s": compute_quartiles([contestant.tokens / cost.wall_s for cost in own], 1),
            "tokens_per_cpu_s": compute_quartiles([contestant.tokens / cost.cpu_s for cost in own], 1),
            "share_of_matmul_rate": compute_quartiles([contestant.flops * wall_per_flop / cost.wall_s for cost in own]),
            "share_of_matmul_rate_by_cpu": compute_quartiles(
                [contestant.flops * cpu_per_flop / cost.cpu_s for cost in own]
            ),
            **warm[contestant.name],
        }

    # Compare each contestant with the first one.
    first = contestants[0]
    for contestant in contestants[1:]:
        pairs = list(zip(costs[first.name], costs[contestant.name], strict=True))
        by_cpu = [(a.cpu_s / first.tokens) / (b.cpu_s / contestant.tokens) for a, b in pairs]
        by_clock = [(a.wall_s / first.tokens) / (b.wall_s / contestant.tokens) for a, b in pairs]
        results[f"{contestant.name} / {first.name}, tokens per CPU s"] = compute_quartiles(by_cpu)
        results[f"{contestant.name} / {first.name}, tokens per s"] = compute_quartiles(by_clock)
    return results


@contextmanager
def run_peft(setup: Setup, num_rows: int, length: int) -> Iterator[Contestant]:
    """Yield the same step with `transformers` and `peft`, in a separate process and environment."""
    environment = prepare(TORCH)
    work = {
        "rows": num_rows,
        "length": length,
        "micro_rows": max(1, setup.micro_batch_tokens // length),
        "rank": setup.rank,
        "unembed": setup.train_unembed,
    }

    child = subprocess.Popen(
        [environment.python, Path(__file__).parent / "peft_trainer.py", setup.model, json.dumps(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment.environment,
    )
    assert child.stdin is not None and child.stdout is not None
    replies, commands = child.stdout, child.stdin

    def step() -> Cost:
        print("step", file=commands, flush=True)
        return Cost(*json.loads(replies.readline()))

    flops = compute_least_flops(setup.shape, setup.rank, [length] * num_rows, setup.train_unembed)
    try:
        yield Contestant("transformers+peft", step, num_rows * length, flops)
    finally:
        commands.close()
        child.wait(60)


Measure = Callable[[Sequence[Contestant]], dict[str, Any]]


def steady(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    num_rows, length = map(int, options.shape.split("x"))
    tenant = Tenant(setup.rank, ((length,) * num_rows,))
    with ExitStack() as stack:
        other = [stack.enter_context(run_peft(setup, num_rows, length))] if options.against_peft else []
        return measure([*other, setup.make_contestant(options.shape, setup.start_backend(), [tenant])])


def ragged(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    low, high = RAGGED_LENGTHS
    lengths = tuple(np.random.default_rng(1).integers(low, high, options.datums, endpoint=True).tolist())
    backend = setup.start_backend()
    kinds = {f"length {EQUAL_LENGTH}": (EQUAL_LENGTH,) * options.datums, f"length {low} to {high}": lengths}
    return measure(
        [setup.make_contestant(name, backend, [Tenant(setup.rank, (kind,))]) for name, kind in kinds.items()]
    )


def tenants(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """Compare one tenant with one request or many, and many tenants with equal or mixed ranks, at the same tokens."""
    num_tenants = options.tenants
    backend = setup.start_backend(2 + 2 * num_tenants)
    small = (options.tenant_length,) * options.tenant_rows
    mixed = [Tenant(TENANT_RANKS[number % len(TENANT_RANKS)], (small,)) for number in range(num_tenants)]
    kinds = {
        "1 tenant, 1 request": [Tenant(setup.rank, (small * num_tenants,))],
        f"1 tenant, {num_tenants} requests": [Tenant(setup.rank, (small,) * num_tenants)],
        f"{num_tenants} tenants": [Tenant(setup.rank, (small,))] * num_tenants,
        f"{num_tenants} tenants, ranks mixed": mixed,
    }
    return measure([setup.make_contestant(name, backend, kind) for name, kind in kinds.items()])


def slots(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    num_rows, length = map(int, options.shape.split("x"))
    tenant = Tenant(setup.rank, ((length,) * num_rows,))
    return measure([setup.make_contestant(f"{num} slots", setup.start_backend(num), [tenant]) for num in (2, 64)])


def optim(setup: Setup, _: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """Compare one optim_step on a backend with one model and on a backend with many."""
    num_rows, length = map(int, options.shape.split("x"))
    model, draw = ModelId("model 0"), np.random.default_rng(0)
    lora = LoraSpec(rank=setup.rank, seed=0, train_unembed=setup.train_unembed)
    examples = tuple(make_example(RequestId("r"), model, length, setup.shape.vocab_size, draw) for _ in range(num_rows))
    backends: dict[str, JaxBackend] = {}
    for num in (1, options.tenants):
        backends[f"{num} models"] = backend = setup.start_backend(num)
        for number in range(num):
            backend.create_model(ModelId(f"model {number}"), ModelSpec(lora=lora))

    def step(backend: JaxBackend) -> Cost:
        backend.forward_backward(PreparedModelPassBatch(examples=examples))
        return measure_cost(lambda: backend.optim_step(model, OptimizerParams()))

    costs: dict[str, list[Cost]] = {name: [] for name in backends}
    for repeat in range(2 + options.repeats):  # the first two warm up
        for name, backend in backends.items():
            cost = step(backend)
            costs[name] += [cost] if repeat >= 2 else []
    alone, among_many = costs.values()
    return {
        **{f"{name}, ms": compute_quartiles([1e3 * cost.wall_s for cost in found]) for name, found in costs.items()},
        **{f"{name}, CPU ms": compute_quartiles([1e3 * cost.cpu_s for cost in found]) for name, found in costs.items()},
        "ratio": compute_quartiles([one.wall_s / many.wall_s for one, many in zip(alone, among_many, strict=True)]),
    }


def host(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the CPU time of the Python thread in a step, from the stored request to the stored result.

    Device work runs in other threads. `profile_s` lists the functions with the most time, without the functions that
    they call. The profiler itself adds to these times.
    """
    num_rows, length = map(int, options.shape.split("x"))
    backend = JaxBackend(str(setup.model), JaxConfig(compile_cache_dir=None, sample_slots=1, max_sample_tokens=8192))
    capabilities = backend.start()
    model = ModelId("model")
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=setup.rank, seed=0, train_unembed=setup.train_unembed)))
    draw, vocab_size = np.random.default_rng(0), setup.shape.vocab_size
    drawn = [make_example(RequestId("drawn"), model, length, vocab_size, draw) for _ in range(num_rows)]
    data = tuple(Datum(tokens=example.tokens, loss_inputs=example.loss_inputs) for example in drawn)
    stored = codec.encode(ModelPass(data=data, loss="cross_entropy", loss_config={}, backward=True))

    def step() -> None:
        request = codec.decode(stored)
        assert isinstance(request, ModelPass)
        examples = tuple(make_pass_examples(RequestId("r"), model, request, capabilities))
        batch = PreparedModelPassBatch(examples=examples)
        codec.encode(combine_pass_results(backend.forward_backward(batch), num_rows * length))
        backend.optim_step(model, OptimizerParams())

    step()
    steps: list[tuple[float, float]] = []
    for _ in range(options.repeats):
        thread, start = time.thread_time(), time.perf_counter()
        step()
        steps.append((time.perf_counter() - start, time.thread_time() - thread))

    # The slowest functions of one more step
    profiler = cProfile.Profile()
    profiler.runcall(step)
    stats: Any = pstats.Stats(profiler)
    slowest = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:12]
    return {
        "step_s": compute_quartiles([wall for wall, _ in steps]),
        "python_s": compute_quartiles([thread for _, thread in steps]),
        "python_share": compute_quartiles([thread / wall for wall, thread in steps]),
        "profile_s": {f"{Path(file).name}:{name}": round(own, 5) for (file, _, name), (_, _, own, _, _) in slowest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30M", help=f"{', '.join(PRESETS)}, or the directory of a model")
    parser.add_argument("--scenario", choices=SCENARIOS, default="steady", help="see above")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each contestant")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--unembed", action=argparse.BooleanOptionalAction, default=True, help="train the unembedding")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=DEFAULT_MICRO_BATCH_TOKENS, help="tokens of a micro-batch"
    )

    # Arguments of single scenarios.
    parser.add_argument("--shape", default="8x256", help="steady, slots, optim, host: sequences x tokens")
    parser.add_argument("--against-peft", action="store_true", help="steady: compare with transformers + peft")
    parser.add_argument("--datums", type=int, default=64, help="ragged: number of sequences")
    parser.add_argument("--tenants", type=int, default=NUM_TENANTS, help="tenants, optim: number of models")
    parser.add_argument("--tenant-rows", type=int, default=4, help="tenants: sequences per request")
    parser.add_argument("--tenant-length", type=int, default=128, help="tenants: tokens per sequence")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        model = write_preset(options.model, Path(directory)) if options.model in PRESETS else Path(options.model)
        setup = Setup(model, options.rank, options.unembed, options.micro_batch_tokens)
        compiles = CompileCounter()
        scenarios = (steady, ragged, tenants, slots, optim, host)
        scenario = {function.__name__: function for function in scenarios}[options.scenario]
        results = scenario(setup, lambda contestants: measure(contestants, options.repeats, compiles), options)

    report("training", options, results, ("jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    restart_with_huge_pages()  # as the engine process does
    main()
