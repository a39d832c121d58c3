"""Run every common shape once, so that no request waits for a compiler.

Common is: one target per position, the SDK's default rank, every length of a micro-batch; and in
sampling every prompt and cache length, from the base model and from an adapter.
"""

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from skyrl_tx.backends.jax.buckets import bucket
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.packing import SHORTEST, micro_batch_length
from skyrl_tx.contract.backend import AbstractBackend, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams

DEFAULT_RANK = 32  # tinker/lib/public_interfaces/service_client.py, create_lora_training_client
NAME = "warm-up"

log = logging.getLogger(__name__)


def warm_up(
    backend: AbstractBackend, config: JaxConfig, max_length: int, micro_batch_tokens: int, num_rows: int = 1
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
    for length in _prompt_lengths(max_length):
        for each in (None, sampler):
            backend.sample(PreparedSampleBatch(requests=(_sample_request(each, length, config.sample_slots),)))
    backend.drop_sampler(sampler)
    backend.delete_model(model)
    log.info("warm-up: %d training shapes in %.1f s", num_shapes, time.monotonic() - began)


def training_lengths(budget: int, max_length: int) -> Iterator[int]:
    """Yield the most tokens that a row of each length holds."""
    return _ascending(lambda size: micro_batch_length(size, budget), max(budget, max_length))


def _prompt_lengths(max_length: int) -> Iterator[int]:
    return _ascending(lambda size: bucket(size, SHORTEST), max_length)


def _ascending(rounded_up: Callable[[int], int], last: int) -> Iterator[int]:
    """Yield every length that sizes are rounded up to, and at last the greatest size."""
    length = rounded_up(1)
    while length < last:
        yield length
        length = rounded_up(length + 1)
    yield last


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


def _sample_request(sampler: SamplerId | None, length: int, num_samples: int) -> SampleRequest:
    """Ask for two tokens, one by prefill and one by decoding, after a prompt that leaves room for them."""
    return SampleRequest(
        request_id=RequestId(NAME),
        sampler=sampler,
        prompt=np.zeros(max(1, length - 2), np.int32),
        num_samples=num_samples,
        params=SamplingParams(seed=0, max_tokens=min(2, length - 1), eos_stops=False),
        options=PromptOptions(),
    )
