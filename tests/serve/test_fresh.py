"""`serve --fresh` abandons the models of a data directory and keeps its checkpoints."""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_server import LiveServer, ServerFailed

FAKE = ("--base-model", "fake", "--backend", "fake")
OTHER_BASE = (*FAKE, "--backend-config.vocab-size", "300")
FRESH = re.compile(r"(fresh start: .*)")


def datum() -> types.Datum:
    targets = np.array([9, 2, 7, 0], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints([5, 9, 2, 7]), loss_fn_inputs={"target_tokens": targets})


def logprobs(training: tinker.TrainingClient) -> list[float]:
    return list(training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


def get_failure(url: str, model_id: str) -> str:
    """Send an optim_step of a model and return the error."""
    with httpx.Client(base_url=f"{url}/api/v1", timeout=60) as client:
        asked = client.post("/optim_step", json={"model_id": model_id, "adam_params": {}}).json()
        answer = client.post("/retrieve_future", json={"request_id": asked["request_id"]}).json()
        assert answer["category"] == "user"
        return answer["error"]


@pytest.mark.slow
def test_fresh_start_reports_abandoned_models_and_keeps_checkpoints(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with LiveServer(data_dir, flags=FAKE) as server, tinker.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client("fake", rank=4, seed=1).result()
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        saved, expected = training.save_state("kept").result().path, logprobs(training)
        model_id = training.model_id
    assert "fresh start" not in server.log

    with pytest.raises(ServerFailed, match=rf"1 models in this data directory, for example {model_id}.*add --fresh"):
        LiveServer(data_dir, flags=OTHER_BASE)
    with LiveServer(data_dir, flags=(*OTHER_BASE, "--fresh")) as server:
        lines = server.wait_for(FRESH)
        assert lines.startswith(f"fresh start: 1 models in training are abandoned ({model_id}); 1 named checkpoints (")
        assert lines.endswith(" MB) remain and can be loaded")

    with LiveServer(data_dir, flags=(*FAKE, "--fresh")) as server, tinker.ServiceClient(base_url=server.url) as service:
        assert server.wait_for(FRESH).startswith("fresh start: 0 models in training are abandoned; 1 named")
        assert "was left behind by a start with --fresh" in get_failure(server.url, model_id)
        assert logprobs(service.create_training_client_from_state(saved).result()) == expected
