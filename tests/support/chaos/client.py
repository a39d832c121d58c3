"""A training run through the SDK that records all results: supervised, reinforcement learning, save, load, train."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tinker
from tinker import types

NUM_SUPERVISED = 8
NUM_REINFORCED = 5
VOCAB_SIZE = 250
Transcript = list[tuple[str, Any]]
"""The results of a client in order: a name, and values to compare bitwise."""


def run_tenants(url: str, base_model: str, num_tenants: int) -> list[Transcript]:
    """Run concurrent clients, each with its own session, seed and data."""
    with ThreadPoolExecutor(num_tenants) as threads:
        return list(threads.map(lambda tenant: run(url, base_model, tenant), range(num_tenants)))


def run(url: str, base_model: str, tenant: int) -> Transcript:
    """Train like the cookbook: send the next step before the result of the last one arrives."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client(base_model, rank=4, seed=tenant).result()
    transcript: Transcript = []
    steps = _Steps(training, transcript)

    for step in range(NUM_SUPERVISED):
        batches = [[_datum(tenant, step, row) for row in range(1 + row_step)] for row_step in range(1 + step % 2)]
        steps.submit(batches, "cross_entropy")
        if step == NUM_SUPERVISED // 2:
            training.save_state("middle").result()

    steps.finish()
    for turn in range(NUM_REINFORCED):
        sampler = training.save_weights_and_get_sampling_client().result()
        steps.submit([_rollouts(training, sampler, tenant, turn, transcript)], "importance_sampling")
    steps.finish()
    saved = training.save_state("last").result()
    pending = training.forward_backward([_datum(tenant, 900, 0)], "cross_entropy")
    copy = service.create_training_client_from_state_with_optimizer(saved.path).result()

    for client, step in ((copy, 901), (training, 902)):  # the second adds to the pending gradient
        steps = _Steps(client, transcript)
        steps.submit([[_datum(tenant, step, 0)]], "cross_entropy")
        steps.finish()
        transcript.append(_make_record("forward", client.forward([_datum(tenant, 903, 0)], "cross_entropy").result()))
        client.save_state("end").result()

    transcript.append(_make_record("pending", pending.result()))
    return transcript


class _Steps:
    """Pipelined optimizer steps: the newest is pending."""

    def __init__(self, training: tinker.TrainingClient, transcript: Transcript) -> None:
        self._training = training
        self._transcript = transcript
        self._waiting: list[tuple[list[tinker.APIFuture[types.ForwardBackwardOutput]], Any]] = []

    def submit(self, batches: list[list[types.Datum]], loss: types.LossFnType) -> None:
        passes = [self._training.forward_backward(batch, loss) for batch in batches]
        step = self._training.optim_step(types.AdamParams(learning_rate=5e-3, weight_decay=0.01, grad_clip_norm=1.0))
        self._waiting.append((passes, step))
        if len(self._waiting) > 1:
            self._record()

    def finish(self) -> None:
        while self._waiting:
            self._record()

    def _record(self) -> None:
        passes, step = self._waiting.pop(0)
        self._transcript.extend(_make_record("pass", future.result()) for future in passes)
        self._transcript.append(("step", sorted((step.result().metrics or {}).items())))


def _rollouts(
    training: tinker.TrainingClient, sampler: tinker.SamplingClient, tenant: int, turn: int, transcript: Transcript
) -> list[types.Datum]:
    """Sample, and let the trainer score the samples: its logprobs are batch-invariant to the last bit."""
    params = types.SamplingParams(max_tokens=20, temperature=1.0, seed=100 * tenant + turn)
    prompts = [[5 + tenant, 7 + turn, 11], [3, 4, 5, 6 + tenant]]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 2, params) for prompt in prompts]
    data: list[types.Datum] = []

    for prompt, future in zip(prompts, futures, strict=True):
        for number, sequence in enumerate(future.result().sequences):
            drawn, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
            transcript += [("sample", drawn), ("sampled logprobs", logprobs)]
            before = [0.0] * (len(prompt) - 1)
            advantages = before + [1.0 - 2.0 * number + 0.01 * sum(drawn) % 1] * len(drawn)
            targets = np.array([*prompt[1:], *drawn], np.int64)
            tokens = types.ModelInput.from_ints([*prompt, *drawn][:-1])
            plain = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
            scored = training.forward([types.Datum(model_input=tokens, loss_fn_inputs=plain)], "cross_entropy").result()
            inputs = {
                "target_tokens": targets,
                "logprobs": scored.loss_fn_outputs[0]["logprobs"],
                "advantages": np.array(advantages, np.float32),
            }
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))

    return data


def _datum(*seed: int) -> types.Datum:
    dice = np.random.default_rng(seed)
    tokens = dice.integers(1, VOCAB_SIZE, int(dice.integers(6, 24)))
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def _make_record(name: str, output: types.ForwardBackwardOutput) -> tuple[str, Any]:
    logprobs = [output_values["logprobs"].to_numpy().tobytes().hex() for output_values in output.loss_fn_outputs]
    return name, (sorted(output.metrics.items()), logprobs)
