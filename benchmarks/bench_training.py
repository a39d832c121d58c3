"""How fast the JAX backend trains, and what part of the machine's arithmetic that is.

Every contestant of a scenario takes a step in turn, with the rate of a plain matrix product measured in between, so
that all meet the same disturbances. A step is forward_backward and optim_step, waited for. Ratios are of CPU seconds
and of the clock, step by step. The share of the peak compares a step with the arithmetic it cannot do without: 4 FLOPs
per frozen parameter and token, 6 per LoRA parameter and token, causal attention; of experts, those chosen for a token;
no padding, no recomputation.
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
from common import machine, quartiles, report
from meters import CompileWatch, Cost, MatmulRate, peak_memory_mb, reset_peak_memory, timed

from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import UNKNOWN_MEMORY_TOKENS
from skyrl_tx.contract import codec
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams
from skyrl_tx.engine.prepare import pass_batch, pass_examples, pass_output
from skyrl_tx.huge_pages import restart_with_huge_pages
from skyrl_tx.models.adapters import EXPERT_TARGETS, target_layers, target_sizes
from skyrl_tx.testing.client_environments import TORCH, prepare
from skyrl_tx.testing.tiny_models import PRESETS, write_preset
from skyrl_tx.weights import hf

SCENARIOS = ("steady", "ragged", "tenants", "slots", "optim", "host")
RAGGED_LENGTHS = (20, 700)
EQUAL_LENGTH = 384  # near the mean of random lengths, and free of padding
NUM_TENANTS = 32
TENANT_RANKS = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Something that trains, and what one step of it is worth."""

    name: str
    step: Callable[[], Cost]
    tokens: int
    flops: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """One model, and the lengths of the sequences in each of its requests."""

    rank: int
    requests: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all scenarios share."""

    model: Path
    rank: int
    train_unembed: bool
    micro_batch_tokens: int

    @property
    def shape(self) -> models.ModelConfig:
        content = hf.read_json(self.model, "config.json")
        return models.find_family(content).config_from_hf(content)

    def backend(self, num_slots: int = NUM_TENANTS) -> JaxBackend:
        config = JaxConfig(
            max_lora_adapters=num_slots,
            micro_batch_tokens=self.micro_batch_tokens,
            compile_cache_dir=None,  # else nothing is known of compile times
            sample_slots=1,
            max_sample_tokens=8192,
        )
        backend = JaxBackend(str(self.model), config)
        backend.start()
        return backend

    def contestant(self, name: str, backend: JaxBackend, tenants: Sequence[Tenant]) -> Contestant:
        """Create the tenants' models; a step passes all requests together, then steps each model."""
        vocab_size, draw = self.shape.vocab_size, np.random.default_rng(0)
        examples: list[PassExample] = []
        for number, tenant in enumerate(tenants):
            model = ModelId(f"{name}, model {number}")
            spec = LoraSpec(rank=tenant.rank, seed=number, train_unembed=self.train_unembed)
            backend.create_model(model, ModelSpec(lora=spec))
            for index, lengths in enumerate(tenant.requests):
                request = RequestId(f"{model}, request {index}")
                examples += [example(request, model, length, vocab_size, draw) for length in lengths]
        batch = PreparedModelPassBatch(examples=tuple(examples))
        names = sorted({each.model_id for each in examples})

        def step() -> None:
            backend.forward_backward(batch)
            for model in names:
                backend.optim_step(model, OptimizerParams())

        return Contestant(
            name=name,
            step=lambda: timed(step),
            tokens=sum(each.tokens.size for each in examples),
            flops=sum(
                floor_flops(self.shape, tenant.rank, lengths, self.train_unembed)
                for tenant in tenants
                for lengths in tenant.requests
            ),
        )


