"""Reinforcement learning of sums through the SDK: a short supervised warm-up, then a reward of 1 for the right number.

The warm-up teaches the form of the answer, a number alone. Without it nearly all rewards are 0.
"""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from tinker import AdamParams, Datum, SampledSequence, TrainingClient
from transformers import AutoTokenizer

from benchmarks.gpu_rl.client import connect, create_adapter
from benchmarks.gpu_rl.device import read_process_memory
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.real.questions import draw_sums
from skyrl_tx.tools.quickstart.training import (
    Chat,
    Question,
    compute_mean_nll,
    make_rl_datum,
    sample_groups,
    shuffle_forever,
)

GROUPS, GROUP_SIZE = 8, 6
"""Questions of an iteration, and answers to each of them."""
WARM_UP_BATCH, WARM_UP_RATE, RATE = 8, 5e-4, 2e-4
HELD_OUT, HELD_OUT_ANSWERS = 64, 4


def main(url: str, model: str, engine: int, warm_up: int, iterations: int, seed: int) -> None:
    """Train, and record reward, seconds and the engine's memory after each iteration."""
    chat = Chat(AutoTokenizer.from_pretrained(model))
    held_out, asked = draw_sums(HELD_OUT, 10_000 + seed), draw_sums(iterations * GROUPS, 20_000 + seed)
    results: dict[str, Any] = {"warm_up_losses": [], "held_out_right": {}, "iterations": []}

    with connect(url) as service:
        training = create_adapter(service, seed)
        examples = shuffle_forever([chat.make_sft_datum(q) for q in draw_sums(warm_up * WARM_UP_BATCH, seed)], seed)
        for _ in range(warm_up):
            batch = list(islice(examples, WARM_UP_BATCH))
            results["warm_up_losses"].append(
                compute_mean_nll(batch, step(training, batch, "cross_entropy", WARM_UP_RATE))
            )
            save_progress(results)
        results["held_out_right"]["before"] = score(training, chat, held_out, seed)
        results["memory_before"] = read_process_memory(engine)
        save_progress(results)

        for number in range(iterations):
            started = time.perf_counter()
            questions = asked[number * GROUPS : (number + 1) * GROUPS]
            record = iterate(training, chat, questions, seed=30_000 + seed + number * GROUPS)
            record["seconds"] = round(time.perf_counter() - started, 1)
            results["iterations"].append(record | read_process_memory(engine))
            save_progress(results)

        results["held_out_right"]["after"] = score(training, chat, held_out, seed)
        save_progress(results)


def iterate(training: TrainingClient, chat: Chat, questions: Sequence[Question], seed: int) -> dict[str, Any]:
    """Sample groups of answers with the current weights, and train one step on the groups in which rewards differ."""
    sampler = training.save_weights_and_get_sampling_client().result()
    groups = sample_groups(sampler, chat, questions, GROUP_SIZE, seed)
    rewards = [[is_right(chat, q, answer) for answer in group] for q, group in zip(questions, groups, strict=True)]
    batch = [
        make_rl_datum(chat.encode_prompt(question), answer, value - float(np.mean(values)))
        for question, group, values in zip(questions, groups, rewards, strict=True)
        if len(set(values)) > 1
        for answer, value in zip(group, values, strict=True)
    ]
    if batch:
        step(training, batch, "importance_sampling", RATE)
    return {"reward": float(np.mean(rewards)), "trained_on": len(batch)}


def step(training: TrainingClient, batch: list[Datum], loss: Any, rate: float) -> Any:
    """Run one step, and return the result of its forward and backward pass."""
    passed = training.forward_backward(batch, loss)
    stepped = training.optim_step(AdamParams(learning_rate=rate))
    output = passed.result()
    stepped.result()
    return output


def score(training: TrainingClient, chat: Chat, questions: Sequence[Question], seed: int) -> float:
    """Return the share of right answers, sampled at temperature 1."""
    sampler = training.save_weights_and_get_sampling_client().result()
    groups = sample_groups(sampler, chat, questions, HELD_OUT_ANSWERS, 40_000 + seed)
    return float(np.mean([is_right(chat, q, a) for q, group in zip(questions, groups, strict=True) for a in group]))


def is_right(chat: Chat, question: Question, answer: SampledSequence) -> float:
    return float(chat.decode_text(answer).strip() == question.answer)


if __name__ == "__main__":
    main(**read_arguments())
