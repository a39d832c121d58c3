"""DeepSeek-V3, and Kimi K2 to K2.6 and Moonlight, which have the same architecture.

DeepSeek-AI 2024, arXiv:2412.19437.
"""

from collections.abc import Mapping
from typing import Any

from skyrl_tx.layers.experts import Routing
from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.models.parts.base import FeedForward
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.models.parts.latent_attention import LatentAttention
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, EXPERT_WEIGHTS, LATENT_WEIGHTS, SHARED_EXPERTS_WEIGHTS

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Keys that would change the maths, with the supported values."""
WEIGHTS = DENSE_WEIGHTS + LATENT_WEIGHTS + EXPERT_WEIGHTS + SHARED_EXPERTS_WEIGHTS


def read_latent_attention(hf: HfConfig) -> LatentAttention:
    """Read the attention. transformers writes the size of the shared key as `head_dim`."""
    num_heads, rotary_dim = hf.read_size("num_attention_heads"), hf.read_size("qk_rope_head_dim")
    plain_dim = hf.read_size("qk_nope_head_dim")
    sizes = {"num_key_value_heads": num_heads, "head_dim": rotary_dim, "qk_head_dim": plain_dim + rotary_dim}
    hf.check_values({key: (size,) for key, size in sizes.items()})
    return LatentAttention(
        hidden_size=hf.read_size("hidden_size"),
        num_heads=num_heads,
        latent_dim=hf.read_size("kv_lora_rank"),
        query_latent_dim=hf.read_optional_size("q_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=hf.read_size("v_head_dim"),
        rope=hf.read_rope(),
        has_paired_rope=bool(hf.get("rope_interleave", True)),
    )


def read_routed_experts(hf: HfConfig) -> Mixture:
    """Read the experts of a sparse layer.

    All shared experts together are read as one wide expert.
    """
    width = hf.read_size("moe_intermediate_size")
    routing = Routing(
        num_experts=hf.read_size("n_routed_experts"),
        num_chosen=hf.read_size("num_experts_per_tok"),
        renormalizes=bool(hf.read_required("norm_topk_prob")),
        scores="sigmoid",
        num_groups=hf.read_size("n_group"),
        num_chosen_groups=hf.read_size("topk_group"),
        factor=hf.read_number("routed_scaling_factor"),
    )

    return Mixture(
        hidden_size=hf.read_size("hidden_size"),
        mlp_size=width,
        routing=routing,
        has_correction=True,
        shared_size=width * hf.read_size("n_shared_experts"),
        has_shared_gate=False,
        config_keys=("moe_intermediate_size", "n_routed_experts"),
    )


def read_feed_forwards(hf: HfConfig) -> tuple[FeedForward, ...]:
    """Read the feed-forward of each layer. The first layers are dense."""
    num_layers, num_dense = hf.read_size("num_hidden_layers"), int(hf.read_required("first_k_dense_replace"))
    return tuple(hf.read_dense() if layer < num_dense else read_routed_experts(hf) for layer in range(num_layers))


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers."""
    hf.check_values(ACCEPTED)
    attention = read_latent_attention(hf)
    return tuple(Block(attention, feed_forward) for feed_forward in read_feed_forwards(hf))


DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    aliases=("KimiK25ForConditionalGeneration",),
    weights=WEIGHTS,
    read_blocks=read_blocks,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096},
)
