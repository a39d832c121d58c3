"""The unmodified SDK against the API, the store and each backend: exact resumption, and passes that fail.

`test_conformance.py` makes a complete run.
"""

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_stack import both_backends

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
