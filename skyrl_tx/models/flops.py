"""The least arithmetic of a model, in multiply-adds of one token: two FLOPs each; and what its mixers exchange.

In a mixture of experts, a token counts the router and the experts that are chosen for it. Norms, ropes, activations and
the look-up of embeddings count nothing.
"""

import math

from skyrl_tx.models.adapters import UNEMBED, get_target_layers, get_targets
from skyrl_tx.models.config import Block, ModelConfig
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import Target
from skyrl_tx.models.parts.delta_net import DeltaNet
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.models.parts.latent_attention import LatentAttention
from skyrl_tx.models.parts.mamba import Mamba


def count_frozen_macs(config: ModelConfig) -> int:
    """Return the multiply-adds of a token with the base weights, those of the unembedding included."""
    found = config.hidden_size * config.vocab_size
    for block in config.blocks:
        for target in block.targets().values():
            found += _count_uses(block, target) * target.inputs * target.outputs
        if isinstance(block.feed_forward, Mixture):
            found += config.hidden_size * block.feed_forward.routing.num_experts
        match block.mixer:
            case DeltaNet(num_value_heads=heads):  # decays and learning rates
                found += 2 * config.hidden_size * heads
            case Mamba(num_heads=heads, num_groups=groups, state_dim=dim):  # steps; what is written and read
                found += config.hidden_size * (heads + 2 * groups * dim)
            case LatentAttention(num_heads=heads, latent_dim=latent) as mixer:  # the maps from latents
                found += heads * (mixer.plain_dim + mixer.value_dim) * latent
                found += heads * (mixer.plain_dim + mixer.rotary_dim) * (mixer.query_latent_dim or 0)
            case _:
                pass
    return found


def count_adapter_macs(config: ModelConfig, rank: int, *, with_unembed: bool = True) -> int:
    """Return the multiply-adds of a token with an adapter; factors that all experts share count once."""
    found = 0
    for block in config.blocks:
        for target in block.targets().values():
            for size, axis in zip((target.inputs, target.outputs), target.axes, strict=True):
                is_shared = config.expert_lora == "shared" and axis == "embed"
                found += rank * size * (1 if is_shared else _count_uses(block, target))
    return found + (rank * (config.hidden_size + config.vocab_size) if with_unembed else 0)


def count_mixing_macs(config: ModelConfig, length: int) -> int:
    """Return the multiply-adds by which the positions of a sequence of `length` tokens read each other, in all."""
    found = 0
    for block in config.blocks:
        match block.mixer:
            case Attention(num_heads=heads, head_dim=dim, window=window):
                seen = min(window or length, length)
                pairs = seen * (seen + 1) // 2 + (length - seen) * seen
                found += 2 * heads * dim * pairs  # queries by keys, scores by values
            case LatentAttention(num_heads=heads) as mixer:
                dims = mixer.plain_dim + mixer.rotary_dim + mixer.value_dim
                found += heads * dims * (length * (length + 1) // 2)
            case DeltaNet(num_value_heads=heads, key_dim=keys, value_dim=values):
                found += 3 * heads * keys * values * length  # the state is read, changed, and read by the query
            case Mamba(num_heads=heads, state_dim=written, head_dim=dim):
                found += 2 * heads * written * dim * length  # the state is changed, and read
            case None:
                pass
            case mixer:
                raise TypeError(f"the arithmetic of {type(mixer).__name__} is not known")
    return found


def count_exchanged_numbers(config: ModelConfig, num_parts: int) -> int:
    """Return how many numbers of a token mixers exchange if `num_parts` devices have whole rows of a part of the heads.

    Each mixer's inputs by heads go there, and its outputs come back, in a pass over all layers.
    """
    found = 0
    for block in config.blocks:
        match block.mixer:
            case Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim):
                found += 2 * (heads + math.lcm(kv_heads, num_parts)) * dim  # more devices than kv heads have copies
            case LatentAttention(num_heads=heads) as mixer:
                found += 2 * heads * (mixer.plain_dim + mixer.rotary_dim + mixer.value_dim)
            case DeltaNet(num_key_heads=heads, num_value_heads=value_heads, key_dim=keys, value_dim=values):
                found += 2 * (heads * keys + value_heads * values)
            case Mamba(num_heads=heads, num_groups=groups, head_dim=dim, state_dim=written):
                found += 3 * heads * dim + 2 * groups * written  # its input comes back too
            case None:
                pass
            case mixer:
                raise TypeError(f"what {type(mixer).__name__} exchanges is not known")
    return found


def estimate_experts_read(config: ModelConfig, num_tokens: int) -> float:
    """Return the expected share of the experts' weights that a step of `num_tokens` reads; 1 without experts."""
    shares = [
        1 - (1 - block.feed_forward.routing.num_chosen / block.feed_forward.routing.num_experts) ** num_tokens
        for block in config.blocks
        if isinstance(block.feed_forward, Mixture)
    ]
    return sum(shares) / len(shares) if shares else 1.0


def count_expert_parameters(config: ModelConfig) -> int:
    """Return how many of the base weights belong to experts among which a router chooses."""
    return sum(
        len(get_target_layers(config, name)) * target.num_experts * target.inputs * target.outputs
        for name, target in get_targets(config).items()
        if name != UNEMBED and target.num_experts is not None
    )


def _count_uses(block: Block, target: Target) -> int:
    """Return how often a token meets a linear map of a block."""
    feed_forward = block.feed_forward
    return feed_forward.routing.num_chosen if target.num_experts and isinstance(feed_forward, Mixture) else 1
