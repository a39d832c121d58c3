"""GLM-4.5 and 4.6: attention with biases, RoPE on half of each head, and experts like DeepSeek.

Zhipu AI 2025.
"""

from skyrl_tx.models.config import Block
from skyrl_tx.models.deepseek_v3 import ACCEPTED, read_feed_forwards
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.weights.weight_map import (
    DENSE_WEIGHTS,
    EXPERT_WEIGHTS,
    QK_NORM_WEIGHTS,
    QKV_BIAS_WEIGHTS,
    SHARED_EXPERTS_WEIGHTS,
)


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers. Large models normalise queries and keys."""
    hf.check_values(ACCEPTED)
    has_bias, has_norm = bool(hf.get("attention_bias")), bool(hf.get("use_qk_norm"))
    attention = hf.read_partial_rope_attention(has_bias=has_bias, has_norm=has_norm)
    return tuple(Block(attention, feed_forward) for feed_forward in read_feed_forwards(hf))


GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    weights=DENSE_WEIGHTS + QKV_BIAS_WEIGHTS + QK_NORM_WEIGHTS + EXPERT_WEIGHTS + SHARED_EXPERTS_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
