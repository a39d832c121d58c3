"""Qwen3.5, 3.6 and 3.8, dense: three gated delta nets before each gated attention.

Qwen Team 2026; arXiv:2412.06464.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily, alternate_types
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import Mixer
from skyrl_tx.models.parts.delta_net import DeltaNet
from skyrl_tx.weights.weight_map import DELTA_NET_WEIGHTS, DENSE_WEIGHTS, QK_NORM_WEIGHTS, offset_norms

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish",),
    "mamba_ssm_dtype": ("float32",),
}
"""Keys that would change the maths, with the supported values."""
_TYPES = "linear_attention", "full_attention"


def read_delta_net(hf: HfConfig) -> DeltaNet:
    """Read the linear attention."""
    return DeltaNet(
        hidden_size=hf.read_size("hidden_size"),
        num_key_heads=hf.read_size("linear_num_key_heads"),
        num_value_heads=hf.read_size("linear_num_value_heads"),
        key_dim=hf.read_size("linear_key_head_dim"),
        value_dim=hf.read_size("linear_value_head_dim"),
        conv_width=hf.read_size("linear_conv_kernel_dim"),
        norm_epsilon=hf.read_epsilon(),
    )


def read_gated_attention(hf: HfConfig) -> Attention:
    """Read the softmax attention. The keys `mrope_…`, for positions in images, do not affect text."""
    name, given = hf.get_rope()
    rope = {key: value for key, value in given.items() if key not in ("mrope_section", "mrope_interleaved")}
    return replace(HfConfig({**hf, name: rope}).read_partial_rope_attention(has_norm=True), is_gated=True)


def read_mixers(hf: HfConfig) -> tuple[Mixer, ...]:
    """Read the mixer of each layer."""
    hf.check_values(ACCEPTED)
    mixers: dict[str, Mixer] = {"linear_attention": read_delta_net(hf), "full_attention": read_gated_attention(hf)}
    types = hf.read_layer_types(
        lambda num_layers: alternate_types(_TYPES, hf.read_size("full_attention_interval"), num_layers), _TYPES
    )
    return tuple(mixers[layer_type] for layer_type in types)


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers."""
    return tuple(Block(mixer, hf.read_dense()) for mixer in read_mixers(hf))


MIXER_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    aliases=("Qwen3_5ForConditionalGeneration",),
    weights=offset_norms(DENSE_WEIGHTS + QK_NORM_WEIGHTS) + DELTA_NET_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"layer_types", "partial_rotary_factor"}),
    defaults=MIXER_DEFAULTS,
)
