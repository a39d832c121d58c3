"""Nemotron-H (Nemotron 3 Nano, Super, Ultra): each layer has Mamba-2, attention or a feed-forward.

NVIDIA 2025.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_tx.models.config import Block
from skyrl_tx.models.deepseek_v3 import read_routed_experts
from skyrl_tx.models.family import HfConfig, ModelFamily, UnsupportedModel
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.models.parts.mamba import Mamba
from skyrl_tx.weights.weight_map import NEMOTRON_WEIGHTS

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
    **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "sliding_window"), (False,)),
}
"""Keys that would change the maths, with the supported values."""
_MAMBA, _ATTENTION, _EXPERTS, _DENSE = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "E": _EXPERTS, "-": _DENSE}
_KINDS: Mapping[str, str] = {**_LETTERS, "mamba": _MAMBA, "attention": _ATTENTION}


def read_kinds(hf: HfConfig) -> tuple[str, ...]:
    """Return the type of each layer, from a list of names or from a pattern of letters."""
    given: Sequence[str] = hf.get("layers_block_type") or hf.get("hybrid_override_pattern") or ()
    kinds = tuple(_KINDS.get(name, name) for name in given)
    number = hf.get("num_hidden_layers", len(kinds))  # transformers does not write this key
    if not kinds or len(kinds) != number or not set(kinds) <= set(_KINDS.values()):
        raise UnsupportedModel(f"config.json has layers_block_type = {given!r} of {number} layers")
    return kinds


def read_mamba(hf: HfConfig) -> Mamba:
    """Read the Mamba-2 layer.

    `time_step_limit` bounds time steps, as in NVIDIA's code. `time_step_min` only matters for
    initialisation.
    """
    minimum, maximum = hf["time_step_limit"]
    if maximum not in (None, math.inf):
        raise UnsupportedModel(f"config.json has time_step_limit = {hf['time_step_limit']!r}; supported: [_, Infinity]")
    return Mamba(
        hidden_size=hf.read_size("hidden_size"),
        num_heads=hf.read_size("mamba_num_heads"),
        head_dim=hf.read_size("mamba_head_dim"),
        num_groups=hf.read_size("n_groups"),
        state_dim=hf.read_size("ssm_state_size"),
        conv_width=hf.read_size("conv_kernel"),
        has_conv_bias=bool(hf["use_conv_bias"]),
        norm_epsilon=hf.read_epsilon(),
        least_step=float(minimum),
    )


def read_experts(hf: HfConfig) -> Mixture:
    """Read the experts. Their inputs and outputs may be smaller than the hidden size."""
    latent_size = hf.read_optional_size("moe_latent_size")
    shared_size = hf.read_size("moe_shared_expert_intermediate_size")
    return replace(read_routed_experts(hf), is_gated=False, shared_size=shared_size, latent_size=latent_size)


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers."""
    hf.check_values(ACCEPTED)
    read = {
        _MAMBA: lambda: Block(read_mamba(hf), None),
        _ATTENTION: lambda: Block(hf.read_attention(has_rope=False), None),
        _EXPERTS: lambda: Block(None, read_experts(hf)),
        _DENSE: lambda: Block(None, replace(hf.read_dense(), is_gated=False)),
    }
    return tuple(read[kind]() for kind in read_kinds(hf))


NEMOTRON_H = ModelFamily(
    architecture="NemotronHForCausalLM",
    weights=NEMOTRON_WEIGHTS,
    read_blocks=read_blocks,
    renamed={
        **{"layer_norm_epsilon": "rms_norm_eps", "layer_types": "layers_block_type", "mamba_n_groups": "n_groups"},
        **{"mamba_d_conv": "conv_kernel", "mamba_dt_limit": "time_step_limit", "mamba_conv_bias": "use_conv_bias"},
    },
    defaults={
        **{"layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096, "head_dim": 128, "conv_kernel": 4},
        **{"n_groups": 8, "ssm_state_size": 128, "use_conv_bias": True, "time_step_limit": (0.0, math.inf)},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    },
)
