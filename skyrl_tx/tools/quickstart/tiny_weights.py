"""Random weights of the tiny models, by their tensors' names in Hugging Face checkpoints; linear maps are [out, in].

The scales were chosen so that LoRA of rank 32 on frozen random weights learns fast: embeddings with standard deviation
1 separate tokens; halved outputs of both sub-layers keep the token in the residual stream; query and key norms of 1.5
let heads attend to few positions; a nearly flat unembedding starts training close to the uniform loss. The heads of a
delta net forget in about 1, 6, 23 and 92 tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

UNEMBED_STD = 0.05
SUBLAYER_GAIN = 0.5
QK_NORM = 1.5
DECAYS = 1 / 64, 1.0
"""The lowest and the highest exponential of `A_log`, which is multiplied by about 0.7 for the decay of a token."""

SEED = 0

Tensors = Iterator[tuple[str, np.ndarray]]


class TinyWeights:
    """Draws the tensors of a model, in the order of its layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._generator = np.random.Generator(np.random.Philox(key=SEED))
        self._hidden_size: int = config["hidden_size"]
        self._is_gated = "layer_types" in config  # as all attention of Qwen3.5, whose norms are stored less 1

    def tensors(self) -> Tensors:
        """Yield name and value of every tensor."""
        config, hidden_size = self._config, self._hidden_size
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        yield "model.embed_tokens.weight", self._normal(1.0, config["vocab_size"], hidden_size)
        for index, kind in enumerate(kinds):
            layer = f"model.layers.{index}"
            yield f"{layer}.input_layernorm.weight", self._norm(hidden_size)
            mixer = self._attention if kind == "full_attention" else self._delta_net
            yield from mixer(layer)
            yield f"{layer}.post_attention_layernorm.weight", self._norm(hidden_size)
            yield from self._feed_forward(layer)
        yield "model.norm.weight", self._norm(hidden_size)
        yield "lm_head.weight", self._normal(UNEMBED_STD, config["vocab_size"], hidden_size)

    def _attention(self, layer: str) -> Tensors:
        config, head_dim = self._config, self._config["head_dim"]
        query_size, key_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        net = f"{layer}.self_attn"
        yield f"{net}.q_proj.weight", self._linear(query_size * (2 if self._is_gated else 1), self._hidden_size)
        yield f"{net}.k_proj.weight", self._linear(key_size, self._hidden_size)
        yield f"{net}.v_proj.weight", self._linear(key_size, self._hidden_size)
        yield f"{net}.o_proj.weight", self._linear(self._hidden_size, query_size, SUBLAYER_GAIN)
        yield f"{net}.q_norm.weight", self._norm(head_dim, QK_NORM)
        yield f"{net}.k_norm.weight", self._norm(head_dim, QK_NORM)

    def _delta_net(self, layer: str) -> Tensors:
        config, width = self._config, self._config["linear_conv_kernel_dim"]
        num_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        value_size = num_heads * value_dim
        channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value_size
        net = f"{layer}.linear_attn"
        yield f"{net}.in_proj_qkv.weight", self._linear(channels, self._hidden_size)
        yield f"{net}.in_proj_z.weight", self._linear(value_size, self._hidden_size)
        yield f"{net}.in_proj_a.weight", self._linear(num_heads, self._hidden_size)
        yield f"{net}.in_proj_b.weight", self._linear(num_heads, self._hidden_size)
        yield f"{net}.conv1d.weight", self._normal(width**-0.5, channels, 1, width)
        yield f"{net}.A_log", np.log(np.geomspace(*DECAYS, num_heads)).astype(np.float32)
        yield f"{net}.dt_bias", np.zeros(num_heads, np.float32)
        yield f"{net}.norm.weight", np.ones(value_dim, np.float32)
        yield f"{net}.out_proj.weight", self._linear(self._hidden_size, value_size, SUBLAYER_GAIN)

    def _feed_forward(self, layer: str) -> Tensors:
        mlp_size = self._config["intermediate_size"]
        yield f"{layer}.mlp.gate_proj.weight", self._linear(mlp_size, self._hidden_size)
        yield f"{layer}.mlp.up_proj.weight", self._linear(mlp_size, self._hidden_size)
        yield f"{layer}.mlp.down_proj.weight", self._linear(self._hidden_size, mlp_size, SUBLAYER_GAIN)

    def _normal(self, std: float, *shape: int) -> np.ndarray:
        return (std * self._generator.standard_normal(shape)).astype(np.float32)

    def _linear(self, outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return self._normal(gain * inputs**-0.5, outputs, inputs)

    def _norm(self, size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value - 1.0 if self._is_gated else value, np.float32)
