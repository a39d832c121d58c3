"""Qwen3-Next: like Qwen3.5 with experts, but delta nets are stored head by head.

Qwen Team 2025.
"""

from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.models.qwen3_5 import MIXER_DEFAULTS, read_mixers
from skyrl_tx.models.qwen3_5_moe import WEIGHTS
from skyrl_tx.models.qwen3_moe import read_feed_forwards, read_mixture
from skyrl_tx.weights.weight_map import DELTA_NET_BY_HEAD_WEIGHTS


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers, dense or with experts."""
    shared_size = hf.read_size("shared_expert_intermediate_size")
    mixture = read_mixture(hf, renormalizes=hf["norm_topk_prob"], shared_size=shared_size)
    return tuple(Block(*parts) for parts in zip(read_mixers(hf), read_feed_forwards(hf, mixture), strict=True))


QWEN3_NEXT = ModelFamily(
    architecture="Qwen3NextForCausalLM",
    weights=WEIGHTS + DELTA_NET_BY_HEAD_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"layer_types", "partial_rotary_factor", "num_experts"}),
    defaults={
        **MIXER_DEFAULTS,
        "intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
)
