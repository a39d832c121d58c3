"""Qwen3, dense: normalised queries and keys. Qwen Team 2025, arXiv:2505.09388."""

from skyrl_tx.models.family import ModelFamily, make_dense_reader
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, QK_NORM_WEIGHTS

QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    weights=DENSE_WEIGHTS + QK_NORM_WEIGHTS,
    read_blocks=make_dense_reader(has_norm=True),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768},
)
