"""Writes the tiny models `tiny` (Qwen3) and `tiny-qwen3_5` (Qwen3.5) in Hugging Face format.

The weights are random. The configuration and the tokenizer are files of the package, in `tiny_model`. The tokenizer is
byte-level BPE, trained on the excerpt of GSM8K, with the special tokens of Qwen3 as single ids; `python -m
tests.support.tiny_tokenizer` trains it. `rope_theta` is small because texts are short, so that neighbouring positions
differ enough.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from skyrl_tx.launch.settings import Architecture

TINY_MODELS: Mapping[str, Architecture] = {"tiny": "qwen3", "tiny-qwen3_5": "qwen3_5"}
"""The built-in names of `--base-model`, and the architecture of each model."""
TITLES: Mapping[Architecture, str] = {"qwen3": "Qwen3", "qwen3_5": "Qwen3.5"}
"""The architectures as they are printed."""

_KEYS: Mapping[Architecture, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",  # `qwen3_5` is the model with images
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
}
"""Keys of config.json that differ from the Qwen3 configuration in the package, by architecture."""

_UNEMBED_STD = 0.05
_SUBLAYER_GAIN = 0.5
_QK_NORM = 1.5
_DECAYS = 1 / 64, 1.0
"""The range of exp(A_log) over the heads. The decay per token is about 0.7 times this value."""

_SEED = 0

_Tensors = Iterator[tuple[str, np.ndarray]]


def find_architecture(directory: Path) -> str | None:
    """Return the architecture of the tiny model in a directory, or None if the directory has no model."""
    config = directory / "config.json"
    return json.loads(config.read_text())["model_type"].removesuffix("_text") if config.exists() else None


@contextmanager
def open_built_in_model(base_model: str) -> Generator[str]:
    """Yield a temporary directory with the files of a built-in model such as `tiny`. Yield other names unchanged."""
    if base_model not in TINY_MODELS:
        yield base_model
        return
    with TemporaryDirectory(prefix="skyrl_tx-") as directory:
        yield str(write_tiny_model(Path(directory) / base_model, TINY_MODELS[base_model]))


def write_tiny_model(directory: Path, architecture: Architecture = "qwen3") -> Path:
    """Write the model and the tokenizer into `directory`, and return it. The bytes are the same every time."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in (files("skyrl_tx.tools.quickstart") / "tiny_model").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | _KEYS[architecture]
    if _KEYS[architecture]:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(_TinyWeights(config).draw_tensors()), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class _TinyWeights:
    """Draws the random weights of a model, layer by layer, under their names in Hugging Face checkpoints.

    Linear maps are [out, in]. The scales are chosen so that LoRA of rank 32 on frozen random weights learns fast:

    - Embeddings have standard deviation 1, so that tokens differ.
    - The outputs of both sub-layers are halved, so that the token stays in the residual stream.
    - Query and key norms are 1.5, so that heads attend to few positions.
    - The unembedding is nearly flat, so that training starts close to the uniform loss.
    - The heads of a delta net forget after about 1, 6, 23 and 92 tokens.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._generator = np.random.Generator(np.random.Philox(key=_SEED))
        self._hidden_size: int = config["hidden_size"]
        self._is_gated = "layer_types" in config  # Qwen3.5: gated attention, and norms stored minus 1

    def draw_tensors(self) -> _Tensors:
        """Yield the name and the value of every tensor."""
        config, hidden_size = self._config, self._hidden_size
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        yield "model.embed_tokens.weight", self._draw_normal(1.0, config["vocab_size"], hidden_size)
        for index, kind in enumerate(kinds):
            layer = f"model.layers.{index}"
            yield f"{layer}.input_layernorm.weight", self._draw_norm(hidden_size)
            mixer = self._draw_attention if kind == "full_attention" else self._draw_delta_net
            yield from mixer(layer)
            yield f"{layer}.post_attention_layernorm.weight", self._draw_norm(hidden_size)
            yield from self._draw_feed_forward(layer)
        yield "model.norm.weight", self._draw_norm(hidden_size)
        yield "lm_head.weight", self._draw_normal(_UNEMBED_STD, config["vocab_size"], hidden_size)

    def _draw_attention(self, layer: str) -> _Tensors:
        config, head_dim = self._config, self._config["head_dim"]
        query_size, key_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        net = f"{layer}.self_attn"
        yield f"{net}.q_proj.weight", self._draw_linear(query_size * (2 if self._is_gated else 1), self._hidden_size)
        yield f"{net}.k_proj.weight", self._draw_linear(key_size, self._hidden_size)
        yield f"{net}.v_proj.weight", self._draw_linear(key_size, self._hidden_size)
        yield f"{net}.o_proj.weight", self._draw_linear(self._hidden_size, query_size, _SUBLAYER_GAIN)
        yield f"{net}.q_norm.weight", self._draw_norm(head_dim, _QK_NORM)
        yield f"{net}.k_norm.weight", self._draw_norm(head_dim, _QK_NORM)

    def _draw_delta_net(self, layer: str) -> _Tensors:
        config, width = self._config, self._config["linear_conv_kernel_dim"]
        num_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        value_size = num_heads * value_dim
        channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value_size
        net = f"{layer}.linear_attn"
        yield f"{net}.in_proj_qkv.weight", self._draw_linear(channels, self._hidden_size)
        yield f"{net}.in_proj_z.weight", self._draw_linear(value_size, self._hidden_size)
        yield f"{net}.in_proj_a.weight", self._draw_linear(num_heads, self._hidden_size)
        yield f"{net}.in_proj_b.weight", self._draw_linear(num_heads, self._hidden_size)
        yield f"{net}.conv1d.weight", self._draw_normal(width**-0.5, channels, 1, width)
        yield f"{net}.A_log", np.log(np.geomspace(*_DECAYS, num_heads)).astype(np.float32)
        yield f"{net}.dt_bias", np.zeros(num_heads, np.float32)
        yield f"{net}.norm.weight", np.ones(value_dim, np.float32)
        yield f"{net}.out_proj.weight", self._draw_linear(self._hidden_size, value_size, _SUBLAYER_GAIN)

    def _draw_feed_forward(self, layer: str) -> _Tensors:
        mlp_size = self._config["intermediate_size"]
        yield f"{layer}.mlp.gate_proj.weight", self._draw_linear(mlp_size, self._hidden_size)
        yield f"{layer}.mlp.up_proj.weight", self._draw_linear(mlp_size, self._hidden_size)
        yield f"{layer}.mlp.down_proj.weight", self._draw_linear(self._hidden_size, mlp_size, _SUBLAYER_GAIN)

    def _draw_normal(self, std: float, *shape: int) -> np.ndarray:
        return (std * self._generator.standard_normal(shape)).astype(np.float32)

    def _draw_linear(self, outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return self._draw_normal(gain * inputs**-0.5, outputs, inputs)

    def _draw_norm(self, size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value - 1.0 if self._is_gated else value, np.float32)
