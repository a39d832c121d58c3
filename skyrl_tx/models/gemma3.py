"""Gemma 3, dense: norms before and after each part of a layer, and two kinds of attention.

Every sixth layer has full attention. All other layers have a sliding window and another RoPE.

Gemma Team 2025, arXiv:2503.19786.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_tx.layers.rope import Rope
from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily, UnsupportedModel, alternate_types
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, QK_NORM_WEIGHTS, offset_norms, with_output_norms

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}
"""Keys of `config.json` that would change what the model computes, with the supported values."""
SLIDING, FULL = "sliding_attention", "full_attention"
THETAS = {SLIDING: "rope_local_base_freq", FULL: "rope_theta"}
"""For each layer type, the key of `config.json` with its RoPE theta.

It is used for layer types without a theta in `rope_parameters`.
"""


def read_ropes(hf: HfConfig) -> dict[str, Rope]:
    """Read the RoPE of each layer type.

    Configs since transformers 5 describe both in `rope_parameters`. Older configs have
    `rope_scaling` instead, which applies to layers with full attention only.
    """
    given, name = hf.get("rope_parameters"), "rope_parameters"
    if not given:
        given, name = {FULL: hf.get("rope_scaling")}, "rope_scaling"
    elif not set(given) <= set(THETAS) or hf.get("rope_scaling"):
        raise UnsupportedModel(
            f"config.json has rope_parameters = {given!r}; supported: one of each of {tuple(THETAS)}"
        )
    shared = {"max_position_embeddings": hf["max_position_embeddings"]}
    return {
        kind: HfConfig({**shared, name: given.get(kind), "rope_theta": hf[theta]}).read_rope()
        for kind, theta in THETAS.items()
    }


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the description of each layer from `config.json`. Raises UnsupportedModel."""
    # Check the config
    hf.check_values(ACCEPTED)
    types = hf.read_layer_types(
        lambda num_layers: alternate_types((SLIDING, FULL), hf.read_size("sliding_window_pattern"), num_layers), THETAS
    )
    ropes, window = read_ropes(hf), hf.read_optional_size("sliding_window")
    if SLIDING in types and window is None:
        raise UnsupportedModel(f"config.json has sliding_window = None, and layers of type {SLIDING!r}")
    scalar = hf.read_number("query_pre_attn_scalar")

    # Make the two kinds of attention. Gemma divides scores by the root of `query_pre_attn_scalar`.
    # The query factor corrects the usual division by the root of the head dim.
    attention = HfConfig({**hf, "rope_parameters": None, "rope_scaling": None}).read_attention(has_norm=True)
    full = replace(attention, rope=ropes[FULL], query_factor=math.sqrt(attention.head_dim / scalar))
    mixers = {FULL: full, SLIDING: replace(full, rope=ropes[SLIDING], window=window)}
    dense = replace(hf.read_dense(), activation="gelu_tanh")
    return tuple(Block(mixers[layer_type], dense, has_output_norms=True) for layer_type in types)


GEMMA3 = ModelFamily(
    architecture="Gemma3ForCausalLM",
    aliases=("Gemma3ForConditionalGeneration",),
    weights=offset_norms(with_output_norms(DENSE_WEIGHTS + QK_NORM_WEIGHTS)),
    read_blocks=read_blocks,
    reads=frozenset({"hidden_act", "layer_types"}),
    scales_embeddings=True,
    extends_context=False,  # max_position_embeddings already includes the RoPE scaling
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
