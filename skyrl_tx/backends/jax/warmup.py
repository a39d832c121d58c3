"""Run every common shape once, so that no request waits for a compiler.

Common is: one target per position, the SDK's default rank, every length of a micro-batch; and in sampling every chunk
of a prompt, number of samples, shape of the cache and stretch of it, from the base model, from an adapter, and from
both at once, with whatever may be asked of prompts. What is compiled later all the same: the first sampler of a rank
above the default, one more than memory had room for from the start, and more than 31 targets at a prompt's position.
"""

import logging
import time
from collections.abc import Iterator

import numpy as np

from skyrl_tx.backends.jax.buckets import ascending
from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.packing import micro_batch_length
from skyrl_tx.backends.jax.sampler import FIRST_ROWS, Sampler
from skyrl_tx.contract.backend import AbstractBackend, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams

DEFAULT_RANK = 32  # tinker/lib/public_interfaces/service_client.py, create_lora_training_client
NAME = "warm-up"

log = logging.getLogger(__name__)


def warm_up(
    backend: AbstractBackend,
    config: JaxConfig,
    sampling: Sampler,
    *,
    max_length: int,
    micro_batch_tokens: int,
    num_rows: int = 1,
) -> None:
    """Train and sample once in every shape, in rows side by side, with a model that is gone afterwards."""
    began = time.monotonic()
    model, sampler = ModelId(NAME), SamplerId(NAME)
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=min(DEFAULT_RANK, config.max_lora_rank), seed=0)))
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))
    num_shapes = 0
    for length in training_lengths(micro_batch_tokens // num_rows, max_length):
        batch = _training_batch(model, length, max_length, num_rows)
        backend.forward(batch)
        backend.forward_backward(batch)
        num_shapes += 1
    backend.optim_step(model, OptimizerParams())
    for batch in _first_draws(sampler, Chunks.of(config, max_length), max_length):
        backend.sample(batch)
    sampling.rehearse(sampler)
    backend.drop_sampler(sampler)
    backend.delete_model(model)
    log.info("warm-up: %d training shapes, and sampling, in %.1f s", num_shapes, time.monotonic() - began)


def training_lengths(budget: int, max_length: int) -> Iterator[int]:
    """Yield the most tokens that a row of each length holds."""
    return ascending(lambda size: micro_batch_length(size, budget), max(budget, max_length))


def _first_draws(sampler: SamplerId, chunks: Chunks, max_length: int) -> Iterator[PreparedSampleBatch]:
    """Yield requests for one new token each, which need no slot: of every chunk and number of first rows."""
    for length in chunks.lengths(max_length):
        for each in (None, sampler):
            for num_samples in FIRST_ROWS:
                yield PreparedSampleBatch(
                    requests=(_sample_request(each, length - 1, 1, num_samples, PromptOptions(logprobs=True)),)
                )


def _training_batch(model: ModelId, num_tokens: int, max_length: int, num_rows: int = 1) -> PreparedModelPassBatch:
    """Return as many examples as it takes for one micro-batch, each row of so many tokens."""
    lengths = [min(max_length, num_tokens - start) for start in range(0, num_tokens, max_length)]
    return PreparedModelPassBatch(examples=tuple(_training_example(model, length) for length in lengths * num_rows))


def _training_example(model: ModelId, length: int) -> PassExample:
    return PassExample(
        request_id=RequestId(NAME),
        model_id=model,
        tokens=np.zeros(length, np.int32),
        loss="cross_entropy",
        loss_inputs={"target_tokens": np.zeros(length, np.int32), "weights": np.ones(length, np.float32)},
        loss_config={},
    )


def _sample_request(
    sampler: SamplerId | None,
    prompt_length: int,
    max_tokens: int,
    num_samples: int,
    options: PromptOptions | None = None,
) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(f"{NAME} of {sampler}"),
        sampler=sampler,
        prompt=np.zeros(prompt_length, np.int32),
        num_samples=num_samples,
        params=SamplingParams(seed=0, max_tokens=max_tokens, eos_stops=False),
        options=options or PromptOptions(),
    )
