"""config.json is read correctly, and unsupported features are refused by name."""

from dataclasses import replace

import pytest

from skyrl_tx.layers.rope import Rope
from skyrl_tx.models import UnsupportedModel, describe_params, find_family
from skyrl_tx.models.config import Block, group_blocks
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import CacheSpec
from skyrl_tx.models.parts.feed_forward import Dense

QWEN3_06B = {  # as published, without keys that no model reads
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
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (28, 1024, 151936)
    attention = Attention(
        hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e6), norm_epsilon=1e-6
    )
    assert config.blocks == (Block(attention, Dense(hidden_size=1024, mlp_size=3072)),) * 28
    assert config.max_context_length == 40960 and config.tied_embeddings
    assert hash(config) == hash(read())


def test_absent_keys_take_the_defaults_of_the_family():
    hf = {key: value for key, value in QWEN3_06B.items() if key != "head_dim"}
    assert find_family(hf).config_from_hf(hf).blocks[0].mixer.head_dim == 128
    llama = {**hf, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": None}
    config = find_family(llama).config_from_hf(llama)
    attention = config.blocks[0].mixer
    assert (attention.head_dim, attention.num_kv_heads, attention.norm_epsilon) == (64, 16, None)


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
    assert read(architectures=["LlamaForCausalLM"], **changes).blocks[0].mixer.rope == expected


def test_keys_of_yarn_may_be_absent_or_null():
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    expected = Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=32768)
    assert read(rope_scaling=given).blocks[0].mixer.rope == expected
    assert read(rope_scaling={**given, "attention_factor": None, "beta_fast": 32}).blocks[0].mixer.rope == expected
    changed = {"attention_factor": 1.0, "truncate": False, "beta_slow": 2}
    rope = read(rope_scaling={**given, **changed}).blocks[0].mixer.rope
    assert (rope.attention_factor, rope.truncate, rope.beta_slow, rope.beta_fast) == (1.0, False, 2.0, 32.0)


SHORT = [1.0 + index / 64 for index in range(64)]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * 40960),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 20480}, 40960),
        ({"rope_type": "linear", "factor": 2.5}, 102400),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 8 * 40960),
        ({"rope_type": "llama3", **LLAMA3}, 65536),
        ({"rope_type": "dynamic", "factor": 4.0}, 40960),  # its frequencies depend on the length above it
        ({"rope_type": "longrope", "short_factor": SHORT, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_type": "default"}, 40960),
    ],
)
def test_a_scaled_rope_extends_the_context(rope, length):
    """Model cards ask to add the scaling and to leave max_position_embeddings, for example for Qwen3."""
    for key in ("rope_scaling", "rope_parameters"):
        assert read(**{key: rope}).max_context_length == length
    assert read(rope_scaling=rope, max_position_embeddings=1 << 20).max_context_length >= length


def test_a_default_rope_in_the_new_spelling():
    config = read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert config.blocks[0].mixer.rope == Rope(1e6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "type 'proportional'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, r"'longrope' without \['short_factor'\]"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}}, "2 numbers in short_factor.* be 64"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            r"rope_scaling\.factor = 0; it must be a number above 0",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, r"rope_scaling\.factor = '4'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": -1}}, r"rope_scaling\.beta_fast = -1"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'; it must be an object"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters and rope_scaling, which differ",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "odd"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"head_dim": "128"}, "head_dim = '128'"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'; it must be a number above 0"),
        ({"rms_norm_eps": [1e-6]}, "rms_norm_eps"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures = 'Qwen3ForCausalLM'; supported"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "supported"),
        ({"architectures": 3}, "architectures = 3"),
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*Qwen3ForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "supported"),
    ],
)
def test_unsupported_config_keys_are_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(**changes)


def test_a_window_that_is_off_is_accepted():
    assert read(sliding_window=4096, use_sliding_window=False) == read()


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("aaaa", ["aaaa"]),
        ("aaabaaabaaab", ["(a a a b) x 3"]),  # Qwen3.5
        ("wfwfwf", ["(w f) x 3"]),  # gpt-oss
        ("dddssss", ["ddd", "ssss"]),  # DeepSeek-V3
        ("wwfwwfww", ["(w w f) x 2", "ww"]),  # Gemma 3
        ("sdss", ["s", "d", "ss"]),
        ("ababa", ["(a b) x 2", "a"]),
        ("abc", ["a", "b", "c"]),
        ("dsssdsss", ["(d s s s) x 2"]),
        ("aeae*eaeae*e", ["(a e a e * e) x 2"]),  # Nemotron-H, of one part a layer
        ("dsssssdsssss", ["d", "sssss", "d", "sssss"]),  # the cycle would have six stacks
    ],
)
def test_layers_are_grouped_into_cycles(kinds, groups):
    blocks = {kind: Block(read().blocks[0].mixer, Dense(hidden_size=8, mlp_size=ord(kind))) for kind in kinds}
    names = {block: kind for kind, block in blocks.items()}
    found = group_blocks([blocks[kind] for kind in kinds])

    def text(group) -> str:
        cycle = [names[stack.block] for stack in group.stacks]
        return cycle[0] * group.num_repeats if len(cycle) == 1 else f"({' '.join(cycle)}) x {group.num_repeats}"

    assert [text(group) for group in found] == groups
    layers = [stack.layers[repeat] for group in found for repeat in range(group.num_repeats) for stack in group.stacks]
    assert layers == list(range(len(kinds)))
    for stack in (stack for group in found for stack in group.stacks):
        assert {kinds[layer] for layer in stack.layers} == {names[stack.block]}


def test_a_block_may_lack_one_part():
    mixer, dense = read().blocks[0].parts
    whole, first, second = Block(mixer, dense), Block(mixer, None), Block(None, dense)
    assert [block.parts for block in (whole, first, second)] == [(mixer, dense), (mixer,), (dense,)]
    assert whole.targets() == first.targets() | second.targets()
    assert whole.describe_cache() == first.describe_cache() and second.describe_cache() == CacheSpec()
    config = replace(read(), groups=group_blocks([first, second, second]))
    attention, denses = describe_params(config).layers
    assert set(attention) == {"attn_norm", *mixer.describe()} and attention["attn_norm"].layers == (0,)
    assert set(denses) == {"mlp_norm", *dense.describe()} and denses["mlp_norm"].layers == (1, 2)
