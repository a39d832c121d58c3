"""Warm-up: runs every common shape once at start-up, so that no request waits for the compiler.

In training these are passes with one target per position, the SDK's default rank, and every length of a micro-batch.
In sampling these are every prefill chunk, row count and KV read length, from the base model, from an adapter and from
both together, with every score of prompts.

Four cases are still compiled on first use: losses that are not local (gspo), the first sampler of a rank above the
default, the first sampler beyond the adapter pool's initial slots, and more than 31 targets per position of a prompt.
"""

import itertools
import logging
import time
from collections.abc import Iterator

import numpy as np

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import PrefillShapes, iter_ascending
from skyrl_tx.backends.jax.train.packing import choose_micro_batch_length
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK
from skyrl_tx.contract.backend import AbstractBackend, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams

WARM_UP_ID = "warm-up"

log = logging.getLogger(__name__)


def warm_up(
    backend: AbstractBackend,
    config: JaxConfig,
    scheduler: SampleScheduler,
    *,
    max_length: int,
    micro_batch_tokens: int,
    num_rows: int = 1,
) -> None:
    """Train and sample once in every shape with a temporary model. `num_rows` is the batch's number of shards."""
    started = time.monotonic()
    model, sampler = ModelId(WARM_UP_ID), SamplerId(WARM_UP_ID)
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=min(DEFAULT_RANK, config.max_lora_rank), seed=0)))
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))
    num_shapes = 0
    for length in iter_training_lengths(micro_batch_tokens // num_rows, max_length):
        batch = make_training_batch(model, length, max_length, num_rows)
        backend.forward(batch)
        backend.forward_backward(batch)
        num_shapes += 1
    backend.optim_step(model, OptimizerParams())
    lengths = PrefillShapes.from_config(config, max_length).iter_prompt_lengths(max_length)
    for length, each in itertools.product(lengths, (None, sampler)):
        backend.sample(_make_first_token_batch(each, length - 1))
    scheduler.compile_all(sampler)
    backend.drop_sampler(sampler)
    backend.delete_model(model)
    log.info("warm-up: %d training shapes and all sampling shapes in %.1f s", num_shapes, time.monotonic() - started)


def iter_training_lengths(budget: int, max_length: int) -> Iterator[int]:
    """Yield the length of every row shape of a micro-batch."""
    return iter_ascending(lambda size: choose_micro_batch_length(size, budget), max(budget, max_length))


def make_training_batch(model: ModelId, num_tokens: int, max_length: int, num_rows: int) -> PreparedModelPassBatch:
    """Return the examples of one micro-batch of `num_rows` rows of `num_tokens` tokens."""
    lengths = [min(max_length, num_tokens - start) for start in range(0, num_tokens, max_length)]
    examples = [
        PassExample(
            request_id=RequestId(WARM_UP_ID),
            model_id=model,
            tokens=np.zeros(length, np.int32),
            loss="cross_entropy",
            loss_inputs={"target_tokens": np.zeros(length, np.int32), "weights": np.ones(length, np.float32)},
            loss_config={},
        )
        for length in lengths * num_rows
    ]
    return PreparedModelPassBatch(examples=tuple(examples))


def _make_first_token_batch(sampler: SamplerId | None, prompt_length: int) -> PreparedSampleBatch:
    """Return a request for one token, which needs no slot."""
    request = SampleRequest(
        request_id=RequestId(WARM_UP_ID),
        sampler=sampler,
        prompt=np.zeros(prompt_length, np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=1, eos_stops=False),
        options=PromptOptions(logprobs=True),
    )
    return PreparedSampleBatch(requests=(request,))
