"""The minimal arithmetic of a model, in multiply-adds (MACs, two FLOPs each).

Of a mixture of experts, only the router and the experts chosen for a token are counted. Norms,
RoPE, activations and embedding lookups are not counted. The module also estimates how much data the
mixers of a sharded model exchange. A mixer is the part of a layer that combines tokens: attention,
a delta net or Mamba.
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
    """Return the multiply-adds per token with the base weights, including the unembedding."""
    macs = config.hidden_size * config.vocab_size
    for block in config.blocks:
        for target in block.targets().values():
            macs += _count_uses(block, target) * target.inputs * target.outputs
        if isinstance(block.feed_forward, Mixture):  # the router
            macs += config.hidden_size * block.feed_forward.routing.num_experts

        # Maps of mixers without adapters.
        match block.mixer:
            case DeltaNet(num_value_heads=heads):  # maps of decays and learning rates
                macs += 2 * config.hidden_size * heads
            case Mamba(num_heads=heads, num_groups=groups, state_dim=dim):  # maps of time steps, b and c
                macs += config.hidden_size * (heads + 2 * groups * dim)
            case LatentAttention(num_heads=heads, latent_dim=latent) as mixer:  # maps from latents
                macs += heads * (mixer.plain_dim + mixer.value_dim) * latent
                macs += heads * (mixer.plain_dim + mixer.rotary_dim) * (mixer.query_latent_dim or 0)
            case _:
                pass
    return macs


def count_adapter_macs(config: ModelConfig, rank: int) -> int:
    """Return the multiply-adds per token with an adapter. Factors that experts share count once."""
    macs = 0
    for block in config.blocks:
        for target in block.targets().values():
            for size, axis in zip((target.inputs, target.outputs), target.axes, strict=True):
                is_shared = config.expert_lora == "shared" and axis == "embed"
                macs += rank * size * (1 if is_shared else _count_uses(block, target))
    return macs + rank * (config.hidden_size + config.vocab_size)


def count_mixing_macs(config: ModelConfig, length: int) -> int:
    """Return the multiply-adds that combine the `length` tokens of one sequence, in all mixers.

    For attention these are the products of queries with keys, and of scores with values. The linear
    maps of mixers are counted by `count_frozen_macs`.
    """
    macs = 0
    for block in config.blocks:
        match block.mixer:
            case Attention(num_heads=heads, head_dim=dim, window=window):
                seen = min(window or length, length)
                pairs = seen * (seen + 1) // 2 + (length - seen) * seen
                macs += 2 * heads * dim * pairs  # queries times keys, scores times values

            case LatentAttention(num_heads=heads) as mixer:
                dims = mixer.plain_dim + mixer.rotary_dim + mixer.value_dim
                macs += heads * dims * (length * (length + 1) // 2)
            case DeltaNet(num_value_heads=heads, key_dim=keys, value_dim=values):
                macs += 3 * heads * keys * values * length  # reads the state, updates it, reads it with the query
            case Mamba(num_heads=heads, state_dim=written, head_dim=dim):
                macs += 2 * heads * written * dim * length  # updates the state and reads it
            case None:
                pass
            case mixer:
                raise TypeError(f"count_mixing_macs has no case for {type(mixer).__name__}")
    return macs


def count_exchanged_elements(config: ModelConfig, num_parts: int) -> int:
    """Return how many elements per token `num_parts` devices exchange in one pass over all layers.

    The devices share the tokens of each row. Before a mixer, they exchange its inputs, so that each
    device has all tokens of some heads. After the mixer, they exchange its outputs, so that each
    device has all heads of some tokens again.
    """
    elements = 0
    for block in config.blocks:
        match block.mixer:
            case Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim):
                elements += (
                    2 * (heads + math.lcm(kv_heads, num_parts)) * dim
                )  # kv heads are duplicated if there are more devices
            case LatentAttention(num_heads=heads) as mixer:
                elements += 2 * heads * (mixer.plain_dim + mixer.rotary_dim + mixer.value_dim)

            case DeltaNet(num_key_heads=heads, num_value_heads=value_heads, key_dim=keys, value_dim=values):
                elements += 2 * (heads * keys + value_heads * values)
            case Mamba(num_heads=heads, num_groups=groups, head_dim=dim, state_dim=written):
                elements += 3 * heads * dim + 2 * groups * written  # the input x is returned too
            case None:
                pass
            case mixer:
                raise TypeError(f"count_exchanged_elements has no case for {type(mixer).__name__}")
    return elements


def estimate_experts_read(config: ModelConfig, num_tokens: int) -> float:
    """Return the expected share of expert weights that `num_tokens` tokens read; 1 without experts."""
    shares = [
        1 - (1 - block.feed_forward.routing.num_chosen / block.feed_forward.routing.num_experts) ** num_tokens
        for block in config.blocks
        if isinstance(block.feed_forward, Mixture)
    ]
    return sum(shares) / len(shares) if shares else 1.0


def count_expert_parameters(config: ModelConfig) -> int:
    """Return the number of base weights in experts that a router chooses from."""
    return sum(
        len(get_target_layers(config, name)) * target.num_experts * target.inputs * target.outputs
        for name, target in get_targets(config).items()
        if name != UNEMBED and target.num_experts is not None
    )


def _count_uses(block: Block, target: Target) -> int:
    """Return how many copies of a linear map a token passes: the chosen experts, or 1."""
    feed_forward = block.feed_forward
    return feed_forward.routing.num_chosen if target.num_experts and isinstance(feed_forward, Mixture) else 1
