"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most feed-forwards. Qwen Team 2025, arXiv:2505.09388."""

from skyrl_tx.layers.moe import Routing
from skyrl_tx.models.base import ModelFamily
from skyrl_tx.models.config import Experts, HfConfig
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, EXPERT_WEIGHTS, QK_NORM_WEIGHTS


def read_experts(hf: HfConfig) -> Experts:
    """Read the number of experts and the layers that have them."""
    step, dense, num_layers = hf["decoder_sparse_step"], hf["mlp_only_layers"] or (), hf["num_hidden_layers"]
    return Experts(
        routing=Routing(
            num_experts=hf["num_experts"],
            num_chosen=hf["num_experts_per_tok"],
            renormalizes=hf["norm_topk_prob"],
        ),
        mlp_size=hf["moe_intermediate_size"],
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
    )


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    weights=DENSE_WEIGHTS + QK_NORM_WEIGHTS + EXPERT_WEIGHTS,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    qk_norm=True,
    read_experts=read_experts,
)
