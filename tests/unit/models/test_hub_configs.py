"""The config.json of public checkpoints is read into the blocks that their families publish."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.models import ModelConfig, UnsupportedModel, find_family, targets
from skyrl_tx.models.parts.attention import Attention

FOLDER = Path(__file__).parent / "hub_configs"
"""Files as published, less what no model reads."""


def content_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def read(name: str, **changes: Any) -> ModelConfig:
    content = {**content_of(name), **changes}
    return find_family(content).config_from_hf(content)


def windows_of(config: ModelConfig) -> list[int | None]:
    mixers = [block.mixer for block in config.blocks]
    return [mixer.window for mixer in mixers if isinstance(mixer, Attention)]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_a_public_config_is_accepted(name: str) -> None:
    config, content = read(name), content_of(name)
    assert config.num_layers == content["num_hidden_layers"]
    assert targets(config)["unembed"].outputs == content["vocab_size"]


@pytest.mark.parametrize(
    ("name", "window"),
    [("Mistral-7B-v0.1", 4096), ("Mistral-7B-v0.3", None), ("Ministral-8B-Instruct-2410", 32768)],
)
def test_layers_of_mistral_have_one_window_or_none(name: str, window: int | None) -> None:
    config = read(name)
    assert windows_of(config) == [window] * config.num_layers and len(config.stacks) == 1


def test_heads_of_mistral_may_be_narrower_than_its_hidden_size() -> None:
    mixer = read("Mistral-Nemo-Base-2407").blocks[0].mixer
    assert isinstance(mixer, Attention) and (mixer.hidden_size, mixer.num_heads * mixer.head_dim) == (5120, 4096)


def test_a_window_that_mistral_does_not_name_has_its_default() -> None:
    content = content_of("Mistral-7B-v0.3")
    del content["sliding_window"]
    assert set(windows_of(find_family(content).config_from_hf(content))) == {4096}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window = 0"),
        ("Mistral-7B-v0.1", {"attention_bias": True}, "attention_bias = True"),
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
        ("Mistral-7B-v0.1", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(name, **changes)
