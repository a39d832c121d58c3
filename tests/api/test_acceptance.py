"""The unmodified SDK against the API, the store and each backend: a complete run, and cases that naive servers fail."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL
from tests.support.live_stack import LiveStack, both_backends

PROMPT = types.ModelInput.from_ints([5, 6, 7])
# Some of these features are deprecated, and the SDK warns about them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


def datum(length: int = 5, **inputs: Any) -> types.Datum:
    arrays = {
        "target_tokens": np.arange(2, length + 2, dtype=np.int64),
        "weights": np.ones(length, dtype=np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))), loss_fn_inputs=arrays | inputs
    )


def train(client: tinker.TrainingClient, steps: int = 1) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        passed = client.forward_backward([datum()], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.01))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def loss(client: tinker.TrainingClient) -> float:
    return client.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


@both_backends
def test_training_lowers_the_loss(training: tinker.TrainingClient) -> None:
    info = training.get_info()
    assert info.model_data.model_name == BASE_MODEL and info.lora_rank == 8 and info.is_lora
    losses = train(training, 4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    passed = training.forward([datum(), datum(3)], "cross_entropy").result()
    assert [output["logprobs"].shape for output in passed.loss_fn_outputs] == [[5], [3]]
    total = -sum(sum(output["logprobs"].tolist()) for output in passed.loss_fn_outputs)
    assert math.isclose(passed.metrics["loss:sum"], total, rel_tol=1e-5)


def test_reordered_chunks_are_executed_in_order(training: tinker.TrainingClient) -> None:
    """The SDK sends the second chunk first, and the first chunk after the second is acknowledged."""
    data = [datum(1 + index % 7) for index in range(1088)]
    passed = training.forward_backward(data, "cross_entropy").result()
    assert [output["logprobs"].shape for output in passed.loss_fn_outputs] == [[1 + index % 7] for index in range(1088)]
    assert training.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics


def test_sampler_weights_are_frozen(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    train(training)
    path = training.save_weights_for_sampler("s1").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/s1"
    sampler = service.create_sampling_client(model_path=path).result()
    before = sampler.compute_logprobs(PROMPT).result()
    train(training, 3)
    assert sampler.compute_logprobs(PROMPT).result() == before
    unnamed = training.save_weights_and_get_sampling_client().result()
    after = unnamed.compute_logprobs(PROMPT).result()
    assert before[0] is None and after[0] is None and after[1:] != before[1:]


def test_samples_have_tokens_logprobs_and_ids(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("s1").result().path
    both = service.create_sampling_client(model_path=path, base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=4, stop=[], seed=3)
    sampled = both.sample(PROMPT, num_samples=2, sampling_params=params).result()
    assert [len(sequence.tokens) for sequence in sampled.sequences] == [4, 4]
    assert all(sequence.stop_reason == "length" for sequence in sampled.sequences)
    assert all(len(sequence.logprobs or ()) == 4 for sequence in sampled.sequences)
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    again = both.sample(PROMPT, num_samples=2, sampling_params=params).result()
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in sampled.sequences]

    topk = both.sample(
        PROMPT,
        num_samples=1,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    assert topk.prompt_logprobs is not None and len(topk.prompt_logprobs) == 3
    assert topk.topk_prompt_logprobs is not None and topk.topk_prompt_logprobs[0] is None
    assert all(row is not None and len(row) == 2 for row in topk.topk_prompt_logprobs[1:])


def test_stop_string_is_kept_and_ends_the_sample(service: tinker.ServiceClient, stack: LiveStack) -> None:
    base = service.create_sampling_client(base_model=BASE_MODEL).result()

    def greedy(stop: str | list[int]) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=24, stop=stop, temperature=0.0)
        return base.sample(PROMPT, num_samples=1, sampling_params=params).result().sequences[0]

    tokens = greedy([]).tokens
    stop = next(text for token in tokens[1:] if (text := stack.backend.text_of([token])).isascii())
    end = next(n for n in range(1, len(tokens) + 1) if stop in stack.backend.text_of(tokens[:n]))
    stopped = greedy(stop)
    assert stopped.stop_reason == "stop" and stopped.tokens == tokens[:end]


@both_backends
def test_training_resumes_from_a_checkpoint(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    train(training, 2)
    path = training.save_state("st1", ttl_seconds=3600).result().path
    at_save = loss(training)
    train(training)
    gone_on = loss(training)
    weights_only = service.create_training_client_from_state(path).result()
    assert weights_only.model_id.endswith(":train:1") and weights_only.get_info().lora_rank == 8
    assert loss(weights_only) == at_save

    whole = service.create_training_client_from_state_with_optimizer(path).result()
    train(whole)
    assert loss(whole) == gone_on
    training.load_state_with_optimizer(path).result()
    assert loss(training) == at_save


def test_failed_pass_fails_the_next_optim_step(training: tinker.TrainingClient) -> None:
    bad = training.forward_backward([datum(weights=np.full(5, np.nan, np.float32))], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.01))
    with pytest.raises(tinker.RequestFailedError, match=r"weights.*nan"):
        bad.result()
    with pytest.raises(tinker.RequestFailedError, match="nan"):
        step.result()
    assert train(training), "the next accumulation is whole again"


def test_failed_chunk_does_not_block_the_client(training: tinker.TrainingClient) -> None:
    data = [datum() for _ in range(1100)]
    data[0] = datum(weights=np.full(5, np.inf, np.float32))
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward(data, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError):
        training.optim_step(types.AdamParams()).result()


def test_many_concurrent_long_polls(service: tinker.ServiceClient) -> None:
    base = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=8, stop=[])
    samples = [base.sample(PROMPT, num_samples=1, sampling_params=params) for _ in range(200)]
    ids = {sample.result().sequences[0].sequence_id for sample in samples}
    assert len(ids) == 200


def test_concurrent_clients_are_independent(service: tinker.ServiceClient) -> None:
    def run(_: int) -> list[float]:
        return train(service.create_lora_training_client(BASE_MODEL, rank=4, seed=7).result(), 3)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
