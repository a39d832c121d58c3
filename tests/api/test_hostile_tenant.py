"""A hostile tenant does not change the results of another tenant, compared bitwise."""

import math
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.store import checkpoints
from tests.support.live_api import Server
from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL
from tests.support.live_stack import VOCAB_SIZE, LiveStack

STEPS = 8
pytestmark = pytest.mark.filterwarnings(r"ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")


def datum(tokens: list[int], name: str, values: list[float], **more: list[float]) -> types.Datum:
    inputs = {key: np.array(value, np.float32) for key, value in {name: values, **more}.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), **inputs},
    )


def run(stack: LiveStack, name: str, meanwhile: Callable[[], None]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train a new model and call `meanwhile` before each request.

    Returns the losses and the saved arrays.
    """
    draw = np.random.default_rng(5)
    losses: list[float] = []

    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
        for _ in range(STEPS):
            rows = [draw.integers(1, VOCAB_SIZE, size=draw.integers(4, 20)).tolist() for _ in range(2)]
            data = [datum(row, "weights", [1.0] * (len(row) - 1)) for row in rows]
            meanwhile()
            passed = client.forward_backward(data, "cross_entropy")
            meanwhile()
            client.optim_step(types.AdamParams(learning_rate=0.02, weight_decay=0.1)).result()
            losses.append(passed.result().metrics["loss:sum"])
        path = CheckpointPath.parse(client.save_state(name).result().path)

    row = stack.server.store.read(lambda tx: checkpoints.get(tx, path, time.time()))
    assert row is not None
    folder = LocalArtifacts(stack.server.settings.data_dir / "artifacts").open(row.artifact_id).path
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    return losses, {f"{file}: {key}": array for file, arrays in files.items() for key, array in arrays.items()}


def delete(server: Server, path: str) -> Any:
    return tinker.RestClient(base_url=server.url, api_key="tml-local").delete_checkpoint_from_tinker_path(path)


def unload(server: Server, model_id: str) -> None:
    """Unload a model, as SDKs up to 0.25 do."""
    request_id = server.post("unload_model", model_id=model_id).json()["request_id"]
    while (answer := server.post("retrieve_future", request_id=request_id)).status_code == HTTPStatus.REQUEST_TIMEOUT:
        pass
    assert answer.json() == {"type": "unload_model", "model_id": model_id}


def hostile_calls(service: tinker.ServiceClient, server: Server) -> Iterator[Callable[[], Any]]:
    """Yield calls with harmful input. Each call returns a future or None."""
    tokens = [3, 4, 5, 6]
    far = datum(tokens, "advantages", [1e30, -1e30, 1e38], logprobs=[-1e30, 0.0, 1e30])
    absurd = types.AdamParams(learning_rate=1e30, weight_decay=1.0)
    client = service.create_lora_training_client(BASE_MODEL, rank=16, seed=1).result()

    yield lambda: client.forward_backward([datum(tokens, "weights", [math.nan, math.inf, -1e38])], "cross_entropy")
    yield lambda: client.forward_backward([datum([3, VOCAB_SIZE + 7, 9], "weights", [1.0, 1.0])], "cross_entropy")
    yield lambda: client.optim_step(absurd)
    yield lambda: client.forward_backward([far], "ppo")
    yield lambda: client.forward_backward([far], "importance_sampling")
    yield lambda: client.optim_step(absurd)
    yield lambda: client.forward_backward([datum(tokens, "weights", [1e30, 1.0, 1.0])], "cross_entropy")
    yield lambda: client.optim_step(types.AdamParams(learning_rate=1e30, weight_decay=1.0, grad_clip_norm=1e-30))
    yield lambda: client.save_state("broken")

    yield (
        lambda: (
            client.save_weights_and_get_sampling_client()
            .result()
            .sample(
                types.ModelInput.from_ints(tokens),
                num_samples=2,
                sampling_params=types.SamplingParams(max_tokens=4, stop=[]),
            )
        )
    )

    yield lambda: client.load_state_with_optimizer(f"tinker://{client.model_id}/weights/broken")
    yield lambda: client.load_state("tinker://unknown:train:0/weights/none")
    yield lambda: delete(server, client.save_state("deleted").result().path)
    yield lambda: delete(server, client.save_weights_for_sampler("deleted").result().path)
    yield lambda: unload(server, client.model_id)
    yield lambda: client.forward_backward([datum(tokens, "weights", [1.0, 1.0, 1.0])], "cross_entropy")


def test_hostile_tenant_does_not_change_results_of_another(stack: LiveStack) -> None:
    losses, arrays = run(stack, "alone", lambda: None)
    outcomes: list[str] = []

    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        started: list[Any] = []
        attacks = hostile_calls(service, stack.server)
        concurrent = run(stack, "concurrent", lambda: started.append(next(attacks)()))
        for future in started:
            try:
                if future is not None:
                    future.result()
                outcomes.append("done")
            except tinker.RequestFailedError as error:
                outcomes.append(str(error))

    assert len(outcomes) == 2 * STEPS and next(attacks, None) is None, "every hostile call was made and answered"
    assert "done" in outcomes and any("tok" in outcome for outcome in outcomes), outcomes
    assert outcomes[-4:-1] == ["done"] * 3 and "unload" in outcomes[-1], "two checkpoints and the model were deleted"
    assert concurrent[0] == losses
    assert len(arrays) > 2 and arrays.keys() == concurrent[1].keys()
    for name, array in arrays.items():
        assert array.tobytes() == concurrent[1][name].tobytes(), name
