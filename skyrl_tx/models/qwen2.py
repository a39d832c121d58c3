"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values.

Qwen Team 2024, arXiv:2407.10671.
"""

from skyrl_tx.models.family import ModelFamily, make_dense_reader
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS, QKV_BIAS_WEIGHTS

QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    weights=DENSE_WEIGHTS + QKV_BIAS_WEIGHTS,
    read_blocks=make_dense_reader(has_bias=True),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768},
)
