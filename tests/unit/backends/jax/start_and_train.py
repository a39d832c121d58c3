"""Start a backend with a warm-up, train and sample, and tell what the cache gave: run twice by `test_compile_cache.py`.

    python start_and_train.py MODEL_DIRECTORY CACHE_DIRECTORY

Prints the number of programs asked for, and of those found in the cache.
"""

import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams

ASKED, FOUND = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
MODEL, SAMPLER = ModelId("m"), SamplerId("s")


def example(request: str, length: int, num_targets: int | None) -> PassExample:
    shape = (length,) if num_targets is None else (length, num_targets)
    return PassExample(
        request_id=RequestId(request),
        model_id=MODEL,
        tokens=np.arange(length, dtype=np.int32),
        loss="cross_entropy",
        loss_inputs={"target_tokens": np.zeros(shape, np.int32), "weights": np.ones(shape, np.float32)},
        loss_config={},
    )


def work(backend: JaxBackend) -> None:
    """What the warm-up knows, and what it does not: other ranks, several targets, sums over requests."""
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=3, seed=1, train_unembed=False)))
    given = (("a", 7, None), ("b", 30, None), ("b", 32, None), ("c", 5, 3))
    for _ in range(2):
        backend.forward_backward(PreparedModelPassBatch(examples=tuple(example(*each) for each in given)))
        backend.optim_step(MODEL, OptimizerParams(grad_clip_norm=1.0))
    backend.load_sampler(SAMPLER, backend.capture(MODEL, {StatePart.WEIGHTS}))
    request = SampleRequest(
        request_id=RequestId("s"),
        sampler=SAMPLER,
        prompt=np.arange(5, dtype=np.int32),
        num_samples=2,
        params=SamplingParams(seed=0, max_tokens=6, temperature=0.7),
        options=PromptOptions(logprobs=True, topk=2),
    )
    assert backend.sample(PreparedSampleBatch(requests=(request,)))


def main() -> None:
    heard: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: heard.update([event]))
    config = JaxConfig(
        compile_cache_dir=Path(sys.argv[2]),
        max_context_length=32,
        micro_batch_tokens=48,
        max_sample_tokens=32,
        sample_slots=1,
        max_lora_rank=8,
        max_lora_adapters=1,
        max_sampler_adapters=1,
        warmup=True,
    )
    backend = JaxBackend(sys.argv[1], config)
    backend.start()
    work(backend)
    backend.close()
    print(heard[ASKED], heard[FOUND])


if __name__ == "__main__":
    main()
