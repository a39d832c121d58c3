"""Supervised fine-tuning: learn the worked answers, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tinker import AdamParams, Datum, TrainingClient
from tinker.types import ForwardBackwardOutput

from skyrl_tx.quickstart.order import Order

BATCH_SIZE = 16
# Measured on the tiny model, whose base is random: a hundred times what a pretrained model wants.
LEARNING_RATE = 1e-2
WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True)
class SftStep:
    """What one step showed."""

    step: int
    nll: float  # nats per answer token, on this batch before its update


def supervise(client: TrainingClient, lessons: Sequence[Datum], num_steps: int, seed: int) -> Iterator[SftStep]:
    """Train on batches in a shuffled order, yielding each step as it ends."""
    order = Order(len(lessons), seed)
    for step in range(num_steps):
        batch = [lessons[index] for index in order.take(BATCH_SIZE)]
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        rate = LEARNING_RATE * warmup * (1 - step / num_steps)
        # Both are sent before either is waited for: the server need not idle between them.
        gradient = client.forward_backward(batch, "cross_entropy")
        update = client.optim_step(AdamParams(learning_rate=rate))
        nll = mean_nll(batch, gradient.result())
        update.result()
        yield SftStep(step, nll)


def held_out_nll(client: TrainingClient, lessons: Sequence[Datum]) -> float:
    """Return nats per answer token on questions that training never sees."""
    return mean_nll(lessons, client.forward(list(lessons), "cross_entropy").result())


def mean_nll(lessons: Sequence[Datum], output: ForwardBackwardOutput) -> float:
    """Return the mean over all answer tokens of what a pass over `lessons` gave for each."""
    weights = [lesson.loss_fn_inputs["weights"].to_numpy() for lesson in lessons]
    logprobs = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
    total = sum(float(np.dot(w, p)) for w, p in zip(weights, logprobs, strict=True))
    return -total / sum(float(w.sum()) for w in weights)
