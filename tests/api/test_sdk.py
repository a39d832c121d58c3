"""The unmodified SDK against a live server, in the order of a first run."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_api import Server
from tests.support.scripted_engine import ScriptedEngine

BASE_MODEL = "Qwen/Qwen3-8B"


@pytest.fixture
def service(server: Server, engine: ScriptedEngine) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, user_metadata={"a": "b"}) as client:
        yield client


def datum(length: int = 5) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={
            "target_tokens": np.arange(1, length + 1, dtype=np.int64),
            "weights": np.ones(length, dtype=np.float32),
        },
    )


def test_complete_run(service: tinker.ServiceClient, engine: ScriptedEngine) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result()
    passed = training.forward_backward([datum(), datum(3)], "cross_entropy").result()
    assert [output["logprobs"].tolist() for output in passed.loss_fn_outputs] == [[-0.5] * 5, [-0.5] * 3]
    assert passed.metrics == {"loss:sum": 4.0}
    step = training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    assert step.metrics == {"unclipped_grad_l2:mean": 1.0}
    assert training.forward([datum()], "cross_entropy").result().metrics == {"loss:sum": 2.5}
    named = training.save_weights_for_sampler("s1").result().path
    assert named == f"tinker://{training.model_id}/sampler_weights/s1"

    sampling = service.create_sampling_client(model_path=named).result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=4, stop=["\n"])
    sampled = sampling.sample(prompt, num_samples=2, sampling_params=params).result()
    assert [sequence.tokens for sequence in sampled.sequences] == [[0, 1, 2, 3]] * 2
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    assert sampling.compute_logprobs(prompt).result() == [None, -2.0, -2.0]
    assert len(engine.seen) == 7
