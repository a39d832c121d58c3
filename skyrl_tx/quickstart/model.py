"""The quickstart's tiny model in Hugging Face format: Qwen3 architecture, random weights, and a trained tokenizer.

Configuration and tokenizer are files of the package, in `tiny_model`. The tokenizer is byte-level BPE learned from the
excerpt of GSM8K, with the special tokens of Qwen3 as single ids; `python -m tests.support.tiny_tokenizer` trains it.

The weights' scales were chosen so that LoRA of rank 32 on frozen random weights learns fast: embeddings with standard
deviation 1 separate tokens; halved outputs of both sub-layers keep the token in the residual stream; query and key
norms of 1.5 let heads attend to few positions; a nearly flat unembedding starts training close to the uniform loss. The
configuration's `rope_theta` is small, because texts are short: neighbouring positions must differ enough.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TINY = "tiny"
"""The name of this model for `--base-model`."""
UNEMBED_STD = 0.05
SUBLAYER_GAIN = 0.5
QK_NORM = 1.5

SEED = 0


def write_tiny_model(directory: Path) -> Path:
    """Write model and tokenizer into `directory`, created if missing, and return it; the bytes never vary."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in (files("skyrl_tx.quickstart") / "tiny_model").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    save_file(dict(_tensors(config)), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(config: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and value of every tensor in the Hugging Face layout; linear maps are [out, in]."""
    generator = np.random.Generator(np.random.Philox(key=SEED))

    def normal(std: float, *shape: int) -> np.ndarray:
        return (std * generator.standard_normal(shape)).astype(np.float32)

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return normal(gain * inputs**-0.5, outputs, inputs)

    def norm(size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value, np.float32)

    vocab_size, hidden_size, mlp_size = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query_size, key_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", normal(1.0, vocab_size, hidden_size)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden_size)
        yield f"{layer}.self_attn.q_proj.weight", linear(query_size, hidden_size)
        yield f"{layer}.self_attn.k_proj.weight", linear(key_size, hidden_size)
        yield f"{layer}.self_attn.v_proj.weight", linear(key_size, hidden_size)
        yield f"{layer}.self_attn.o_proj.weight", linear(hidden_size, query_size, SUBLAYER_GAIN)
        yield f"{layer}.self_attn.q_norm.weight", norm(head_dim, QK_NORM)
        yield f"{layer}.self_attn.k_norm.weight", norm(head_dim, QK_NORM)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden_size)
        yield f"{layer}.mlp.gate_proj.weight", linear(mlp_size, hidden_size)
        yield f"{layer}.mlp.up_proj.weight", linear(mlp_size, hidden_size)
        yield f"{layer}.mlp.down_proj.weight", linear(hidden_size, mlp_size, SUBLAYER_GAIN)
    yield "model.norm.weight", norm(hidden_size)
    yield "lm_head.weight", normal(UNEMBED_STD, vocab_size, hidden_size)
