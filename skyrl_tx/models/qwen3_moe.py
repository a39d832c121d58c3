"""Qwen3-MoE: Qwen3 with a mixture of experts instead of most feed-forwards.

Qwen Team 2025, arXiv:2505.09388.
"""

from skyrl_tx.layers.experts import Routing
from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.models.parts.base import FeedForward
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, EXPERT_WEIGHTS, QK_NORM_WEIGHTS


def read_mixture(hf: HfConfig, *, renormalizes: bool, shared_size: int | None = None) -> Mixture:
    """Read the experts."""
    routing = Routing(
        num_experts=hf.read_size("num_experts"),
        num_chosen=hf.read_size("num_experts_per_tok"),
        renormalizes=renormalizes,
    )
    return Mixture(
        hidden_size=hf.read_size("hidden_size"),
        mlp_size=hf.read_size("moe_intermediate_size"),
        routing=routing,
        shared_size=shared_size,
    )


def read_feed_forwards(hf: HfConfig, mixture: Mixture) -> tuple[FeedForward, ...]:
    """Read the feed-forward of each layer, dense or the mixture."""
    dense = hf.read_dense()
    interval, dense_layers = hf.read_size("decoder_sparse_step"), hf["mlp_only_layers"] or ()
    return tuple(
        mixture if layer not in dense_layers and (layer + 1) % interval == 0 else dense
        for layer in range(hf.read_size("num_hidden_layers"))
    )


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers, dense or with experts."""
    attention = hf.read_attention(has_norm=True)
    mixture = read_mixture(hf, renormalizes=hf["norm_topk_prob"])
    return tuple(Block(attention, feed_forward) for feed_forward in read_feed_forwards(hf, mixture))


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    weights=DENSE_WEIGHTS + QK_NORM_WEIGHTS + EXPERT_WEIGHTS,
    read_blocks=read_blocks,
    reads=frozenset({"num_experts", "num_local_experts"}),
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
)
