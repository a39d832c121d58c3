"""Sampling throughput of the JAX backend, and its share of the roofline.

The contestants of a scenario alternate: each samples a whole batch, and the machine's matmul rate and memory bandwidth
are measured before each turn. Ratios compare neighbouring turns. A decode step needs at least 2 FLOPs per parameter and
sample, and must read the weights and the KV cache once. Its share of the roofline is the larger of these two times, at
the measured rates, divided by the time it took.

Scenarios:
  steady     one batch with the base model and with an adapter; with --against-generate compared with transformers
  adapters   one adapter compared with many, at equal work
  staggered  short requests that arrive one by one among long ones
  drawing    time to draw tokens from logits, with and without top-k and top-p
  futures    thousands of futures of one client on a real server
  iteration  iterations of reinforcement learning on a real server, compared with the backend alone
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import live_sampling
from benchmarks.common import compute_quartiles, quantile, report
from benchmarks.drawing import measure_draws
from benchmarks.meters import (
    Bandwidth,
    CompileCounter,
    Cost,
    MatmulRate,
    measure_cost,
    peak_memory_mb,
    reset_peak_memory,
)
from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, PromptOptions, SamplingParams
from skyrl_tx.models.flops import (
    count_adapter_macs,
    count_expert_parameters,
    count_frozen_macs,
    estimate_experts_read,
)
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.process.setup import restart_with_huge_pages
from skyrl_tx.testing.tiny_models import PRESETS, write_preset
from skyrl_tx.weights import hf
from tests.support.client_environments import TORCH, prepare

SHORT, LONG = 16, 1000  # tokens to sample


@dataclass(frozen=True, slots=True)
class Work:
    """A number of prompts of one length, with a number of samples per prompt and of tokens per sample."""

    prompts: int
    length: int
    samples: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def total(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True, slots=True)
class Contestant:
    """A sampler to measure, with the tokens and decode steps of one turn and the least cost of a step."""

    name: str
    turn: Callable[[], Cost]
    tokens: int
    steps: int
    flops_per_step: float
    bytes_per_step: float


@dataclass(frozen=True, slots=True)
class Setup:
    """Options that all scenarios share."""

    model: Path
    rank: int
    work: Work

    @property
    def shape(self) -> models.ModelConfig:
        content = hf.read_json(self.model, "config.json")
        return models.find_family(content).config_from_hf(content)

    def start_backend(self, *, slots: int, longest: int, adapters: int = 1, memory_fraction: float = 1.0) -> JaxBackend:
        config = JaxConfig(
            compile_cache_dir=None,  # so that compile times are measured
            sample_slots=slots,
            max_sample_tokens=int(memory_fraction * slots * longest),
            max_context_length=longest,
            max_sampler_adapters=adapters,
            max_lora_adapters=1,
        )

        backend = JaxBackend(str(self.model), config)
        backend.start()

        for number in range(adapters):
            model = ModelId("m")
            backend.create_model(model, ModelSpec(lora=LoraSpec(rank=self.rank, seed=number)))
            backend.load_sampler(SamplerId(f"s{number}"), backend.capture(model, {StatePart.WEIGHTS}))
            backend.delete_model(model)
        return backend

    def make_requests(self, work: Work, samplers: Sequence[SamplerId | None], seed: int = 0) -> list[SampleRequest]:
        draw = np.random.default_rng(seed)
        return [
            make_request(
                f"{seed}.{number}",
                draw.integers(2, self.shape.vocab_size, work.length).astype(np.int32),
                samplers[number % len(samplers)],
                work.samples,
                work.tokens,
            )
            for number in range(work.prompts)
        ]

    def make_contestant(
        self, name: str, backend: JaxBackend, samplers: Sequence[SamplerId | None], work: Work
    ) -> Contestant:
        seeds = iter(range(10**9))

        def turn() -> Cost:
            requests = self.make_requests(work, samplers, next(seeds))  # new prompts, so that no prefix is cached
            batch = PreparedSampleBatch(requests=tuple(requests))
            return measure_cost(lambda: backend.sample(batch))

        flops, bytes_read = compute_least_work(self.shape, work, 0 if samplers[0] is None else self.rank, len(samplers))
        return Contestant(name, turn, work.total, work.tokens, flops, bytes_read)


def make_request(name: str, prompt: np.ndarray, sampler: SamplerId | None, samples: int, tokens: int) -> SampleRequest:
    params = SamplingParams(seed=zlib.crc32(name.encode()), max_tokens=tokens, temperature=1.0, eos_stops=False)
    return SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=prompt,
        num_samples=samples,
        params=params,
        options=PromptOptions(),
    )


def compute_least_work(shape: models.ModelConfig, work: Work, rank: int, num_adapters: int) -> tuple[float, float]:
    """Return the least FLOPs and float32 bytes of a decode step of all samples, averaged over the steps."""
    frozen, lora = count_frozen_macs(shape), count_adapter_macs(shape, rank)
    # A step reads every expert that gets at least one of its tokens.
    more = estimate_experts_read(shape, work.rows) - estimate_experts_read(shape, 1)
    read = frozen + more * count_expert_parameters(shape)
    factors = lora + more * sum(
        rank * target.num_experts * size * len(models.get_target_layers(shape, name))
        for name, target in models.get_targets(shape).items()
        for size, axis in zip((target.inputs, target.outputs), target.axes, strict=True)
        if target.num_experts and not (shape.expert_lora == "shared" and axis == "embed")
    )
    cached = work.length + work.tokens / 2
    mixer = shape.blocks[0].mixer
    assert isinstance(mixer, Attention)
    attention = 4 * shape.num_layers * mixer.num_heads * mixer.head_dim * cached
    cache = 2 * shape.num_layers * mixer.num_kv_heads * mixer.head_dim * cached * work.rows
    used = num_adapters if rank else 0
    return work.rows * (2 * (frozen + lora) + attention), 4 * (read + used * factors + cache)


def measure(contestants: Sequence[Contestant], repeats: int, compiles: CompileCounter) -> dict[str, Any]:
    """Warm up all contestants, then alternate their turns."""
    compiles.take()
    reset_peak_memory()
    warm: dict[str, Any] = {}
    for contestant in contestants:
        first = contestant.turn()
        warm[contestant.name] = {"first_turn_s": round(first.wall_s, 2), **compiles.take()}

    # Measure the machine before each turn.
    rate, band = MatmulRate(), Bandwidth()
    compiles.take()
    per_flop: list[float] = []
    per_byte: list[float] = []
    costs: dict[str, list[Cost]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            per_flop.append(rate.sample().wall_s)
            per_byte.append(band.sample().wall_s)
            costs[contestant.name].append(contestant.turn())

    flop_s, byte_s = statistics.median(per_flop), statistics.median(per_byte)
    results: dict[str, Any] = {
        "matmul_gflops_per_s": round(1e-9 / flop_s, 1),
        "bandwidth_gb_per_s": round(1e-9 / byte_s, 1),
        "compiles_after_warm_up": compiles.take()["compiles"],
        "peak_memory_mb": peak_memory_mb(),
    }

    for contestant in contestants:
        own = costs[contestant.name]
        least = contestant.steps * max(contestant.flops_per_step * flop_s, contestant.bytes_per_step * byte_s)
        results[contestant.name] = {
            "tokens_per_s": compute_quartiles([contestant.tokens / cost.wall_s for cost in own], 1),
            "tokens_per_cpu_s": compute_quartiles([contestant.tokens / cost.cpu_s for cost in own], 1),
            "ms_per_step": compute_quartiles([1e3 * cost.wall_s / contestant.steps for cost in own], 2),
            "share_of_roofline": compute_quartiles([least / cost.wall_s for cost in own]),
            **warm[contestant.name],
        }

    # Compare each contestant with the first one.
    first = contestants[0]
    for contestant in contestants[1:]:
        pairs = list(zip(costs[first.name], costs[contestant.name], strict=True))
        for kind, seconds in (("tokens/s", lambda cost: cost.wall_s), ("tokens per CPU s", lambda cost: cost.cpu_s)):
            ratios = [(seconds(a) / first.tokens) / (seconds(b) / contestant.tokens) for a, b in pairs]
            results[f"{contestant.name} / {first.name}, {kind}"] = compute_quartiles(ratios)
    return results


@contextmanager
def generate(setup: Setup) -> Iterator[Contestant]:
    """Yield the same work with `transformers`, in a separate process and environment."""
    environment, work = prepare(TORCH), setup.work
    shape = {"prompts": work.prompts, "length": work.length, "samples": work.samples, "tokens": work.tokens}
    child = subprocess.Popen(
        [environment.python, Path(__file__).parent / "generate_sampler.py", setup.model, json.dumps(shape)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment.environment,
    )
    assert child.stdin is not None and child.stdout is not None
    replies, commands = child.stdout, child.stdin

    def turn() -> Cost:
        print("sample", file=commands, flush=True)
        return Cost(*json.loads(replies.readline()))

    try:
        yield Contestant("transformers", turn, work.total, work.tokens, *compute_least_work(setup.shape, work, 0, 0))
    finally:
        commands.close()
        child.wait(60)


def measure_full_slots(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    work = setup.work
    backend = setup.start_backend(slots=work.rows, longest=work.length + work.tokens)
    ours = [
        setup.make_contestant("base model", backend, [None], work),
        setup.make_contestant("one adapter", backend, [SamplerId("s0")], work),
    ]
    with ExitStack() as stack:
        other = [stack.enter_context(generate(setup))] if options.against_generate else []
        return measure([*other, *ours], options.repeats, compiles)


def adapters(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    """Compare one adapter with many at equal work. Each sample is a separate request."""
    work = Work(options.adapters, setup.work.length, 1, setup.work.tokens)
    backend = setup.start_backend(slots=work.rows, longest=work.length + work.tokens, adapters=options.adapters)
    counts = [count for count in (1, 8, options.adapters) if count <= options.adapters]
    kinds = [
        setup.make_contestant(f"{count} adapters", backend, [SamplerId(f"s{n}") for n in range(count)], work)
        for count in counts
    ]
    return measure([setup.make_contestant("base model", backend, [None], work), *kinds], options.repeats, compiles)


def measure_staggered(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    """Compare short requests that arrive among long ones with a lone short request, and with all sent at once."""
    length, num_long, num_short = setup.work.length, options.long, options.short
    backend = setup.start_backend(slots=16, longest=length + LONG, memory_fraction=options.memory_fraction)
    long_work, short_work = Work(num_long, length, 1, LONG), Work(num_short, length, 1, SHORT)

    def run(arrivals: list[list[SampleRequest]]) -> tuple[float, list[float], list[float]]:
        """Submit one group before each step; return total seconds, latency of each short request, and time per step."""
        start, arrived, ended, steps, waiting = time.perf_counter(), {}, {}, [], list(arrivals)
        while True:
            if waiting and (group := waiting.pop(0)):
                arrived.update({request.request_id: time.perf_counter() for request in group})
                backend.begin_sample(PreparedSampleBatch(requests=tuple(group)))
            before = time.perf_counter()
            deltas = backend.step_sample()
            steps.append(time.perf_counter() - before)
            ended.update({delta.request_id: time.perf_counter() for delta in deltas if delta.stop_reason})
            if not deltas and not waiting:
                short = [ended[name] - at for name, at in arrived.items() if name.startswith("short")]
                return time.perf_counter() - start, short, steps

    def work(seed: int) -> tuple[list[SampleRequest], list[SampleRequest]]:
        longs = setup.make_requests(long_work, [None], 2 * seed)
        shorts = [
            make_request(f"short {seed}.{request.request_id}", request.prompt, None, 1, SHORT)
            for request in setup.make_requests(short_work, [None], 2 * seed + 1)
        ]
        return longs, shorts

    def stagger(longs: list[SampleRequest], shorts: list[SampleRequest]) -> list[list[SampleRequest]]:
        return [longs, *([short] if turn == 0 else [] for short in shorts for turn in range(2))]

    # Warm up both kinds of arrivals.
    run([[*work(0)[0], *work(0)[1]]])
    run(stagger(*work(1)))
    compiles.take()

    lone: list[float] = []
    among: list[float] = []
    slices: list[float] = []
    ratios: list[float] = []
    for seed in range(2, 2 + options.repeats):
        longs, shorts = work(seed)
        for short in shorts[:8]:
            lone += run([[short]])[1]
        at_once = run([[*longs, *shorts]])[0]
        longs, shorts = work(seed + 1000)
        seconds, latencies, steps = run(stagger(longs, shorts))
        among += latencies
        slices += steps
        ratios.append(at_once / seconds)

    bound = 2 * quantile(lone, 0.5) + quantile(slices, 0.5)
    return {
        "compiles_after_warm_up": compiles.take()["compiles"],
        "lone_short_s": compute_quartiles(lone),
        "short_among_long_s": {**compute_quartiles(among), "p95": round(quantile(among, 0.95), 3)},
        "slice_s": compute_quartiles(slices),
        "p95 / (2 lone + slice)": round(quantile(among, 0.95) / bound, 3),
        "throughput staggered / at once": compute_quartiles(ratios),
    }


def drawing(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    """Time token draws from logits, compared with the product that computes the logits."""
    return measure_draws(setup.shape.hidden_size, options.repeats, compiles)


def make_sizes(setup: Setup) -> live_sampling.Sizes:
    work = setup.work
    return live_sampling.Sizes(
        setup.model, setup.shape.vocab_size, setup.rank, work.prompts, work.length, work.samples, work.tokens
    )


def futures(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    """Measure many concurrent futures of one client on a real server."""
    return live_sampling.measure_futures(make_sizes(setup), options.futures, options.slots)


def iteration(setup: Setup, options: argparse.Namespace, compiles: CompileCounter) -> dict[str, Any]:
    """Compare iterations of reinforcement learning on a real server with the same work on the backend alone."""
    return live_sampling.measure_iterations(make_sizes(setup), options.repeats)


SCENARIOS = {
    "steady": measure_full_slots,
    "adapters": adapters,
    "staggered": measure_staggered,
    "drawing": drawing,
    "futures": futures,
    "iteration": iteration,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30M", help=f"{', '.join(PRESETS)}, or the directory of a model")
    parser.add_argument("--scenario", choices=SCENARIOS, default="steady", help="see above")
    parser.add_argument("--repeats", type=int, default=5, help="measured turns of each contestant")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--shape", default="16x64x4x128", help="prompts x prompt length x samples per prompt x tokens")

    # Arguments of single scenarios.
    parser.add_argument("--against-generate", action="store_true", help="steady: compare with generate of transformers")
    parser.add_argument("--adapters", type=int, default=64, help="adapters: number of adapters")
    parser.add_argument("--long", type=int, default=8, help="staggered: number of requests for 1,000 tokens")
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=1.0,
        help="staggered: KV cache size relative to the longest samples; below 1, some wait for pages",
    )
    parser.add_argument("--short", type=int, default=24, help="staggered: number of requests for 16 tokens")
    parser.add_argument("--futures", type=int, default=2000, help="futures: number of concurrent futures")
    parser.add_argument("--slots", type=int, default=64, help="futures: sample_slots of the server")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        model = write_preset(options.model, Path(directory)) if options.model in PRESETS else Path(options.model)
        setup = Setup(model, options.rank, Work(*map(int, options.shape.split("x"))))
        results = SCENARIOS[options.scenario](setup, options, CompileCounter())

    report("sampling", options, results, ("jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    restart_with_huge_pages()  # as the engine process does
    main()
