"""Agreement of sampled log-probabilities with training, and across decode shapes.

Hundreds of prompts are sampled from a small model, half of them with a trained adapter. For each dtype the benchmark
reports the distance between the sampled log-probabilities and the result of `forward` for the same tokens. It then
compares prompts sampled alone with the same prompts sampled again, together, and with other numbers of KV cache slots:
how many samples contain a different token, and the distance of the log-probabilities before the first different token.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import quantile, report
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.testing.backend_driver import scoring
from skyrl_tx.testing.tiny_models import write_model

BASE, MODEL, SAMPLER = ModelId("base"), ModelId("m"), SamplerId("s")
SLOTS = 16
VOCAB_SIZE = 256
Samples = dict[RequestId, tuple[np.ndarray, np.ndarray]]


def start(model: Path, dtype: str, slots: int) -> JaxBackend:
    """Return a backend with a trained and an untrained model; training gives the same bits every time."""
    config = JaxConfig(
        compile_cache_dir=None,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        max_lora_rank=8,
        max_sampler_adapters=1,
        micro_batch_tokens=1024,
        sample_slots=slots,
        max_sample_tokens=slots * 128,
    )
    backend = JaxBackend(str(model), config)
    backend.start()

    row = np.random.default_rng(0).integers(2, VOCAB_SIZE, 41).astype(np.int32)
    for name in (BASE, MODEL):
        backend.create_model(name, ModelSpec(lora=LoraSpec(rank=8, seed=1)))
    for _ in range(2):
        backend.forward_backward(scoring(MODEL, [row]))
        backend.optim_step(MODEL, OptimizerParams(learning_rate=0.02))
    backend.load_sampler(SAMPLER, backend.capture(MODEL, {StatePart.WEIGHTS}))

    return backend


def make_requests(count: int, new: int) -> list[SampleRequest]:
    draw = np.random.default_rng(7)
    return [
        SampleRequest(
            request_id=RequestId(f"r{number}"),
            sampler=SAMPLER if number % 2 else None,
            prompt=draw.integers(2, VOCAB_SIZE, draw.integers(20, 32)).astype(np.int32),
            num_samples=1,
            params=SamplingParams(seed=number, max_tokens=new, eos_stops=False),
            options=PromptOptions(),
        )
        for number in range(count)
    ]


def sample(backend: JaxBackend, batches: Sequence[Sequence[SampleRequest]]) -> Samples:
    tokens: dict[RequestId, list[np.ndarray]] = {}
    logprobs: dict[RequestId, list[np.ndarray]] = {}
    for batch in batches:
        backend.begin_sample(PreparedSampleBatch(requests=tuple(batch)))
        while deltas := backend.step_sample():
            for delta in deltas:
                tokens.setdefault(delta.request_id, []).append(delta.tokens)
                logprobs.setdefault(delta.request_id, []).append(delta.logprobs)
    return {name: (np.concatenate(tokens[name]), np.concatenate(logprobs[name])) for name in tokens}


def summarize_distances(distances: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(f"{quantile(distances, 0.5):.2e}"),
        "p99": float(f"{quantile(distances, 0.99):.2e}"),
        "largest": float(f"{max(distances):.2e}"),
    }


def measure_distance_from_training(
    backend: JaxBackend, asked: Sequence[SampleRequest], drawn: Samples
) -> dict[str, float]:
    distances: list[float] = []
    for model, is_adapted in ((BASE, False), (MODEL, True)):
        own = [request for request in asked if (request.sampler is not None) == is_adapted]
        rows = [np.concatenate([request.prompt, drawn[request.request_id][0]]) for request in own]
        for request, result in zip(own, backend.forward(scoring(model, rows)), strict=True):
            logprobs = drawn[request.request_id][1]
            distances += np.abs(logprobs - result.logprobs[-logprobs.size :]).tolist()
    return summarize_distances(distances)


def count_differences(some: Samples, others: Samples) -> dict[str, Any]:
    """Count samples with a different token; compare log-probabilities before the first different token of each."""
    flips, seen, distances = 0, 0, [0.0]
    for name, (tokens, logprobs) in some.items():
        same = tokens == others[name][0]
        until = tokens.size if same.all() else int(same.argmin())
        flips += until < tokens.size
        seen += min(until + 1, tokens.size)
        distances += np.abs(logprobs[:until] - others[name][1][:until]).tolist()
    return {"different_tokens": flips, "of": seen, "distance": summarize_distances(distances)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=400, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to sample per prompt")
    parser.add_argument("--slots", type=int, nargs="*", default=[4, 32], help="KV cache slots to compare with 16")
    options = parser.parse_args()

    asked, results = make_requests(options.prompts, options.tokens), {}
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), vocab_size=VOCAB_SIZE, std=0.15)
        for dtype in ("float32", "bfloat16"):
            backend = start(model, dtype, SLOTS)
            alone = sample(backend, [[request] for request in asked])
            found: dict[str, Any] = {"trainer and sampler": measure_distance_from_training(backend, asked, alone)}
            found["sampled again"] = count_differences(alone, sample(backend, [[request] for request in asked]))
            backend.close()

            for slots in (SLOTS, *options.slots):
                backend = start(model, dtype, slots)
                found[f"together in {slots} slots"] = count_differences(alone, sample(backend, [asked]))
                backend.close()
            results[dtype] = found

    report("agreement", options, results, ("jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    main()
