"""The config.json of Nemotron-H is read into layers with one part each."""

import math
from typing import Any

import pytest

from skyrl_tx.layers.experts import Routing
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import ModelConfig, UnsupportedModel, describe_params, find_family
from skyrl_tx.models.config import Block
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.feed_forward import Dense, Mixture
from skyrl_tx.models.parts.mamba import Mamba
from tests.unit.models.test_hub_configs import read_content

NANO, LIGHTNING, SUPER = "Nemotron-3-Nano-30B-A3B", "Nemotron-3.5-Lightning-30B-A3B", "Nemotron-3-Super-120B-A12B"
LETTERS = {Mamba: "M", Attention: "*", Mixture: "E", Dense: "-"}


def read(name: str, *, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    content = {key: value for key, value in read_content(name).items() if key not in without} | changes
    return find_family(content).config_from_hf(content)


def get_letter(block: Block) -> str:
    (part,) = block.parts
    return LETTERS[type(part)]


@pytest.mark.parametrize(("name", "billions"), [(NANO, 31.58), (LIGHTNING, 31.58), (SUPER, 120.67)])
def test_layers_have_one_part_each(name: str, billions: float) -> None:
    config = read(name)
    pattern = read_content(SUPER if name == SUPER else NANO)["hybrid_override_pattern"]
    assert "".join(map(get_letter, config.blocks)) == pattern
    leaves = flatten(describe_params(config)).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(billions * 1e9, rel=1e-3)


def test_parts_of_super() -> None:
    blocks = read(SUPER).blocks
    mamba, mixture, attention = blocks[0].mixer, blocks[1].feed_forward, blocks[7].mixer
    assert isinstance(mamba, Mamba) and isinstance(mixture, Mixture) and isinstance(attention, Attention)
    assert attention.rope is None and attention.rotation is None
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 2, 128)
    assert mamba.describe_cache().fixed["state"].shape == (8, 16, 128, 64) and mamba.least_step == 0
    assert mixture.routing == Routing(num_experts=512, num_chosen=22, renormalizes=True, scores="sigmoid", factor=5.0)
    assert (
        not mixture.is_gated and mixture.has_correction and (mixture.latent_size, mixture.shared_size) == (1024, 5376)
    )


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_layers_may_be_listed_under_old_and_new_names(key: str) -> None:
    new = {"mamba": "linear_attention", "attention": "full_attention"}
    listed = read_content(LIGHTNING)["layers_block_type"]
    given = {key: [new.get(kind, kind) for kind in listed]}
    assert read(NANO, without=("hybrid_override_pattern",), **given) == read(NANO) == read(LIGHTNING)


def test_old_names_of_keys_are_read() -> None:
    old = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_dt_limit": [0.5, None], "mamba_conv_bias": False}
    mamba = read(NANO, **old).blocks[0].mixer
    assert isinstance(mamba, Mamba)
    assert (mamba.num_groups, mamba.conv_width, mamba.least_step, mamba.has_conv_bias) == (4, 3, 0.5, False)


def test_dense_layers_square_what_is_above_0() -> None:
    blocks = read(NANO, hybrid_override_pattern="M-*-", num_hidden_layers=4).blocks
    assert blocks[1] == Block(None, Dense(hidden_size=2688, mlp_size=1856, is_gated=False)) == blocks[3]


def test_what_is_left_out_has_its_default() -> None:
    defaults = ("head_dim", "conv_kernel", "n_groups", "ssm_state_size", "use_conv_bias", "time_step_limit")
    assert read(NANO, without=(*defaults, "n_group", "topk_group", "norm_topk_prob", "layer_norm_epsilon")) == read(
        NANO
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ({"use_bias": True}, "use_bias = True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit = \[0.0, 1.0\]"),
        ({"hybrid_override_pattern": None}, r"layers_block_type = \(\) of 52 layers"),
        ({"hybrid_override_pattern": "ME"}, "'ME' of 52 layers"),
        ({"hybrid_override_pattern": "MX" * 26}, "MXMX.* of 52 layers"),
        ({"mamba_num_heads": 60}, "mamba_num_heads = 60; it must be a multiple of n_groups = 8"),
        ({"moe_latent_size": 0}, "moe_latent_size = 0"),
        ({"moe_shared_expert_intermediate_size": None}, "moe_shared_expert_intermediate_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "modelopt"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(NANO, **changes)
