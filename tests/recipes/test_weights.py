"""The cookbook downloads our checkpoints, and what it builds of them computes what the server did."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker

from skyrl_tx.testing.client_environments import COOKBOOK
from skyrl_tx.testing.live_house import live_model
from skyrl_tx.testing.tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
NAME = "Qwen/Qwen3-8B"
TOKENS = [3, 17, 201, 5, 90, 4, 44, 131, 9, 250, 77, 8]


# The cookbook takes the unembedding of a tied model for its input embedding: those are merged without.
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("save", ["save_state", "save_weights_external"])
def test_what_the_cookbook_builds_computes_what_the_server_did(
    tmp_path: Path, client_environment, monkeypatch: pytest.MonkeyPatch, tied: bool, save: str
) -> None:
    """A training checkpoint travels encrypted, through a temporary export; external weights as they are."""
    environment = client_environment(COOKBOOK)
    variables = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = write_model(tmp_path / "model", tied_embeddings=tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    with live_model(model, NAME, tmp_path / "data") as url, tinker.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(NAME, rank=8, seed=1, train_unembed=not tied).result()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
        )
        for _ in range(2):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        path = getattr(client, save)("travelling").result().path
        sampler = client.save_weights_and_get_sampling_client().result()
        server = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]
        script = Path(__file__).parent / "use_weights.py"
        variables |= {"TINKER_BASE_URL": url, "HF_HOME": str(tmp_path / "hub")}
        replace(environment, variables=variables).run(script, model, path, folder, *map(str, TOKENS))
        left = tinker.RestClient(base_url=url).list_user_checkpoints().result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in left] == [path]
    said = json.loads((folder / "said.json").read_text())
    assert np.abs(np.subtract(said["lora"], said["base"])).max() > 0.01
    np.testing.assert_allclose(said["lora"], server, atol=1e-5)
    np.testing.assert_allclose(said["merged"], server, atol=1e-5)
