"""Speed of training and of `compute_logprobs` with and without shared prefixes.

Two runs on one backend take turns with equal requests. One of them shares prefixes (see
`skyrl_tx.backends.jax.train.shared_prefixes`). Only `forward_backward` is measured, with the wait for its results.
Ratios compare neighbouring steps, by wall time and by CPU seconds. With `--runs plain` or `--runs shared` only one of
the runs takes steps. The results then have its CPU seconds per step and its peak memory instead of ratios.

`compute_logprobs` shares prefixes through the prefix cache. So requests on one new prompt take turns with requests on
new prompts of the same length that have nothing in common.

Shapes:
  long_prompt  16 samples of 256 tokens on one prompt of 768 tokens
  gsm8k        16 samples of 250 tokens on one prompt of 150 tokens
  dpo          16 pairs of answers of 128 tokens to prompts of 512 tokens
  unshared     16 examples of 400 tokens that have nothing in common
  compute_logprobs  16 requests for the log-probabilities of a prompt and an answer, as long as in long_prompt
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import compute_quartiles, report
from benchmarks.meters import Cost, measure_cost, peak_memory_mb, reset_peak_memory
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, PromptOptions, SamplingParams
from skyrl_tx.process.setup import restart_with_huge_pages
from skyrl_tx.testing.tiny_models import PRESETS, write_preset

SHAPES = {
    "long_prompt": (1, 768, 16, 256),
    "gsm8k": (1, 150, 16, 250),
    "dpo": (16, 512, 2, 128),
    "unshared": (16, 0, 1, 400),
}
"""Number of prompts, tokens of a prompt, number of answers, tokens of an answer."""

SCORING = "compute_logprobs"
SAMPLER = SamplerId("sampler")


def make_examples(shape: str, model: ModelId, vocab_size: int) -> tuple[PassExample, ...]:
    """Return the examples of one request. Tokens of prompts have no advantage."""
    draw = np.random.default_rng(0)
    num_prompts, prompt_length, num_answers, answer_length = SHAPES[shape]
    examples: list[PassExample] = []
    for _ in range(num_prompts):
        prompt = draw.integers(0, vocab_size, prompt_length)
        for _ in range(num_answers):
            tokens = np.concatenate([prompt, draw.integers(0, vocab_size, answer_length + 1)]).astype(np.int32)
            is_answer = np.arange(len(tokens) - 1) >= prompt_length - 1
            inputs = {"logprobs": np.where(is_answer, -9.7, 0), "advantages": np.where(is_answer, draw.normal(), 0)}

            examples.append(
                PassExample(
                    request_id=RequestId("r"),
                    model_id=model,
                    tokens=tokens[:-1],
                    loss="importance_sampling",
                    loss_inputs={
                        "target_tokens": tokens[1:],
                        "weights": np.ones(len(tokens) - 1, np.float32),
                        **{name: array.astype(np.float32) for name, array in inputs.items()},
                    },
                    loss_config={},
                )
            )
    return tuple(examples)


def make_requests(step: int, vocab_size: int, *, shares: bool) -> tuple[SampleRequest, ...]:
    """Return requests as `compute_logprobs` of the SDK sends them, with other tokens in every step."""
    draw = np.random.default_rng((step, shares))
    _, prompt_length, num_answers, answer_length = SHAPES["long_prompt"]
    prompts = draw.integers(0, vocab_size, (1 if shares else num_answers, prompt_length))
    answers = draw.integers(0, vocab_size, (num_answers, answer_length))
    return tuple(
        SampleRequest(
            request_id=RequestId(f"{step}-{shares}-{number}"),
            sampler=SAMPLER,
            prompt=np.concatenate([prompts[number % len(prompts)], answer]).astype(np.int32),
            num_samples=1,
            params=SamplingParams(seed=number, max_tokens=1),
            options=PromptOptions(logprobs=True),
        )
        for number, answer in enumerate(answers)
    )


def measure_scoring(backend: JaxBackend, vocab_size: int, repeats: int, runs: Sequence[str]) -> dict[str, Any]:
    """Alternate requests on prompts that differ ("plain") and on a common prompt ("shared")."""

    def make_step(shares: bool) -> Callable[[], Cost]:
        numbers = itertools.count()

        def step() -> Cost:
            batch = PreparedSampleBatch(requests=make_requests(next(numbers), vocab_size, shares=shares))
            return measure_cost(lambda: list(backend.sample(batch)))

        return step

    steps = {name: make_step(name == "shared") for name in runs}
    return alternate(SCORING, steps, SHAPES["long_prompt"][2], repeats)


def measure_shape(
    shape: str, backend: JaxBackend, vocab_size: int, repeats: int, runs: Sequence[str]
) -> dict[str, Any]:
    """Alternate steps of the runs without ("plain") and with sharing ("shared")."""

    def make_step(model: ModelId) -> Callable[[], Cost]:
        batch = PreparedModelPassBatch(examples=make_examples(shape, model, vocab_size))
        return lambda: measure_cost(lambda: backend.forward_backward(batch))

    steps = {name: make_step(ModelId(name)) for name in runs}
    return alternate(shape, steps, len(make_examples(shape, ModelId(runs[0]), vocab_size)), repeats)


def alternate(shape: str, steps: Mapping[str, Callable[[], Cost]], num_examples: int, repeats: int) -> dict[str, Any]:
    """Run the steps "plain" and "shared", or one of them, in turn. Returns rates and ratios."""
    costs: dict[str, list[Cost]] = {name: [] for name in steps}
    for repeat in range(2 + repeats):  # the first two compile and warm up
        if repeat == 2:
            reset_peak_memory()
        for name, step in steps.items():
            cost = step()
            costs[name] += [cost] if repeat >= 2 else []

    rates = {name: statistics.median(num_examples / cost.wall_s for cost in own) for name, own in costs.items()}
    results: dict[str, Any] = {f"{name}, examples per s": round(rate, 2) for name, rate in rates.items()}
    if len(costs) == 1:
        results["CPU s per step"] = compute_quartiles([cost.cpu_s for own in costs.values() for cost in own])
        results["peak_memory_mb"] = peak_memory_mb()
    else:
        pairs = list(zip(costs["plain"], costs["shared"], strict=True))
        wall = [plain.wall_s / shared.wall_s for plain, shared in pairs]
        cpu = [plain.cpu_s / shared.cpu_s for plain, shared in pairs]
        results |= {"shared / plain": compute_quartiles(wall), "shared / plain, by CPU s": compute_quartiles(cpu)}
    print(shape, results, file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="30M", help=f"{', '.join(PRESETS)}, or the directory of a model")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, SCORING], default=[*SHAPES, SCORING], help="see above")
    parser.add_argument("--runs", nargs="+", choices=["plain", "shared"], default=["plain", "shared"], help="see above")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each run")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="tokens of a micro-batch")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        model = write_preset(options.model, Path(directory)) if options.model in PRESETS else Path(options.model)
        config = JaxConfig(
            micro_batch_tokens=options.micro_batch_tokens,
            compile_cache_dir=None,
            sample_slots=1,
            max_sample_tokens=8192,
        )
        backend = JaxBackend(str(model), config)
        vocab_size = backend.start().vocab_size

        for name, shares in (("plain", False), ("shared", True)):
            spec = ModelSpec(lora=LoraSpec(rank=options.rank, seed=0), shares_prefixes=shares)
            backend.create_model(ModelId(name), spec)
        backend.load_sampler(SAMPLER, backend.capture(ModelId("plain"), {StatePart.WEIGHTS}))
        results: dict[str, Any] = {
            shape: (
                measure_scoring(backend, vocab_size, options.repeats, options.runs)
                if shape == SCORING
                else measure_shape(shape, backend, vocab_size, options.repeats, options.runs)
            )
            for shape in options.shapes
        }
    report("shared_prefixes", options, results, ("jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    restart_with_huge_pages()  # as the engine process does
    main()
