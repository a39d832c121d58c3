"""Exports have the server's logprobs in peft and transformers, and imports have the logprobs of peft."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.cli import main
from tests.support.client_environments import TORCH, ClientEnvironment, PreparedEnvironment
from tests.support.live_stack import live_model

NAME = "Qwen/Qwen3-8B"
TOKENS = [3, 17, 201, 5, 90, 4, 44, 131, 9, 250, 77, 8]
SCRIPT = Path(__file__).parent / "reference" / "exported_weights.py"
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "stabilised": {"r": 3, "lora_alpha": 5, "target_modules": ["down_proj", "lm_head"], "use_rslora": True},
}


@dataclass(frozen=True)
class Comparison:
    """A tiny model, with log-probabilities of TOKENS from the server and from peft or transformers."""

    directory: Path
    server: dict[str, list[float]]
    peft: dict[str, np.ndarray]


def run_torch(environment: PreparedEnvironment, folder: Path, jobs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    outs = {name: folder / f"{name}.npy" for name in jobs}
    content = [{**job, "tokens": TOKENS, "out": str(outs[name])} for name, job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(content))
    environment.run(SCRIPT, folder / "jobs.json")
    return {name: np.load(out) for name, out in outs.items()}


def get_logprobs(client: tinker.SamplingClient) -> list[float]:
    return client.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]


def train(client: tinker.TrainingClient) -> tinker.TrainingClient:
    """Take two steps, large enough that every factor changes the result."""
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in range(2):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    return client


def import_train_export(folder: Path, data_dir: Path) -> dict[str, list[float]]:
    """Import the peft adapters, train an imported and a new adapter, and export both in every form."""
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
            outputs[name] = get_logprobs(service.create_sampling_client(model_path=path).result())
        start = imported["attention"].replace("/sampler_weights/", "/weights/")
        with pytest.raises(tinker.RequestFailedError, match=f"path '{start}': .*holds no optimizer"):
            service.create_training_client_from_state_with_optimizer(start).result()
        further = train(service.create_training_client_from_state(start).result())
        fresh = train(service.create_lora_training_client(NAME, rank=8, seed=1).result())

        for name, client in (("further", further), ("fresh", fresh)):
            outputs[name] = get_logprobs(client.save_weights_and_get_sampling_client().result())
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


# peft adapts fused experts with `target_parameters`, which the server refuses.
WITHOUT_EXPERTS = {"target_modules": ["q_proj", "lm_head"]}
PEFT_CONFIGS: Mapping[str, dict[str, Any]] = {
    "experts": WITHOUT_EXPERTS,
    "gpt-oss": WITHOUT_EXPERTS,
    # The server splits `in_proj_qkv` into three maps.
    "linear": {"target_modules": ["q_proj", "in_proj_qkv", "out_proj"]},
    "linear-experts": {"target_modules": ["q_proj", "in_proj_qkv", "lm_head"]},
    # The server splits `in_proj_qkvz` into four maps, head by head.
    "by-head": {"target_modules": ["q_proj", "in_proj_qkvz", "lm_head"]},
    "sigmoid": WITHOUT_EXPERTS,
    "latents": {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "lm_head"]},
    "mamba": WITHOUT_EXPERTS,
    "linear-experts/stabilised": {"target_modules": ["out_proj", "shared_expert.up_proj", "shared_expert.down_proj"]},
}
UNKNOWN_EXPERTS = ("gpt-oss", "linear-experts", "by-head", "latents", "sigmoid")
"""Models whose expert factors peft does not apply."""
REFUSED = "mamba"
"""The model whose adapters peft refuses, because fused kernels would bypass the adapter of `out_proj`."""
MODELS: Mapping[str, dict[str, Any]] = {
    "tied": {"tied_embeddings": True},
    "untied": {"tied_embeddings": False},
    "experts": {"tied_embeddings": False, "architecture": "Qwen3MoeForCausalLM"},
    "windows": {"tied_embeddings": False, "architecture": "MistralForCausalLM", "keys": {"sliding_window": 5}},
    "gpt-oss": {"tied_embeddings": False, "architecture": "GptOssForCausalLM", "keys": {"sliding_window": 5}},
    "sigmoid": {"tied_embeddings": False, "architecture": "Glm4MoeForCausalLM"},
    "latents": {"tied_embeddings": False, "architecture": "DeepseekV3ForCausalLM"},
    "output-norms": {"tied_embeddings": True, "architecture": "Gemma3ForCausalLM", "keys": {"sliding_window": 5}},
    "linear": {"tied_embeddings": False, "architecture": "Qwen3_5ForCausalLM", "num_layers": 4},
    "linear-experts": {"tied_embeddings": False, "architecture": "Qwen3_5MoeForCausalLM", "num_layers": 4},
    "mamba": {"architecture": "NemotronHForCausalLM"},
    "by-head": {
        "tied_embeddings": False,
        "architecture": "Qwen3NextForCausalLM",
        "num_layers": 4,
        "split_experts": True,
    },
}

IN_CI = ("tied", "untied", "experts", "latents")
"""Models that CI exports. `windows`, `sigmoid` and `linear` have the names of other models."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow, *([] if name in IN_CI else [pytest.mark.exhaustive])])
        for name in MODELS
    ],
)
def comparison(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    client_environment: Callable[[ClientEnvironment], PreparedEnvironment],
) -> Comparison:
    environment = client_environment(TORCH)
    folder = tmp_path_factory.mktemp(request.param)
    model = str(write_model(folder / "model", **{"num_layers": 2, **MODELS[request.param]}))

    making = {
        name: {"model": model, "make": str(folder / name), "config": config | changes}
        for name, config in ADAPTERS.items()
        for changes in [PEFT_CONFIGS.get(f"{request.param}/{name}", PEFT_CONFIGS.get(request.param, {}))]
    }
    expected = run_torch(environment, folder, making)
    data_dir = tmp_path_factory.mktemp("data")
    outputs = import_train_export(folder, data_dir)
    loading: dict[str, dict[str, Any]] = {"base": {"model": model}}

    for name in ("further", "fresh"):
        kinds = ("weights", "external_weights")
        if (request.param in UNKNOWN_EXPERTS and name == "fresh") or request.param == REFUSED:
            kinds = ()
        loading |= {
            f"{name}-{kind}": {"model": model, "adapter": str(folder / "adapters" / name / kind)} for kind in kinds
        }
        loading[f"{name}-merged"] = {"model": str(folder / "merged" / name)}
        # Downloads stack experts for the cookbook; tests/recipes/test_weights.py covers this
        # layout.
        if request.param == "untied" or (request.param == "tied" and name == "further"):
            loading[f"{name}-downloaded"] = {"model": model, "adapter": str(folder / "external" / name)}

    expected |= run_torch(environment, folder, loading)
    return Comparison(folder, outputs, expected)


def test_imported_adapters_keep_their_logprobs(comparison: Comparison) -> None:
    for name in ADAPTERS:
        assert np.abs(comparison.peft[name] - comparison.peft["base"]).max() > 0.01
        np.testing.assert_allclose(comparison.server[name], comparison.peft[name], atol=1e-5)


def test_exported_weights_keep_the_logprobs_of_the_server(comparison: Comparison) -> None:
    """Covers adapters of training checkpoints and external weights, downloads, and merged models."""
    for name, found in comparison.peft.items():
        made, _, form = name.partition("-")
        if form:
            assert np.abs(found - comparison.peft["base"]).max() > 0.01
            np.testing.assert_allclose(comparison.server[made], found, atol=1e-5, err_msg=name)


def test_merging_unties_embeddings_only_if_the_unembedding_was_trained(comparison: Comparison) -> None:
    base = json.loads((comparison.directory / "model" / "config.json").read_text())["tie_word_embeddings"]
    for name, trained in (("fresh", True), ("further", False)):
        config = json.loads((comparison.directory / "merged" / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is (base and not trained)
