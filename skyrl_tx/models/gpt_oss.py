"""OpenAI's gpt-oss: sliding windows in every other layer, attention sinks, experts with biases.

OpenAI 2025, arXiv:2508.10925.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from skyrl_tx.layers.experts import Clamp, Routing
from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily, alternate_types
from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.weights.weight_map import (
    DENSE_WEIGHTS,
    FUSED_EXPERT_WEIGHTS,
    OUTPUT_BIAS_WEIGHTS,
    QKV_BIAS_WEIGHTS,
    SINK_WEIGHTS,
)

WINDOW, WHOLE = TYPES = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers. Without `layer_types`, every other layer has a window, from the first on."""
    method = (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise UnsupportedModel(f"config.json has quantization_config.quant_method = {method!r}; supported: 'mxfp4'")

    types = hf.read_layer_types(partial(alternate_types, TYPES, 2), TYPES)
    if WINDOW in types and hf.get("sliding_window") is None:
        raise UnsupportedModel(f"config.json has sliding_window = None, and layers of type {WINDOW!r}")

    # Read the two kinds of attention, and the experts.
    has_bias = bool(hf["attention_bias"])
    hf = hf if hf.get_rope()[1] else HfConfig({**hf, "rope_parameters": YARN})
    whole = replace(hf.read_attention(has_bias=has_bias), has_output_bias=has_bias, has_sinks=True)
    mixers = {WHOLE: whole, WINDOW: replace(whole, window=hf.read_optional_size("sliding_window"))}

    limit, slope = (hf.read_number(key) for key in ("swiglu_limit", "swiglu_alpha"))
    experts = Mixture(
        hidden_size=whole.hidden_size,
        mlp_size=hf.read_size("intermediate_size"),
        routing=Routing(
            num_experts=hf.read_size("num_local_experts"),
            num_chosen=hf.read_size("num_experts_per_tok"),
            renormalizes=True,  # equals a softmax over the chosen experts
        ),
        has_bias=True,
        clamp=Clamp(limit=limit, slope=slope),
        config_keys=("intermediate_size", "num_local_experts"),
    )
    return tuple(Block(mixers[layer_type], experts) for layer_type in types)


DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    weights=DENSE_WEIGHTS + QKV_BIAS_WEIGHTS + OUTPUT_BIAS_WEIGHTS + SINK_WEIGHTS + FUSED_EXPERT_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"attention_bias", "layer_types", "num_local_experts", "quantization_config"}),
    defaults=DEFAULTS,
)
