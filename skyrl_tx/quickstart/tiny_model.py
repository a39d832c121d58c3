"""The tiny model: Qwen3 in Hugging Face format, made in a second out of random numbers and the excerpt.

It knows nothing until it is trained. Its scales were chosen so that a LoRA of rank 32 over these frozen random weights
learns fast: embeddings of deviation 1 (each token is told apart at once), outputs of both sub-layers halved (the
residual stream keeps the token), query and key norms at 1.5 (heads look at few places), and an unembedding of its own
that is nearly flat (training begins close to the uniform loss).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from skyrl_tx.quickstart.questions import load_excerpt
from skyrl_tx.quickstart.tokenizer import END_OF_TEXT, TURN_END, train_tokenizer, write_tokenizer

VOCAB_SIZE = 1024
HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
MLP_SIZE = 256
MAX_LENGTH = 2048  # tokens
ROPE_THETA = 1000.0  # short texts: small angles would tell neighbours apart too weakly

UNEMBED_STD = 0.05
SUBLAYER_GAIN = 0.5
QK_NORM = 1.5

SEED = 0


def write_tiny_model(directory: Path) -> Path:
    """Write model and tokenizer into `directory`, made if need be, and return it; the bytes are the same every time."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = [text for question in load_excerpt().train for text in (question.text, question.answer)]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    write_tokenizer(tokenizer, directory, max_length=MAX_LENGTH)
    end_of_text, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    generation = {"eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
    save_file(dict(_tensors()), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors() -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor by its Hugging Face name; linear maps are [out, in]."""
    generator = np.random.Generator(np.random.Philox(key=SEED))

    def normal(std: float, *shape: int) -> np.ndarray:
        return (std * generator.standard_normal(shape)).astype(np.float32)

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return normal(gain * inputs**-0.5, outputs, inputs)

    def norm(size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value, np.float32)

    query_size, key_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", normal(1.0, VOCAB_SIZE, HIDDEN_SIZE)
    for index in range(NUM_LAYERS):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(HIDDEN_SIZE)
        yield f"{layer}.self_attn.q_proj.weight", linear(query_size, HIDDEN_SIZE)
        yield f"{layer}.self_attn.k_proj.weight", linear(key_size, HIDDEN_SIZE)
        yield f"{layer}.self_attn.v_proj.weight", linear(key_size, HIDDEN_SIZE)
        yield f"{layer}.self_attn.o_proj.weight", linear(HIDDEN_SIZE, query_size, SUBLAYER_GAIN)
        yield f"{layer}.self_attn.q_norm.weight", norm(HEAD_DIM, QK_NORM)
        yield f"{layer}.self_attn.k_norm.weight", norm(HEAD_DIM, QK_NORM)
        yield f"{layer}.post_attention_layernorm.weight", norm(HIDDEN_SIZE)
        yield f"{layer}.mlp.gate_proj.weight", linear(MLP_SIZE, HIDDEN_SIZE)
        yield f"{layer}.mlp.up_proj.weight", linear(MLP_SIZE, HIDDEN_SIZE)
        yield f"{layer}.mlp.down_proj.weight", linear(HIDDEN_SIZE, MLP_SIZE, SUBLAYER_GAIN)
    yield "model.norm.weight", norm(HIDDEN_SIZE)
    yield "lm_head.weight", normal(UNEMBED_STD, VOCAB_SIZE, HIDDEN_SIZE)
