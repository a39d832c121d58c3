"""Llama 2 and 3, dense. Llama Team 2024, arXiv:2407.21783."""

from skyrl_tx.models.family import ModelFamily, make_dense_reader
from skyrl_tx.weights.weight_map import DENSE_WEIGHTS

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    weights=DENSE_WEIGHTS,
    read_blocks=make_dense_reader(),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048},
)
