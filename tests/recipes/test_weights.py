"""Models that the cookbook builds from downloaded checkpoints have the server's logprobs."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file, save_file

from skyrl_tx.models import make_adapter_format
from skyrl_tx.models.nemotron_h import NEMOTRON_H
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterFiles, read_adapter
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS
from tests.support.client_environments import COOKBOOK
from tests.support.live_stack import live_model

EXPERT_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "intermediate_size": 24,
    "tie_word_embeddings": False,
}
pytestmark = pytest.mark.slow
NAME = "Qwen/Qwen3-8B"
TOKENS = [3, 17, 201, 5, 90, 4, 44, 131, 9, 250, 77, 8]


# With tied embeddings, the cookbook also adapts the input embedding, so that case trains no
# unembedding.
@pytest.mark.parametrize(
    ("architecture", "tied", "saves"),
    [
        ("Qwen3ForCausalLM", False, ("save_state", "save_weights_external")),
        ("Qwen3MoeForCausalLM", False, ("save_weights_external",)),
        *(
            pytest.param(architecture, is_tied, ("save_weights_external",), marks=pytest.mark.exhaustive)
            for architecture, is_tied in (
                ("Qwen3ForCausalLM", True),
                ("GptOssForCausalLM", False),
                ("NemotronHForCausalLM", False),
            )
        ),
    ],
)
def test_models_built_by_the_cookbook_give_the_logprobs_of_the_server(
    tmp_path: Path,
    client_environment,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tied: bool,
    saves: tuple[str, ...],
) -> None:
    """Training checkpoints are downloaded through a temporary encrypted export, external weights directly."""
    environment = client_environment(COOKBOOK)
    variables = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = write_model(tmp_path / "model", architecture, tied_embeddings=tied)
    with live_model(model, NAME, tmp_path / "data") as url, tinker.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(NAME, rank=8, seed=1, train_unembed=not tied).result()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
        )
        for _ in range(2):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()

        folders: dict[str, Path] = {}
        for save in saves:
            folders[getattr(client, save)("trained").result().path] = tmp_path / save
            (tmp_path / save).mkdir()

        sampler = client.save_weights_and_get_sampling_client().result()
        server = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]
        script = Path(__file__).parent / "use_weights.py"
        variables |= {"TINKER_BASE_URL": url, "HF_HOME": str(tmp_path / "hub")}
        replace(environment, variables=variables).run(
            script, model, ",".join(map(str, TOKENS)), *chain(*folders.items())
        )
        left = tinker.RestClient(base_url=url).list_user_checkpoints().result().checkpoints

    assert sorted(checkpoint.tinker_path for checkpoint in left) == sorted(folders)
    for folder in folders.values():
        output = json.loads((folder / "output.json").read_text())
        assert np.abs(np.subtract(output["merged"], output["base"])).max() > 0.01
        if architecture == NEMOTRON_H.architecture:
            assert_equal_factors(model, folder)
        elif architecture != "GptOssForCausalLM":  # peft does not apply factors of its experts
            np.testing.assert_allclose(output["lora"], server, atol=1e-5)
        np.testing.assert_allclose(output["merged"], server, atol=1e-5)


def assert_equal_factors(model: Path, folder: Path) -> None:
    """Check that the cookbook's PEFT adapter equals ours, with the maps of `in_proj` as one module."""
    config = NEMOTRON_H.config_from_hf(json.loads((model / "config.json").read_text()))
    fused = make_adapter_format(config, NEMOTRON_H.weights, NAME).fused
    ours, theirs = read_adapter(folder / "adapter").to_layout("peft", fused), read_adapter(folder / "lora")
    assert ours.factors.keys() == theirs.factors.keys() and ours.scale == theirs.scale
    assert theirs.config["rank_pattern"] == ours.config["rank_pattern"] == {"in_proj": 16}
    for module, factors in ours.factors.items():
        for found, wanted in zip(factors, theirs.factors[module], strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=module)


def test_merged_experts_equal_those_merged_by_the_cookbook(tmp_path: Path, client_environment) -> None:
    """The stacked layout and one module per expert merge to the same weights.

    The serving adapter has our `peft` format.
    """
    generator = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    base, source, folder, ours = (tmp_path / name for name in ("base", "source", "folder", "ours"))
    for directory in (base, source, folder, ours):
        directory.mkdir()
    experts = {
        f"model.layers.0.mlp.experts.{index}.{leaf}": shape
        for index in range(4)
        for leaf, shape in (("gate_proj", (24, 16)), ("up_proj", (24, 16)), ("down_proj", (16, 24)))
    }
    head = {"model.embed_tokens.weight": random(64, 16), "lm_head.weight": random(64, 16)}
    (base / "config.json").write_text(json.dumps(EXPERT_CONFIG))

    save_file(head | {f"{name}.weight": random(*shape) for name, shape in experts.items()}, base / "model.safetensors")
    factors = {name: (random(2, shape[1]), random(shape[0], 2)) for name, shape in experts.items()}
    factors["lm_head"] = random(2, 16), random(64, 2)
    adapter = AdapterFiles(config={"peft_type": "LORA", "r": 2, "lora_alpha": 32}, factors=factors)
    adapter.to_layout("cookbook").write(source)
    script = Path(__file__).parent / "build_experts.py"
    client_environment(COOKBOOK).run(script, base, source, folder)
    merge_adapter(base, DENSE_WEIGHTS, adapter, ours)
    theirs, mine = (load_file(directory / "model.safetensors") for directory in (folder / "merged", ours))
    assert theirs.keys() == mine.keys()

    for name, array in mine.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert read_adapter(folder / "lora").factors.keys() == adapter.to_layout("peft").factors.keys()
