"""The tiny models in Hugging Face format, with random weights and a trained tokenizer: Qwen3 and Qwen3.5.

Configuration and tokenizer are files of the package, in `tiny_model`. The tokenizer is byte-level BPE learned from the
excerpt of GSM8K, with the special tokens of Qwen3 as single ids; `python -m tests.support.tiny_tokenizer` trains it.
The configuration's `rope_theta` is small, because texts are short: neighbouring positions must differ enough.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.numpy import save_file

from skyrl_tx.launch.settings import Architecture
from skyrl_tx.tools.quickstart.tiny_weights import TinyWeights

TINY_MODELS: Mapping[str, Architecture] = {"tiny": "qwen3", "tiny-qwen3_5": "qwen3_5"}
"""The architectures of the models that `--base-model` knows by these names."""
TITLES: Mapping[Architecture, str] = {"qwen3": "Qwen3", "qwen3_5": "Qwen3.5"}
"""The names of the architectures in text."""

_KEYS: Mapping[Architecture, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",  # without the suffix, that of the model with images
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
"""Config keys of each architecture in place of those of Qwen3, whose config.json is in the package."""


def architecture_in(directory: Path) -> str | None:
    """Return the architecture of the tiny model in a directory; None if it has no model."""
    config = directory / "config.json"
    return json.loads(config.read_text())["model_type"].removesuffix("_text") if config.exists() else None


@contextmanager
def built_in_as_directory(base_model: str) -> Generator[str]:
    """Yield a temporary directory with the model if it is a built-in one, else its name as it is."""
    if base_model not in TINY_MODELS:
        yield base_model
        return
    with TemporaryDirectory(prefix="skyrl_tx-") as directory:
        yield str(write_tiny_model(Path(directory) / base_model, TINY_MODELS[base_model]))


def write_tiny_model(directory: Path, architecture: Architecture = "qwen3") -> Path:
    """Write model and tokenizer into `directory`, created if missing, and return it; the bytes never vary."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in (files("skyrl_tx.tools.quickstart") / "tiny_model").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | _KEYS[architecture]
    if _KEYS[architecture]:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(TinyWeights(config).tensors()), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
