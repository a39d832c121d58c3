"""GLM-4.7-Flash: the parts of DeepSeek-V3 in a small model. Zhipu AI 2026."""

from skyrl_tx.models.config import Block
from skyrl_tx.models.deepseek_v3 import ACCEPTED, WEIGHTS, read_latent_attention, read_routed_experts
from skyrl_tx.models.family import HfConfig, ModelFamily


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers. Without `mlp_layer_types`, only the first layer is dense."""
    hf.check_values({**ACCEPTED, "first_k_dense_replace": (1,)})
    feed_forwards = {"dense": hf.read_dense(), "sparse": read_routed_experts(hf)}
    types = hf.read_layer_types(
        lambda num_layers: ["dense"] + ["sparse"] * (num_layers - 1), feed_forwards, key="mlp_layer_types"
    )
    attention = read_latent_attention(hf)
    return tuple(Block(attention, feed_forwards[layer_type]) for layer_type in types)


GLM4_MOE_LITE = ModelFamily(
    architecture="Glm4MoeLiteForCausalLM",
    weights=WEIGHTS,
    read_blocks=read_blocks,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
