"""Weights that travel: what the server says of a checkpoint, peft and transformers say of its export; and back."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from skyrl_tx.cli import main
from skyrl_tx.testing.client_environments import TORCH, ClientEnvironment, PreparedEnvironment
from skyrl_tx.testing.live_house import live_model
from skyrl_tx.testing.tiny_models import write_model

NAME = "Qwen/Qwen3-8B"
TOKENS = [3, 17, 201, 5, 90, 4, 44, 131, 9, 250, 77, 8]
SCRIPT = Path(__file__).parent / "reference" / "exported_weights.py"
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "stabilised": {"r": 3, "lora_alpha": 5, "target_modules": ["down_proj", "lm_head"], "use_rslora": True},
}


@dataclass(frozen=True)
class Traveller:
    """A tiny model, and log-probabilities of TOKENS by whoever computed them."""

    directory: Path
    server: dict[str, list[float]]
    peft: dict[str, np.ndarray]


def run_torch(environment: PreparedEnvironment, folder: Path, jobs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    outs = {name: folder / f"{name}.npy" for name in jobs}
    told = [{**job, "tokens": TOKENS, "out": str(outs[name])} for name, job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(told))
    environment.run(SCRIPT, folder / "jobs.json")
    return {name: np.load(out) for name, out in outs.items()}


def said(client: tinker.SamplingClient) -> list[float]:
    return client.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]


def train(client: tinker.TrainingClient) -> tinker.TrainingClient:
    """Two steps large enough that every factor counts."""
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in range(2):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    return client


def travel(folder: Path, data_dir: Path) -> dict[str, list[float]]:
    """Bring the outside adapters in, train on one and on a fresh one, and take all out in every form."""
    outputs: dict[str, list[float]] = {}
    with live_model(folder / "model", NAME, data_dir) as url, tinker.ServiceClient(base_url=url) as service:
        for name in ADAPTERS:
            assert main(["import", str(folder / name), "--name", name, "--data-dir", str(data_dir)]) == 0
        rest = tinker.RestClient(base_url=url)
        imported = {
            path.rpartition("/")[2]: path
            for checkpoint in rest.list_user_checkpoints().result().checkpoints
            if "/sampler_weights/" in (path := checkpoint.tinker_path)
        }
        assert set(imported) == set(ADAPTERS)
        for name, path in imported.items():
            outputs[name] = said(service.create_sampling_client(model_path=path).result())
        start = imported["attention"].replace("/sampler_weights/", "/weights/")
        with pytest.raises(tinker.RequestFailedError, match=f"path '{start}': .*holds no optimizer"):
            service.create_training_client_from_state_with_optimizer(start).result()
        further = train(service.create_training_client_from_state(start).result())
        fresh = train(service.create_lora_training_client(NAME, rank=8, seed=1).result())
        for name, client in (("further", further), ("fresh", fresh)):
            outputs[name] = said(client.save_weights_and_get_sampling_client().result())
            external = client.save_weights_external(name).result().path
            (folder / "external" / name).mkdir(parents=True)
            for file, signed in rest.get_external_weights_urls(external).result().urls.items():
                urllib.request.urlretrieve(signed, folder / "external" / name / file)
            for path in (client.save_state(name).result().path, external):
                out = folder / "adapters" / name / path.split("/")[3]
                assert main(["export", path, str(out), "--data-dir", str(data_dir)]) == 0
            sampler = client.save_weights_for_sampler(name).result().path
            merged = str(folder / "merged" / name)
            assert main(["export", sampler, merged, "--merge", "--data-dir", str(data_dir)]) == 0
    return outputs


# Of fused experts peft makes one map of many modules, "target_parameters", which we refuse by name.
OF_PEFT: Mapping[str, dict[str, Any]] = {"experts": {"target_modules": ["q_proj", "lm_head"]}}
MODELS: Mapping[str, dict[str, Any]] = {
    "tied": {"tied_embeddings": True},
    "untied": {"tied_embeddings": False},
    "experts": {"tied_embeddings": False, "architecture": "Qwen3MoeForCausalLM"},
}


@pytest.fixture(
    scope="module",
    params=["tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("untied", "experts"))],
)
def traveller(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    client_environment: Callable[[ClientEnvironment], PreparedEnvironment],
) -> Traveller:
    environment = client_environment(TORCH)
    folder = tmp_path_factory.mktemp(request.param)
    model = str(write_model(folder / "model", num_layers=2, **MODELS[request.param]))
    making = {
        name: {"model": model, "make": str(folder / name), "config": config | OF_PEFT.get(request.param, {})}
        for name, config in ADAPTERS.items()
    }
    expected = run_torch(environment, folder, making)
    data_dir = tmp_path_factory.mktemp("data")
    outputs = travel(folder, data_dir)
    loading: dict[str, dict[str, Any]] = {"base": {"model": model}}
    for name in ("further", "fresh"):
        loading |= {
            f"{name}-{kind}": {"model": model, "adapter": str(folder / "adapters" / name / kind)}
            for kind in ("weights", "external_weights")
        }
        loading[f"{name}-merged"] = {"model": str(folder / "merged" / name)}
        # As downloaded experts are stacked, for the cookbook; see tests/recipes/test_weights.py.
        if request.param == "untied" or (request.param == "tied" and name == "further"):
            loading[f"{name}-downloaded"] = {"model": model, "adapter": str(folder / "external" / name)}
    expected |= run_torch(environment, folder, loading)
    return Traveller(folder, outputs, expected)


def test_what_is_imported_says_what_it_said(traveller: Traveller) -> None:
    for name in ADAPTERS:
        assert np.abs(traveller.peft[name] - traveller.peft["base"]).max() > 0.01
        np.testing.assert_allclose(traveller.server[name], traveller.peft[name], atol=1e-5)


def test_what_is_exported_says_what_the_server_said(traveller: Traveller) -> None:
    """As an adapter of a training checkpoint or of external weights, as downloaded, and merged into the base."""
    for name, found in traveller.peft.items():
        made, _, form = name.partition("-")
        if form:
            assert np.abs(found - traveller.peft["base"]).max() > 0.01
            np.testing.assert_allclose(traveller.server[made], found, atol=1e-5, err_msg=name)


def test_a_merged_model_stands_alone(traveller: Traveller) -> None:
    """A tied head that was trained is a head of its own afterwards; one that was not stays tied."""
    base = json.loads((traveller.directory / "model" / "config.json").read_text())["tie_word_embeddings"]
    for name, trained in (("fresh", True), ("further", False)):
        config = json.loads((traveller.directory / "merged" / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is (base and not trained)