def example(request: RequestId, model: ModelId, length: int, vocab_size: int, draw: np.random.Generator) -> PassExample:
    tokens = draw.integers(0, vocab_size, length + 1).astype(np.int32)
    return PassExample(
        request_id=request,
        model_id=model,
        tokens=tokens[:-1],
        loss="cross_entropy",
        loss_inputs={"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)},
        loss_config={},
    )


def floor_flops(shape: models.ModelConfig, rank: int, lengths: Sequence[int], train_unembed: bool) -> float:
    """Return the arithmetic that forward and backward of these sequences cannot do without.

    Of the experts of a layer, a token meets those that are chosen for it, and the router that chooses.
    """
    frozen, lora = 0, 0
    if shape.experts is not None:
        frozen += len(shape.experts.layers) * shape.hidden_size * shape.experts.routing.num_experts
    for name, (inputs, outputs) in target_sizes(shape).items():
        repeats = 1 if name == "unembed" else len(target_layers(shape, name))
        if shape.experts is not None and name in EXPERT_TARGETS:
            repeats *= shape.experts.routing.num_chosen
        frozen += repeats * inputs * outputs
        lora += repeats * rank * (inputs + outputs) if train_unembed or name != "unembed" else 0
    per_pair = 12 * shape.num_layers * shape.num_heads * shape.head_dim  # two products forwards, four backwards
    return sum((4 * frozen + 6 * lora) * length + per_pair * length * (length + 1) / 2 for length in lengths)


def measure(contestants: Sequence[Contestant], repeats: int, watch: CompileWatch) -> dict[str, Any]:
    """Warm all up, then let them step in turn."""
    watch.take()
    reset_peak_memory()
    warm: dict[str, Any] = {}
    for each in contestants:
        first = each.step()
        warm[each.name] = {"first_step_s": round(first.wall_s, 2), **watch.take()}
        each.step()
    rate = MatmulRate()
    watch.take()
    peak: list[Cost] = []
    costs: dict[str, list[Cost]] = {each.name: [] for each in contestants}
    for _ in range(repeats):
        for each in contestants:
            peak.append(rate.sample())
            costs[each.name].append(each.step())
    late = watch.take()
    wall_per_flop = statistics.median(cost.wall_s for cost in peak)
    cpu_per_flop = statistics.median(cost.cpu_s for cost in peak)
    results: dict[str, Any] = {
        "matmul_gflops_per_s": round(1e-9 / wall_per_flop, 1),
        "matmul_gflops_per_cpu_s": round(1e-9 / cpu_per_flop, 1),
        "compiles_after_warm_up": late["compiles"],
        "peak_memory_mb": peak_memory_mb(),
    }
    for each in contestants:
        own = costs[each.name]
        results[each.name] = {
            "tokens": each.tokens,
            "step_s": quartiles([cost.wall_s for cost in own]),
            "tokens_per_s": quartiles([each.tokens / cost.wall_s for cost in own], 1),
            "tokens_per_cpu_s": quartiles([each.tokens / cost.cpu_s for cost in own], 1),
            "share_of_peak": quartiles([each.flops * wall_per_flop / cost.wall_s for cost in own]),
            "share_of_peak_by_cpu": quartiles([each.flops * cpu_per_flop / cost.cpu_s for cost in own]),
            **warm[each.name],
        }
    first = contestants[0]
    for each in contestants[1:]:
        pairs = list(zip(costs[first.name], costs[each.name], strict=True))
        by_cpu = [(a.cpu_s / first.tokens) / (b.cpu_s / each.tokens) for a, b in pairs]
        by_clock = [(a.wall_s / first.tokens) / (b.wall_s / each.tokens) for a, b in pairs]
        results[f"{each.name} / {first.name}, tokens per CPU s"] = quartiles(by_cpu)
        results[f"{each.name} / {first.name}, tokens per s"] = quartiles(by_clock)
    return results


@contextmanager
def peft(setup: Setup, num_rows: int, length: int) -> Iterator[Contestant]:
    """The same step by `transformers` and `peft`, in a process and an environment of their own."""
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
    answers, asks = child.stdout, child.stdin

    def step() -> Cost:
        print("step", file=asks, flush=True)
        return Cost(*json.loads(answers.readline()))

    flops = floor_flops(setup.shape, setup.rank, [length] * num_rows, setup.train_unembed)
    try:
        yield Contestant("transformers+peft", step, num_rows * length, flops)
    finally:
        asks.close()
        child.wait(60)


Measure = Callable[[Sequence[Contestant]], dict[str, Any]]


def steady(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    num_rows, length = map(int, options.shape.split("x"))
    tenant = Tenant(setup.rank, ((length,) * num_rows,))
    with ExitStack() as stack:
        other = [stack.enter_context(peft(setup, num_rows, length))] if options.against_peft else []
        return measure([*other, setup.contestant(options.shape, setup.backend(), [tenant])])


def ragged(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    low, high = RAGGED_LENGTHS
    lengths = tuple(np.random.default_rng(1).integers(low, high, options.datums, endpoint=True).tolist())
    backend = setup.backend()
    kinds = {f"length {EQUAL_LENGTH}": (EQUAL_LENGTH,) * options.datums, f"length {low} to {high}": lengths}
    return measure([setup.contestant(name, backend, [Tenant(setup.rank, (kind,))]) for name, kind in kinds.items()])


def tenants(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """One tenant with one request or with many, and many tenants, equal or mixed in their ranks: the same tokens."""
    num_tenants = options.tenants
    backend = setup.backend(2 + 2 * num_tenants)
    small = (options.tenant_length,) * options.tenant_rows
    mixed = [Tenant(TENANT_RANKS[number % len(TENANT_RANKS)], (small,)) for number in range(num_tenants)]
    kinds = {
        "1 tenant, 1 request": [Tenant(setup.rank, (small * num_tenants,))],
        f"1 tenant, {num_tenants} requests": [Tenant(setup.rank, (small,) * num_tenants)],
        f"{num_tenants} tenants": [Tenant(setup.rank, (small,))] * num_tenants,
        f"{num_tenants} tenants, ranks mixed": mixed,
    }
    return measure([setup.contestant(name, backend, kind) for name, kind in kinds.items()])


def slots(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    num_rows, length = map(int, options.shape.split("x"))
    tenant = Tenant(setup.rank, ((length,) * num_rows,))
    return measure([setup.contestant(f"{num} slots", setup.backend(num), [tenant]) for num in (2, 64)])


def optim(setup: Setup, _: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """One adapter's optimizer step, where it is the only model and where many are beside it."""
    num_rows, length = map(int, options.shape.split("x"))
    model, draw = ModelId("model 0"), np.random.default_rng(0)
    lora = LoraSpec(rank=setup.rank, seed=0, train_unembed=setup.train_unembed)
    examples = tuple(example(RequestId("r"), model, length, setup.shape.vocab_size, draw) for _ in range(num_rows))
    backends: dict[str, JaxBackend] = {}
    for num in (1, options.tenants):
        backends[f"{num} models"] = backend = setup.backend(num)
        for number in range(num):
            backend.create_model(ModelId(f"model {number}"), ModelSpec(lora=lora))

    def step(backend: JaxBackend) -> Cost:
        backend.forward_backward(PreparedModelPassBatch(examples=examples))
        return timed(lambda: backend.optim_step(model, OptimizerParams()))

    costs: dict[str, list[Cost]] = {name: [] for name in backends}
    for repeat in range(2 + options.repeats):  # two to warm up
        for name, backend in backends.items():
            cost = step(backend)
            costs[name] += [cost] if repeat >= 2 else []
    alone, beside = costs.values()
    return {
        **{f"{name}, ms": quartiles([1e3 * cost.wall_s for cost in found]) for name, found in costs.items()},
        **{f"{name}, CPU ms": quartiles([1e3 * cost.cpu_s for cost in found]) for name, found in costs.items()},
        "ratio": quartiles([one.wall_s / many.wall_s for one, many in zip(alone, beside, strict=True)]),
    }


def host(setup: Setup, measure: Measure, options: argparse.Namespace) -> dict[str, Any]:
    """What Python does in a step, from a stored request to a stored result: its thread's CPU time beside the clock.

    That thread does nothing else; the device's work goes on beside it, in threads of its own. `profile` names the
    dearest functions by their own time, which the profiler makes dearer than they are.
    """
    num_rows, length = map(int, options.shape.split("x"))
    backend = JaxBackend(str(setup.model), JaxConfig(compile_cache_dir=None, sample_slots=1, max_sample_tokens=8192))
    capabilities = backend.start()
    model = ModelId("model")
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=setup.rank, seed=0, train_unembed=setup.train_unembed)))
    draw, vocab_size = np.random.default_rng(0), setup.shape.vocab_size
    drawn = [example(RequestId("drawn"), model, length, vocab_size, draw) for _ in range(num_rows)]
    data = tuple(Datum(tokens=each.tokens, loss_inputs=each.loss_inputs) for each in drawn)
    stored = codec.encode(ModelPass(data=data, loss="cross_entropy", loss_config={}, backward=True))

    def step() -> None:
        request = codec.decode(stored)
        assert isinstance(request, ModelPass)
        batch = pass_batch([tuple(pass_examples(RequestId("r"), model, request, capabilities))])
        codec.encode(pass_output(backend.forward_backward(batch), num_rows * length))
        backend.optim_step(model, OptimizerParams())

    step()
    steps: list[tuple[float, float]] = []
    for _ in range(options.repeats):
        thread, began = time.thread_time(), time.perf_counter()
        step()
        steps.append((time.perf_counter() - began, time.thread_time() - thread))
    profiler = cProfile.Profile()
    profiler.runcall(step)
    dearest = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:12]
    return {
        "step_s": quartiles([wall for wall, _ in steps]),
        "python_s": quartiles([thread for _, thread in steps]),
        "python_share": quartiles([thread / wall for wall, thread in steps]),
        "profile_s": {f"{Path(file).name}:{name}": round(own, 5) for (file, _, name), (_, _, own, _, _) in dearest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30M", help=f"{', '.join(PRESETS)}, or a model's directory")
    parser.add_argument("--scenario", choices=SCENARIOS, default="steady")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each contestant, after two to warm up")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--unembed", action=argparse.BooleanOptionalAction, default=True, help="train the unembedding")
    parser.add_argument("--micro-batch-tokens", type=int, default=UNKNOWN_MEMORY_TOKENS)
    parser.add_argument("--shape", default="8x256", help="steady, slots, optim, host: rows x tokens")
    parser.add_argument("--against-peft", action="store_true", help="steady: transformers and peft take turns with us")
    parser.add_argument("--datums", type=int, default=64, help="ragged: how many sequences")
    parser.add_argument("--tenants", type=int, default=NUM_TENANTS, help="tenants, optim: how many")
    parser.add_argument("--tenant-rows", type=int, default=4, help="tenants: sequences of each request")
    parser.add_argument("--tenant-length", type=int, default=128, help="tenants: tokens of each sequence")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_preset(options.model, Path(directory)) if options.model in PRESETS else Path(options.model)
        setup = Setup(model, options.rank, options.unembed, options.micro_batch_tokens)
        watch = CompileWatch()
        scenarios = (steady, ragged, tenants, slots, optim, host)
        scenario = {each.__name__: each for each in scenarios}[options.scenario]
        results = scenario(setup, lambda each: measure(each, options.repeats, watch), options)
    report("training", machine("jax", "jaxlib", "numpy"), results)


if __name__ == "__main__":
    restart_with_huge_pages()  # as the server's engine
    main()
