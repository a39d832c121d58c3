"""Semantics of training and sampling, through the unmodified SDK, on each backend."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL
from tests.support.live_stack import VOCAB_SIZE, LiveStack, both_backends, live_stack

PROMPT = [5, 6, 7]


def examples(seed: int, count: int = 2) -> list[types.Datum]:
    """Return random sequences of random lengths."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(1, VOCAB_SIZE, size=generator.integers(4, 20)) for _ in range(count)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].astype(np.int64), "weights": np.ones(len(row) - 1, np.float32)},
        )
        for row in rows
    ]


def steps(client: tinker.TrainingClient, seeds: range) -> Iterator[float]:
    """Train one step per seed and yield the loss of each step."""
    for seed in seeds:
        passed = client.forward_backward(examples(seed), "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.02, weight_decay=0.1))
        yield passed.result().metrics["loss:sum"]
        stepped.result()


def new_client(service: tinker.ServiceClient, rank: int = 8) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=rank, seed=3).result()


def draw(
    sampler: tinker.SamplingClient, *, seed: int | None = 1, num_samples: int = 2, temperature: float = 1.0
) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=6, stop=[], seed=seed, temperature=temperature)
    prompt = types.ModelInput.from_ints(PROMPT)
    return list(sampler.sample(prompt, num_samples=num_samples, sampling_params=params).result().sequences)


def get_tokens_and_logprobs(sequences: list[types.SampledSequence]) -> list[tuple[list[int], list[float]]]:
    return [(list(sequence.tokens), list(sequence.logprobs or [])) for sequence in sequences]


def test_every_field_of_adam_params_reaches_the_backend(tmp_path: Path) -> None:
    """Fails if the SDK adds a field.

    Each step sends its own values, so clients implement learning rate schedules.
    """
    given = {
        "learning_rate": 0.25,
        "beta1": 0.5,
        "beta2": 0.75,
        "eps": 0.125,
        "weight_decay": 2.0,
        "grad_clip_norm": 3.0,
    }
    assert given.keys() == types.AdamParams.model_fields.keys()
    # Uses a separate server, because the engine looks up a backend method only once, at the first
    # call.
    with live_stack("fake", tmp_path) as stack, tinker.ServiceClient(base_url=stack.url) as service:
        step = Mock(wraps=stack.backend.optim_step)
        stack.backend.optim_step = step
        training = new_client(service)
        for rate in (0.25, 0.5):
            training.forward_backward(examples(1), "cross_entropy").result()
            training.optim_step(types.AdamParams(**{**given, "learning_rate": rate})).result()
    seen = [asdict(call.args[1]) for call in step.call_args_list]
    assert seen == [{**given, "learning_rate": rate} for rate in (0.25, 0.5)]


@both_backends
@pytest.mark.parametrize("temperature", [0.8, 2.0])
def test_logprob_differences_scale_with_temperature(training: tinker.TrainingClient, temperature: float) -> None:
    """(log p_T(a) - log p_T(b)) * T is the same at every T, for tokens sampled at one position."""
    list(steps(training, range(2)))
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)

    def first_tokens(temperature: float) -> dict[int, float]:
        params = types.SamplingParams(max_tokens=1, stop=[], seed=1, temperature=temperature)
        drawn = sampler.sample(prompt, num_samples=48, sampling_params=params).result().sequences
        return {sequence.tokens[0]: (sequence.logprobs or [])[0] for sequence in drawn}

    def at_one(token: int) -> float:
        return sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, token])).result()[-1] or 0.0

    scaled = first_tokens(temperature)
    assert len(scaled) > 3
    reference, *others = sorted(scaled)[:6]
    for token in others:
        difference = (scaled[token] - scaled[reference]) * temperature
        assert difference == pytest.approx(at_one(token) - at_one(reference), abs=2e-5)
    assert any(abs(at_one(token) - at_one(reference)) > 0.1 for token in others), "the tokens have different logprobs"


def test_sampler_is_frozen_and_seeds_are_reproducible(training: tinker.TrainingClient) -> None:
    list(steps(training, range(1)))
    frozen = training.save_weights_and_get_sampling_client().result()
    before = get_tokens_and_logprobs(draw(frozen))
    list(steps(training, range(1, 4)))
    moved = training.save_weights_and_get_sampling_client().result()

    assert get_tokens_and_logprobs(draw(frozen)) == before, "also after later steps, and with another sampler"
    assert get_tokens_and_logprobs(draw(moved)) != before
    assert get_tokens_and_logprobs(draw(frozen, seed=2)) != before
    assert get_tokens_and_logprobs(draw(frozen, seed=None)) != get_tokens_and_logprobs(draw(frozen, seed=None))
    assert before[0] != before[1], "samples of one prompt differ from each other"
    greedy = draw(frozen, seed=None, temperature=0.0)
    assert greedy[0].tokens == greedy[1].tokens == draw(frozen, seed=9, temperature=0.0)[0].tokens


def test_batch_invariance_of_concurrent_tenants(service: tinker.ServiceClient, stack: LiveStack) -> None:
    def run(rank: int) -> list[float]:
        with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as own:
            return list(steps(new_client(own, rank), range(5)))

    alone = [list(steps(new_client(service, rank), range(5))) for rank in (8, 4)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run, rank) for rank in (8, 4, 8)]
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        while not all(future.done() for future in running):
            draw(sampler)
    assert [future.result() for future in running] == [alone[0], alone[1], alone[0]]
