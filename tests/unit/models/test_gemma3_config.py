"""The config.json of Gemma 3: blocks with windows and two ropes, and keys that are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.layers.parameter import flatten
from skyrl_tx.layers.rope import Rope
from skyrl_tx.models import ModelConfig, UnsupportedModel, describe_params
from skyrl_tx.models.family import get_text_config
from skyrl_tx.models.gemma3 import GEMMA3
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.feed_forward import Dense

FOLDER = Path(__file__).parent / "hub_configs"


def read_content(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def read(name: str, **changes: Any) -> ModelConfig:
    """Read a config with changes, which apply to the nested text model if there is one."""
    content = read_content(name)
    if "text_config" in content:
        return GEMMA3.config_from_hf({**content, "text_config": {**content["text_config"], **changes}})
    return GEMMA3.config_from_hf({**content, **changes})


PUBLISHED = {
    "gemma-3-270m": (268_098_176, 18, None),
    "gemma-3-1b-it": (999_885_952, 26, None),
    "gemma-3-4b-it": (4_300_079_472, 34, 8.0),
    "gemma-3-12b-it": (12_187_325_040, 48, 8.0),
    "gemma-3-27b-it": (27_432_406_640, 62, 8.0),
}
"""Published numbers of parameters, including images, and of layers.

The last entry is the rope factor of layers without a window, or None.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_sixth_layer_of_gemma_3_is_without_a_window(name: str) -> None:
    (_, num_layers, factor), config = PUBLISHED[name], read(name)
    window = get_text_config(read_content(name))["sliding_window"]
    mixers = [block.mixer for block in config.blocks]
    windows = [mixer.window for mixer in mixers if isinstance(mixer, Attention)]

    assert windows == ([window] * 5 + [None]) * (num_layers // 6) + [window] * (num_layers % 6)
    assert [len(group.stacks) for group in config.groups] == [6, 1][: 1 + (num_layers % 6 > 0)]
    assert config.scales_embeddings and config.tied_embeddings
    assert all(block.has_output_norms for block in config.blocks)

    for block in config.blocks:
        assert isinstance(block.mixer, Attention) and isinstance(block.feed_forward, Dense)
        assert block.mixer.norm_epsilon == 1e-6 and block.feed_forward.activation == "gelu_tanh"
        whole = Rope(1e6) if factor is None else Rope(1e6, "linear", factor=factor)
        assert block.mixer.rope == (whole if block.mixer.window is None else Rope(1e4))
        scale = block.mixer.query_factor / math.sqrt(block.mixer.head_dim)
        assert scale == pytest.approx((168 if "27b" in name else 256) ** -0.5, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_gemma_3_has_its_published_number_of_parameters(name: str) -> None:
    config = read(name)
    found = sum(math.prod(leaf.shape) for leaf in flatten(describe_params(config)).values())
    if vision := read_content(name).get("vision_config"):
        size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
        layer = 4 * (size + 1) * size + (size + 1) * width + (width + 1) * size + 2 * 2 * size
        found += (3 * patch**2 + 1) * size + (vision["image_size"] // patch) ** 2 * size + 2 * size
        found += vision["num_hidden_layers"] * layer + size * config.hidden_size + size  # the last two project images
    assert found == PUBLISHED[name][0]


def test_what_gemma_3_leaves_out_has_its_default() -> None:
    content = read_content("gemma-3-1b-it")
    for key in (
        *("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_activation", "rms_norm_eps"),
        *("query_pre_attn_scalar", "rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern"),
    ):
        del content[key]
    assert GEMMA3.config_from_hf(content) == read("gemma-3-1b-it")


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 1e6}])
def test_ropes_of_gemma_3_by_kind_equal_those_of_older_files(theta: dict[str, Any]) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, **theta},
        "sliding_attention": {"rope_type": "default"},
    }
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    changes = {"rope_scaling": None, "rope_parameters": ropes, "layer_types": kinds}
    assert read("gemma-3-4b-it", **changes) == read("gemma-3-4b-it")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar = '256'"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({"layer_types": ["full_attention"] * 25}, "layer_types = .* 26 of"),
        ({"layer_types": ["chunked_attention"] * 26}, "chunked_attention"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_scaling of type 'proportional'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters = .*rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "odd": 1}}}, "odd"),
        (
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters = .*one of each",
        ),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read("gemma-3-1b-it", **changes)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_keys_of_the_nested_text_model_are_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{key} = 30\.0; supported: None"):
        read("gemma-3-4b-it", **{key: 30.0})
