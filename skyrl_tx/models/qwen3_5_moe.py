"""Qwen3.5 and 3.6 with a mixture of experts and a shared expert.

Qwen Team 2026.
"""

from collections.abc import Mapping
from typing import Any

from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.models.qwen3_5 import MIXER_DEFAULTS, read_mixers
from skyrl_tx.models.qwen3_moe import read_mixture
from skyrl_tx.weights.weight_map import (
    DELTA_NET_WEIGHTS,
    DENSE_WEIGHTS,
    QK_NORM_WEIGHTS,
    SHARED_EXPERT_WEIGHTS,
    STACKED_EXPERT_WEIGHTS,
    offset_norms,
)

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Keys of other mixtures of experts, with the values that these models have."""
WEIGHTS = offset_norms(DENSE_WEIGHTS + QK_NORM_WEIGHTS) + STACKED_EXPERT_WEIGHTS + SHARED_EXPERT_WEIGHTS
"""All rules except for delta nets."""


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers."""
    hf.check_values(ACCEPTED)
    mixture = read_mixture(hf, renormalizes=True, shared_size=hf.read_size("shared_expert_intermediate_size"))
    return tuple(Block(mixer, mixture) for mixer in read_mixers(hf))


QWEN3_5_MOE = ModelFamily(
    architecture="Qwen3_5MoeForCausalLM",
    aliases=("Qwen3_5MoeForConditionalGeneration",),
    weights=WEIGHTS + DELTA_NET_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"layer_types", "partial_rotary_factor", "num_experts"}),
    defaults={
        **MIXER_DEFAULTS,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
)
