"""The files of a model's state: an adapter in PEFT's layout, optimizer moments and a gradient.

    adapter_config.json           always
    adapter_model.safetensors     weights
    gradient.safetensors          the same names; no tensors if there is no accumulated gradient
    optimizer.safetensors         the same names with the prefixes first_moment. and second_moment., and step, int32 []

The adapter of a linear map has the tensors `base_model.model.<module>.lora_A.weight` [R, I] and
`.lora_B.weight` [O, R], float32, where `<module>` is the name of the map in the Hugging Face model.
The update of the map is B A times `lora_alpha` / R. A new A is uniform in ±1/sqrt(I), and a new B
is zero. If the unembedding is tied to the embedding, its adapter has the name
`TIED_UNEMBED_MODULE`.

A backend that writes these files and reports the hash from `hash_of_base_model` as its
`base_model_hash` can open the checkpoints of all other backends that do so. A backend may use
another layout, with another hash. Reading and writing the files requires only the safetensors
library.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl_tx.contract.backend import StatePart

CONFIG_FILE = "adapter_config.json"
"""The file of `adapter_config`."""
WEIGHTS_FILE = "adapter_model.safetensors"
"""The file of the weights."""
FILES: Mapping[StatePart, str] = {
    StatePart.WEIGHTS: WEIGHTS_FILE,
    StatePart.OPTIMIZER: "optimizer.safetensors",
    StatePart.GRADIENT: "gradient.safetensors",
}
"""The safetensors file of each part."""

PREFIX = "base_model.model."
"""Starts the name of every tensor of an adapter, before the name of the module."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""End the names of the two factors of an adapter."""
FIRST_MOMENT, SECOND_MOMENT, STEP = "first_moment.", "second_moment.", "step"
"""The prefixes of the two moments of a tensor, and the name of the number of steps."""
TIED_UNEMBED_MODULE = "model.unembed_tokens"
"""The name of the unembedding in an adapter if it is tied to the embedding."""

ALPHA = 32.0
"""LoRA's alpha.

The protocol does not specify it; adapters of the hosted service have 32 for every rank.
"""

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64


def adapter_config(base_model: str, rank: int, leaves: Iterable[str], alpha: float = ALPHA) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        base_model: path or hub id of the base model, as given to the server.
        rank: the rank of all factors.
        leaves: the last parts of the names of the adapted modules, for example "q_proj".
        alpha: the value of `lora_alpha`.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(leaves)),
        # Features that are not used.
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }


def hash_of_base_model(directory: Path, *, with_weights: bool = True) -> str:
    """Return the `Capabilities.base_model_hash` of a Hugging Face checkpoint in a directory.

    The hash covers config.json and, of the weights, the name, the size and samples spread over each
    file: a few MB for a model of any size. This tells models apart, because training changes a file
    everywhere. Raises OSError or ValueError if config.json cannot be read.
    """
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")) if with_weights else ():
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
