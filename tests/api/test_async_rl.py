"""Asynchronous reinforcement learning with the SDK: sample from old weights while new weights are trained."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL

PROMPT = [5, 6, 7]
NUM_PROMPTS = 4
NUM_STEPS = 3
Rollout = list[types.SampledSequence]


def roll_out(sampler: tinker.SamplingClient, step: int) -> list[tinker.APIFuture[types.SampleResponse]]:
    """Submit the sampling requests of one step and return their futures."""
    params = types.SamplingParams(max_tokens=24, stop=[], seed=step)
    prompts = [types.ModelInput.from_ints([*PROMPT, 10 + row]) for row in range(NUM_PROMPTS)]
    return [sampler.sample(prompt, num_samples=2, sampling_params=params) for prompt in prompts]


def collect_sequences(pending: list[tinker.APIFuture[types.SampleResponse]]) -> Rollout:
    return [sequence for future in pending for sequence in future.result().sequences]


def examples(rollout: Rollout) -> list[types.Datum]:
    """Return datums of a policy gradient that rewards even tokens.

    Every datum uses the same prompt.
    """
    data: list[types.Datum] = []

    for sequence in rollout:
        tokens, prompt = [*PROMPT, *sequence.tokens], np.zeros(len(PROMPT) - 1, np.float32)
        advantages = np.array([1.0 if token % 2 == 0 else -1.0 for token in sequence.tokens], np.float32)
        logprobs = np.array(sequence.logprobs, np.float32)

        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": np.array(tokens[1:], np.int64),
                    "logprobs": np.concatenate([prompt, logprobs]),
                    "advantages": np.concatenate([prompt, advantages]),
                },
            )
        )

    return data


def train(client: tinker.TrainingClient, rollout: Rollout) -> float:
    passed = client.forward_backward(examples(rollout), "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return passed.result().metrics["loss:sum"]


def summary(rollouts: list[Rollout]) -> list[tuple[list[int], list[float]]]:
    return [(sequence.tokens, sequence.logprobs or []) for rollout in rollouts for sequence in rollout]


def run(service: tinker.ServiceClient, *, ahead: bool) -> tuple[list[Rollout], list[float]]:
    """Train on samples that are one step old. With `ahead`, sampling and training run concurrently."""
    training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
    rollouts = [collect_sequences(roll_out(training.save_weights_and_get_sampling_client().result(), 0))]
    losses: list[float] = []
    for step in range(1, NUM_STEPS + 1):
        pending = roll_out(training.save_weights_and_get_sampling_client().result(), step)
        if not ahead:
            collect_sequences(pending)
        losses.append(train(training, rollouts[-1]))
        rollouts.append(collect_sequences(pending))
    return rollouts, losses


def test_samples_use_their_weights_while_training_continues(service: tinker.ServiceClient) -> None:
    sequential, sequential_losses = run(service, ahead=False)
    concurrent, losses = run(service, ahead=True)
    assert losses == sequential_losses, "concurrent sampling changes no bit of the training"
    for (tokens, logprobs), (expected_tokens, expected) in zip(summary(concurrent), summary(sequential), strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
    assert summary(sequential[1:2]) != summary(sequential[-1:])


def test_old_samplers_work_while_training_continues(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
    old = training.save_weights_and_get_sampling_client().result()
    before = collect_sequences(roll_out(old, 1))
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(lambda: [train(training, before) for _ in range(NUM_STEPS)])
        during = [collect_sequences(roll_out(old, 1))]
        while not steps.done():
            during.append(collect_sequences(roll_out(old, 1)))
        assert len(steps.result()) == NUM_STEPS

    for rollout in during:
        assert [sequence.tokens for sequence in rollout] == [sequence.tokens for sequence in before]
    new = training.save_weights_and_get_sampling_client().result()
    assert summary([collect_sequences(roll_out(new, 1))]) != summary([before])


def test_inflight_samplers_follow_the_model(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
    following = training.save_weights_and_get_sampling_client(kind="inflight").result()
    frozen = training.save_weights_and_get_sampling_client().result()
    rollout = collect_sequences(roll_out(following, 1))
    train(training, rollout)
    newer = training.save_weights_and_get_sampling_client(kind="inflight").result()
    first, second = (summary([collect_sequences(roll_out(client, 1))]) for client in (following, newer))
    assert first == second != summary([collect_sequences(roll_out(frozen, 1))])
