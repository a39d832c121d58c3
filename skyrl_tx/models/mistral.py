"""Mistral 7B, Nemo and Ministral, dense: Llama with sliding windows.

Jiang et al. 2023, arXiv:2310.06825.
"""

from dataclasses import replace

from skyrl_tx.models.config import Block
from skyrl_tx.models.family import HfConfig, ModelFamily
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS


def read_blocks(hf: HfConfig) -> tuple[Block, ...]:
    """Read the layers. All have the same sliding window, or none."""
    attention = replace(hf.read_attention(), window=hf.read_optional_size("sliding_window"))
    return (Block(attention, hf.read_dense()),) * hf.read_size("num_hidden_layers")


MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    weights=DENSE_WEIGHTS,
    read_blocks=read_blocks,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
