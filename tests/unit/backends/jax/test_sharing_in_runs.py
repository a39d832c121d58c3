"""Runs with shared prefixes have the losses of runs with plain packing, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import OptimizerParams
from tests.unit.backends.jax.test_sharing_in_training import PLAIN, SHARED, make_group, start_backend

pytestmark = pytest.mark.slow

NUM_STEPS, BATCH, BETA = 20, 8, 0.1
STEP = OptimizerParams(learning_rate=1e-3)


def make_examples(model: ModelId, prompts: Sequence[int], num_answers: int, prompt_length: int) -> list[PassExample]:
    """Return examples with a cross-entropy of their answers, `num_answers` for each prompt."""
    made: list[PassExample] = []
    for seed in prompts:
        lengths = tuple(int(length) for length in np.random.default_rng(seed).integers(10, 40, num_answers))
        for example in make_group(model, "cross_entropy", prompt_length, lengths, seed=seed):
            weights = (np.arange(example.tokens.size) >= prompt_length - 1).astype(np.float32)
            inputs = {**example.loss_inputs, "weights": weights}
            made.append(replace(example, request_id=RequestId(model), loss_inputs=inputs))
    return made


def train_supervised(backend: JaxBackend, model: ModelId, step: int) -> float:
    """Take a step on examples that all begin with the same instructions. Returns the loss per token."""
    examples = make_examples(model, [step // 5], BATCH, 80)
    results = backend.forward_backward(PreparedModelPassBatch(examples=tuple(examples)))
    backend.optim_step(model, STEP)
    return sum(result.sums["loss"] for result in results) / sum(
        float(example.loss_inputs["weights"].sum()) for example in examples
    )


def train_on_preferences(
    backend: JaxBackend, model: ModelId, step: int, *, references: dict[tuple[ModelId, int], np.ndarray]
) -> float:
    """Take a step of DPO on pairs of answers, as the SDK computes a custom loss in the client. Returns the loss.

    `references` has the log-probabilities of the model before its first step, by model and batch.
    """
    batch = step % 2
    examples = make_examples(model, range(BATCH * batch, BATCH * (batch + 1)), 2, 60)
    weights = [example.loss_inputs["weights"] for example in examples]
    results = backend.forward(PreparedModelPassBatch(examples=tuple(examples)))
    logprobs = np.array([(result.logprobs * own).sum() for result, own in zip(results, weights, strict=True)])
    reference = references.setdefault((model, batch), logprobs)

    # Chosen answers have even indices. The gradient of the loss becomes the weights of a cross-entropy.
    chosen, rejected = (logprobs - reference).reshape(-1, 2).T
    losses = np.logaddexp(0.0, -BETA * (chosen - rejected))
    factors = np.stack([np.ones(BATCH), -np.ones(BATCH)], axis=1) * (BETA * (1 - np.exp(-losses)))[:, None] / BATCH
    weighted = [
        replace(example, loss_inputs={**example.loss_inputs, "weights": (own * factor).astype(np.float32)})
        for example, own, factor in zip(examples, weights, factors.ravel(), strict=True)
    ]
    backend.forward_backward(PreparedModelPassBatch(examples=tuple(weighted)))
    backend.optim_step(model, STEP)
    return float(losses.mean())


@pytest.mark.parametrize("train", [train_supervised, partial(train_on_preferences, references={})], ids=["sft", "dpo"])
def test_each_of_the_first_losses_is_the_one_of_plain_packing(
    train: Callable[[JaxBackend, ModelId, int], float],
) -> None:
    with start_backend() as backend:
        plain = np.array([train(backend, PLAIN, step) for step in range(NUM_STEPS)])
        assert backend.meters().shared_tokens == 0
        shared = np.array([train(backend, SHARED, step) for step in range(NUM_STEPS)])
        assert (backend.meters().shared_tokens or 0) > NUM_STEPS * 60 * BATCH // 2
    assert plain[-1] < plain[0] and len(set(plain)) > NUM_STEPS // 2, "the model learns"
    difference = np.abs(shared - plain).max()
    print(f"losses {plain[0]:.4f} to {plain[-1]:.4f}, difference at most {difference:.1e}")
    assert difference < 1e-4
