"""Reinforcement learning: answers are sampled, those better than their group's mean become more likely.

The task is form, which even a tiny model can learn from its own samples: within a budget of tokens, come to the line
`#### <number>`, and end there. Whether the number is right is not rewarded; a model of this size cannot calculate.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from tinker import AdamParams, Datum, ModelInput, SampledSequence, SamplingClient, SamplingParams, TrainingClient

from skyrl_tx.quickstart.chat import Chat
from skyrl_tx.quickstart.order import Order
from skyrl_tx.quickstart.questions import Question

MAX_TOKENS = 64  # of an answer; worked answers have 61 on average
GROUP_SIZE = 8  # answers to one question
NUM_GROUPS = 8  # questions of a step
LEARNING_RATE = 2e-3

TASK = f"0.5 for a line '#### <number>' within {MAX_TOKENS} tokens, 1 for also ending there"
RESULT_LINE = re.compile(r"^#### -?\d[\d,]*(?:\.\d+)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RlStep:
    """What one step showed."""

    step: int
    reward: float  # mean over all its answers, sampled before its update
    num_trained: int  # answers whose group held better and worse


def reward(chat: Chat, sequence: SampledSequence) -> float:
    """Return 0.5 for an answer with a line `#### <number>`, 1 if it also ends by itself right there, else 0."""
    text = chat.text(sequence)
    found = RESULT_LINE.search(text)
    if found is None:
        return 0.0
    return 1.0 if sequence.stop_reason == "stop" and found.end() == len(text) else 0.5


def reinforce(
    client: TrainingClient, chat: Chat, questions: Sequence[Question], num_steps: int, seed: int
) -> Iterator[RlStep]:
    """Train on groups of sampled answers, yielding each step as it ends."""
    order = Order(len(questions), seed)
    for step in range(num_steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        prompts = [chat.prompt(questions[index]) for index in order.take(NUM_GROUPS)]
        groups = sample_groups(sampler, chat, prompts, GROUP_SIZE, seed=seed + step * NUM_GROUPS)
        rewards = [[reward(chat, sequence) for sequence in group] for group in groups]
        batch = [
            attempt(prompt, sequence, value - float(np.mean(values)))
            for prompt, group, values in zip(prompts, groups, rewards, strict=True)
            if len(set(values)) > 1  # a group without differences teaches nothing
            for sequence, value in zip(group, values, strict=True)
        ]
        if batch:
            gradient = client.forward_backward(batch, "importance_sampling")
            update = client.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            gradient.result()
            update.result()
        yield RlStep(step, float(np.mean(rewards)), len(batch))


def mean_reward(sampler: SamplingClient, chat: Chat, questions: Sequence[Question], seed: int) -> float:
    """Return the mean reward of sampled answers, four to a question."""
    prompts = [chat.prompt(question) for question in questions]
    groups = sample_groups(sampler, chat, prompts, 4, seed)
    return float(np.mean([[reward(chat, sequence) for sequence in group] for group in groups]))


def sample_groups(
    sampler: SamplingClient, chat: Chat, prompts: Sequence[list[int]], group_size: int, seed: int
) -> list[list[SampledSequence]]:
    """Return `group_size` answers to each prompt; all prompts are sent before the first answer is waited for."""
    futures = [
        sampler.sample(
            ModelInput.from_ints(prompt),
            num_samples=group_size,
            sampling_params=SamplingParams(max_tokens=MAX_TOKENS, seed=own_seed, stop=[chat.turn_end]),
        )
        for prompt, own_seed in zip(prompts, count(seed))
    ]
    return [list(future.result().sequences) for future in futures]


def attempt(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """Return one sampled answer as training data: what the sampler thought of each token, and its advantage."""
    tokens = [*prompt, *sequence.tokens]
    assert sequence.logprobs is not None
    before = [0.0] * (len(prompt) - 1)  # nothing is learned of the prompt
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],  # type: ignore[dict-item]
            "logprobs": before + list(sequence.logprobs),  # type: ignore[dict-item]
            "advantages": before + [advantage] * len(sequence.tokens),  # type: ignore[dict-item]
        },
    )
