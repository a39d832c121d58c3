"""The config.json of public checkpoints is read into the blocks that their families publish."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from skyrl_tx.layers.experts import Clamp, Routing
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models import (
    ModelConfig,
    UnsupportedModel,
    cut_pairs,
    describe_adapter,
    describe_params,
    find_family,
    get_targets,
    join_pairs,
)
from skyrl_tx.models.family import get_text_config
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.delta_net import DeltaNet
from skyrl_tx.models.parts.feed_forward import Dense, Mixture
from skyrl_tx.models.parts.latent_attention import LatentAttention

MOONLIGHT = "Moonlight-16B-A3B"
FOLDER = Path(__file__).parent / "hub_configs"
"""Files as published, without keys that no model reads.

For Qwen3.5, DeepSeek and its relatives, and Nemotron, only the sizes are the published ones.
"""


def read_content(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def read(name: str, **changes: Any) -> ModelConfig:
    content = {**read_content(name), **changes}
    return find_family(content).config_from_hf(content)


def read_text(name: str, **changes: Any) -> ModelConfig:
    """Read the config of a model with images, with changes to its nested text model."""
    content = read_content(name)
    return read(name, text_config={**content["text_config"], **changes})


def list_windows(config: ModelConfig) -> list[int | None]:
    mixers = [block.mixer for block in config.blocks]
    return [mixer.window for mixer in mixers if isinstance(mixer, Attention)]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_a_public_config_is_accepted(name: str) -> None:
    config, content = read(name), get_text_config(read_content(name))
    content = {**find_family(read_content(name)).defaults, **content}
    assert config.num_layers == content["num_hidden_layers"]
    assert get_targets(config)["unembed"].outputs == content["vocab_size"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_adapters_are_cut_for_the_loops_over_layers_and_joined_again(name: str) -> None:
    config = read(name)
    weights = {
        target: jax.tree.map(lambda leaf: np.arange(leaf.shape[0])[:, None, None], pair)
        for target, pair in describe_adapter(config, 8).weights.items()
        if target != "unembed"
    }
    pairs = cut_pairs(config, weights)
    for group, group_pairs in zip(config.groups, pairs, strict=True):
        assert all(leaf.shape[0] == group.num_repeats for leaf in jax.tree.leaves(group_pairs))
    joined = join_pairs(config, pairs)
    jax.tree.map(np.testing.assert_array_equal, joined, weights)


@pytest.mark.parametrize(
    ("name", "window"),
    [("Mistral-7B-v0.1", 4096), ("Mistral-7B-v0.3", None), ("Ministral-8B-Instruct-2410", 32768)],
)
def test_layers_of_mistral_have_one_window_or_none(name: str, window: int | None) -> None:
    config = read(name)
    assert list_windows(config) == [window] * config.num_layers and len(config.stacks) == 1


def test_heads_of_mistral_may_be_narrower_than_its_hidden_size() -> None:
    mixer = read("Mistral-Nemo-Base-2407").blocks[0].mixer
    assert isinstance(mixer, Attention) and (mixer.hidden_size, mixer.num_heads * mixer.head_dim) == (5120, 4096)


def test_a_window_that_mistral_does_not_name_has_its_default() -> None:
    content = read_content("Mistral-7B-v0.3")
    del content["sliding_window"]
    assert set(list_windows(find_family(content).config_from_hf(content))) == {4096}


@pytest.mark.parametrize(("name", "num_layers", "num_experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_layers_of_gpt_oss_alternate(name: str, num_layers: int, num_experts: int) -> None:
    config = read(name)
    assert list_windows(config) == [128, None] * (num_layers // 2)
    assert [len(group.stacks) for group in config.groups] == [2], "one loop over pairs of layers"
    mixer, mixture = config.blocks[0].mixer, config.blocks[0].feed_forward
    assert isinstance(mixer, Attention) and isinstance(mixture, Mixture)
    assert mixer.has_bias and mixer.has_output_bias and mixer.has_sinks
    assert mixer.rope.amplitude == pytest.approx(1.3465736) and not mixer.rope.truncate
    assert mixture.routing == Routing(num_experts=num_experts, num_chosen=4, renormalizes=True)
    assert mixture.has_bias and mixture.clamp == Clamp(limit=7.0, slope=1.702)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)])
def test_gpt_oss_has_its_published_number_of_parameters(name: str, billions: float) -> None:
    leaves = flatten(describe_params(read(name))).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(billions * 1e9, rel=2e-3)


def test_what_gpt_oss_leaves_out_has_its_default() -> None:
    content = read_content("gpt-oss-20b")
    for key in ("layer_types", "rope_scaling", "swiglu_limit", "attention_bias", "sliding_window", "rms_norm_eps"):
        content.pop(key)
    assert find_family(content).config_from_hf(content) == read("gpt-oss-20b")


@pytest.mark.parametrize(
    ("name", "billions", "num_dense"),
    [
        *(("DeepSeek-V3.1", 671.0, 3), ("Kimi-K2-Thinking", 1026.4, 1), ("Kimi-K2.5", 1026.4, 1)),
        *((MOONLIGHT, 15.96, 1), ("GLM-4.7-Flash", 29.94, 1)),
    ],
)
def test_layers_of_the_line_of_deepseek(name: str, billions: float, num_dense: int) -> None:
    config, content = read(name), get_text_config(read_content(name))
    assert [len(group.stacks) for group in config.groups] == [1, 1], "one loop over dense layers, one over others"

    kinds = [type(block.feed_forward) for block in config.blocks]
    assert kinds == [Dense] * num_dense + [Mixture] * (content["num_hidden_layers"] - num_dense)

    (attention,) = {block.mixer for block in config.blocks}
    assert isinstance(attention, LatentAttention) and attention.has_paired_rope
    assert [leaf.shape for leaf in jax.tree.leaves(attention.describe_cache().positions)] == [(1, 576)]
    assert attention.query_latent_dim == content["q_lora_rank"]

    mixture = config.blocks[-1].feed_forward
    assert isinstance(mixture, Mixture) and mixture.has_correction and not mixture.has_shared_gate
    assert mixture.routing == Routing(
        num_experts=content["n_routed_experts"],
        num_chosen=content["num_experts_per_tok"],
        renormalizes=True,
        scores="sigmoid",
        num_groups=content["n_group"],
        num_chosen_groups=content["topk_group"],
        factor=content["routed_scaling_factor"],
    )

    leaves = flatten(describe_params(config)).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "billions", "has_norm", "num_dense"), [("GLM-4.5-Air", 106.85, False, 1), ("GLM-4.5", 352.8, True, 3)]
)
def test_layers_of_glm(name: str, billions: float, has_norm: bool, num_dense: int) -> None:
    config, content = read(name), read_content(name)
    kinds = [type(block.feed_forward) for block in config.blocks]
    assert kinds == [Dense] * num_dense + [Mixture] * (content["num_hidden_layers"] - num_dense)
    (attention,) = {block.mixer for block in config.blocks}
    assert isinstance(attention, Attention) and attention.has_bias and not attention.has_output_bias
    assert (attention.norm_epsilon is not None) is has_norm
    assert (attention.head_dim, attention.rotary_dims) == (128, 64)
    mixture = config.blocks[-1].feed_forward
    assert isinstance(mixture, Mixture) and mixture.has_correction and not mixture.has_shared_gate
    assert mixture.routing.scores == "sigmoid" and mixture.routing.factor == content["routed_scaling_factor"]
    leaves = flatten(describe_params(config)).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "GLM-4.7-Flash"])
def test_what_glm_leaves_out_has_its_default(name: str) -> None:
    content = read_content(name)
    for key in ("n_group", "topk_group", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps"):
        content.pop(key)
    for key in ("first_k_dense_replace", "partial_rotary_factor", "max_position_embeddings"):
        content.pop(key)
    assert find_family(content).config_from_hf(content) == read(name)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("GLM-4.5", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("GLM-4.5", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("GLM-4.5", {"rope_parameters": {"rope_theta": 1e6, "odd": 1}}, "odd"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse"] * 46}, "mlp_layer_types = .*; supported: 47 of"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["odd"] * 47}, "mlp_layer_types = .*odd"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
        ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("GLM-4.7-Flash", {"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_keys_of_glm_are_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "amplitude", "factor"),
    [
        *(("DeepSeek-V3.1", 1.0, 1.3688879**2), ("Kimi-K2-Thinking", 1.0, 1.4158883**2)),
        *(("Kimi-K2.5", 1.0, 1.4158883**2), (MOONLIGHT, 1.0, 1.0)),
    ],
)
def test_scores_of_deepseek_grow_with_its_context(name: str, amplitude: float, factor: float) -> None:
    """The square of mscale = 0.1 ln(factor) + 1 multiplies scores, and not cosine and sine."""
    mixer = read(name).blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.rope.amplitude == amplitude and mixer.rope.score_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8; supported: 16"),
        ({"head_dim": 128}, "head_dim = 128; supported: 64"),
        ({"qk_head_dim": 128}, "qk_head_dim = 128; supported: 192"),
        ({"qk_rope_head_dim": 63}, "even, not 63"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0"),
        ({"n_group": 7}, "64 experts cannot be divided into 7 groups"),
        ({"n_group": 64, "topk_group": 6}, "64 experts cannot be divided into 64 groups"),
        ({"n_group": 8, "topk_group": 9}, "6 experts in 9 of 8 groups"),
        ({"n_group": 16, "topk_group": 1}, "6 experts in 1 of 16 groups"),
        ({"routed_scaling_factor": None}, "lacks 'routed_scaling_factor'"),
        ({"norm_topk_prob": None}, "lacks 'norm_topk_prob'"),
        ({"first_k_dense_replace": None}, "lacks 'first_k_dense_replace'"),
    ],
)
def test_keys_of_deepseek_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(MOONLIGHT, **changes)


def test_keys_of_the_text_model_of_kimi_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="scoring_func = 'softmax'"):
        read_text("Kimi-K2.5", scoring_func="softmax")
    with pytest.raises(UnsupportedModel, match="quant_method = 'awq'"):
        read_text("Kimi-K2.5", quantization_config={"quant_method": "awq"})


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def int4(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": GROUP | weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | more


@pytest.mark.parametrize("accepted", [None, FP8, int4({})])
def test_known_quantization_changes_no_block_of_any_family(accepted: dict[str, Any] | None) -> None:
    for name in (MOONLIGHT, "Qwen3.5-9B", "Mistral-7B-v0.1"):
        assert read(name, quantization_config=accepted) == read(name)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "quant_method = None"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        ({"quant_method": "fp8"}, r"activation_scheme = None; supported: 'dynamic'"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]; supported: \[128, 128\]"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme = 'static'"),
        (FP8 | {"odd": 1}, "quantization_config.odd = 1"),
        (int4({}, format="float-quantized"), "format = 'float-quantized'"),
        (int4({}, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (int4({"num_bits": 8}), "config_groups.group_0.weights.num_bits = 8"),
        (int4({"symmetric": False}), "weights.symmetric = False"),
        (int4({"group_size": 128}), "weights.group_size = 128"),
        (int4({"strategy": "channel"}), "weights.strategy = 'channel'"),
        (int4({"actorder": "group"}), "weights.actorder = 'group'"),
        (
            int4({}, config_groups={"g": {"weights": GROUP, "input_activations": {"num_bits": 8}}}),
            "g.input_activations",
        ),
        (int4({}, config_groups={"g": {"weights": None}}), "config_groups.g.weights.group_size = None"),
    ],
)
def test_other_quantization_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    for name in (MOONLIGHT, "Qwen3.5-9B"):
        with pytest.raises(UnsupportedModel, match=named):
            read(name, quantization_config=given)


WITH_EXPERTS = ("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B", "Qwen3.5-397B-A17B")
QWEN3_5 = ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.8-27B", *WITH_EXPERTS)


@pytest.mark.parametrize("name", QWEN3_5)
def test_every_fourth_layer_of_qwen3_5_has_softmax_attention(name: str) -> None:
    config = read(name)
    kinds = [type(block.mixer) for block in config.blocks]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, Attention] * (config.num_layers // 4)
    assert len(config.groups) == 1, "one loop over cycles of four layers"
    delta, attention = config.blocks[0].mixer, config.blocks[3].mixer
    assert isinstance(delta, DeltaNet) and isinstance(attention, Attention)
    assert (delta.num_key_heads, delta.key_dim, delta.value_dim, delta.conv_width) == (16, 128, 128, 4)
    assert attention.is_gated and (attention.head_dim, attention.rotary_dims) == (256, 64)
    assert attention.rope.theta == 1e7 and attention.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("Qwen3.5-4B", 4.2), ("Qwen3.5-9B", 9.0), ("Qwen3.5-27B", 26.9), ("Qwen3.8-27B", 26.9)),
        *(("Qwen3.5-35B-A3B", 34.7), ("Qwen3.6-35B-A3B", 34.7), ("Qwen3.5-397B-A17B", 397)),
    ],
)
def test_qwen3_5_has_as_many_parameters_as_its_name_says(name: str, billions: float) -> None:
    leaves = flatten(describe_params(read(name))).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_mixtures_of_qwen3_5_have_a_shared_expert(name: str) -> None:
    config, content = read(name), get_text_config(read_content(name))
    (mixture,) = {block.feed_forward for block in config.blocks}
    assert isinstance(mixture, Mixture)
    experts, chosen = content["num_experts"], content["num_experts_per_tok"]
    assert mixture.routing == Routing(num_experts=experts, num_chosen=chosen, renormalizes=True)
    assert (mixture.mlp_size, mixture.shared_size) == (content["moe_intermediate_size"],) * 2
    assert not mixture.has_bias and mixture.clamp is None


NEXT = "Qwen3-Next-80B-A3B-Instruct"


def test_qwen3_next_is_read_as_published() -> None:
    config = read(NEXT)
    kinds = [type(block.mixer) for block in config.blocks]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, Attention] * 12 and len(config.groups) == 1
    (mixture,) = {block.feed_forward for block in config.blocks}
    assert isinstance(mixture, Mixture) and (mixture.mlp_size, mixture.shared_size) == (512, 512)
    assert mixture.routing == Routing(num_experts=512, num_chosen=10, renormalizes=True)
    attention = config.blocks[3].mixer
    assert isinstance(attention, Attention) and attention.is_gated and attention.rope.theta == 1e7
    assert (attention.head_dim, attention.rotary_dims) == (256, 64)
    leaves = flatten(describe_params(config)).values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(79.7e9, rel=1e-3)


def test_what_qwen3_next_leaves_out_has_its_default() -> None:
    content = read_content(NEXT)
    for key in [*content]:
        if key.startswith(("linear_", "mlp_only", "shared_", "moe_", "num_ex", "norm_topk", "decoder_", "partial_")):
            del content[key]
    assert find_family(content).config_from_hf(content) == read(NEXT)


def test_layers_of_qwen3_next_may_be_dense() -> None:
    config = read(NEXT, mlp_only_layers=[0], decoder_sparse_step=2, norm_topk_prob=False)
    kinds = [type(block.feed_forward).__name__ for block in config.blocks]
    assert kinds == ["Dense", "Mixture"] * 24
    mixture = config.blocks[1].feed_forward
    assert isinstance(mixture, Mixture) and not mixture.routing.renormalizes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"rope_type": "odd"}}, "'odd'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window = 4096"),
        ({"shared_expert_intermediate_size": None}, "lacks 'shared_expert_intermediate_size'"),
        ({"layer_types": ["sliding_attention"] * 48}, "sliding_attention"),
    ],
)
def test_keys_of_qwen3_next_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(NEXT, **changes)


@pytest.mark.parametrize("name", QWEN3_5)
def test_a_text_only_config_of_qwen3_5_reads_the_same(name: str) -> None:
    content = read_content(name)
    text = {**content["text_config"], "architectures": [find_family(content).architecture]}
    assert find_family(text).config_from_hf(text) == read(name)


@pytest.mark.parametrize("name", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
def test_what_qwen3_5_leaves_out_has_its_default(name: str) -> None:
    content = read_content(name)
    optional = (
        *("layer_types", "full_attention_interval", "head_dim", "rms_norm_eps", "attn_output_gate"),
        *("mamba_ssm_dtype", "attention_bias"),
        *(
            key
            for key in content["text_config"]
            if key.startswith(("linear_", "mlp_only", "shared_", "moe_", "num_ex"))
        ),
    )
    for key in optional:
        del content["text_config"][key]
    del content["text_config"]["rope_parameters"]["partial_rotary_factor"]

    assert find_family(content).config_from_hf(content) == read(name)


def test_layers_of_qwen3_5_are_as_listed_before_the_interval() -> None:
    listed = ["linear_attention", "full_attention"] * 16
    mixers = [block.mixer for block in read_text("Qwen3.5-9B", layer_types=listed).blocks]
    assert [type(mixer) for mixer in mixers] == [DeltaNet, Attention] * 16
    mixers = [block.mixer for block in read_text("Qwen3.5-9B", layer_types=None, full_attention_interval=8).blocks]
    assert [type(mixer) for mixer in mixers] == ([DeltaNet] * 7 + [Attention]) * 4


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {**ROPE, "odd": 1}}, "odd"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types = .* of"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads = 24"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval = 0"),
    ],
)
def test_keys_of_the_nested_text_model_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    for name in ("Qwen3.5-9B", "Qwen3.5-35B-A3B"):
        with pytest.raises(UnsupportedModel, match=named):
            read_text(name, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"num_local_experts": 16}, "num_local_experts = 16"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ({"num_experts_per_tok": 257}, "257 of 256 experts"),
    ],
)
def test_keys_of_mixtures_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_text("Qwen3.5-35B-A3B", **changes)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window = 0"),
        ("Mistral-7B-v0.1", {"attention_bias": True}, "attention_bias = True"),
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
        ("Mistral-7B-v0.1", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling"),
        ("Mistral-7B-v0.1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("Mistral-7B-v0.1", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "layer_types = .*; supported: 24 of"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window = None"),
        ("gpt-oss-20b", {"mlp_bias": True}, "mlp_bias = True"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "odd": 1}}, "odd"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(name, **changes)
