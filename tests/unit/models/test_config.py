"""config.json is read correctly, and unsupported features are refused by name."""

import pytest

from skyrl_tx.layers.rope import Rope
from skyrl_tx.models import UnsupportedModel, find_family

QWEN3_06B = {  # as published, less what no model reads
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(**changes):
    hf = {**QWEN3_06B, **changes}
    return find_family(hf).config_from_hf(hf)


def test_qwen3():
    config = read()
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (28, 1024, 16, 8)
    assert (config.head_dim, config.mlp_size, config.vocab_size) == (128, 3072, 151936)
    assert config.rope == Rope(theta=1e6) and config.max_context_length == 40960
    assert config.tied_embeddings and config.qk_norm and not config.qkv_bias
    assert hash(config) == hash(read())


def test_absent_keys_take_the_defaults_of_the_family():
    hf = {key: value for key, value in QWEN3_06B.items() if key != "head_dim"}
    assert find_family(hf).config_from_hf(hf).head_dim == 128
    llama = {**hf, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": None}
    config = find_family(llama).config_from_hf(llama)
    assert (config.head_dim, config.num_kv_heads, config.qk_norm) == (64, 16, False)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_both_spellings_of_a_scaled_rope(changes):
    expected = Rope(
        5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert read(architectures=["LlamaForCausalLM"], **changes).rope == expected


def test_a_default_rope_in_the_new_spelling():
    assert read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope == Rope(1e6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "odd"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*Qwen3ForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "supported"),
    ],
)
def test_unsupported_config_keys_are_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(**changes)


def test_a_window_that_is_off_is_accepted():
    assert read(sliding_window=4096, use_sliding_window=False) == read()
