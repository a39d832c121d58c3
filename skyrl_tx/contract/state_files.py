"""The files of a model's state: PEFT's adapter layout, and two files for optimizer and gradient.

    adapter_config.json           always
    adapter_model.safetensors     weights
    gradient.safetensors          the same names; no tensors if there is no accumulated gradient
    optimizer.safetensors         the same names with the prefixes first_moment. and second_moment., and step, int32 []

The weights of a linear map are `base_model.model.<module>.lora_A.weight` [R, I] and `.lora_B.weight` [O, R], float32,
where `<module>` is its name in the Hugging Face model. The update of the map is B A times `lora_alpha` / R. A new A is
uniform in ±1/sqrt(I), a new B zero. The adapter of an unembedding that is tied to the embedding has the name
`TIED_UNEMBED_MODULE`.

A backend that writes these files, and whose `base_model_hash` is that of `hash_of_base_model`, opens the checkpoints of
all others that do. Its own layout it may have, with another hash. The files need safetensors and nothing else of ours.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl_tx.contract.backend import StatePart

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES: Mapping[StatePart, str] = {
    StatePart.WEIGHTS: WEIGHTS_FILE,
    StatePart.OPTIMIZER: "optimizer.safetensors",
    StatePart.GRADIENT: "gradient.safetensors",
}

PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
FIRST_MOMENT, SECOND_MOMENT, STEP = "first_moment.", "second_moment.", "step"
TIED_UNEMBED_MODULE = "model.unembed_tokens"
"""How an adapter names the unembedding of a model that has no lm_head of its own."""

ALPHA = 32.0
"""LoRA's alpha. It is not part of the protocol; hosted adapters have 32 for every rank."""

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64


def adapter_config(base_model: str, rank: int, leaves: Iterable[str], alpha: float = ALPHA) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        base_model: its path or its id on the hub, as the server was started with.
        rank: of all factors.
        leaves: the last parts of the names of the adapted modules, such as "q_proj".
        alpha: `lora_alpha`.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(leaves)),
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
    """Return `Capabilities.base_model_hash` of a Hugging Face checkpoint in a directory.

    It is a hash of config.json and of the weights, these by their headers and samples spread over each file: a few MB
    of any model. Training changes all of a file, so samples tell two models apart. Raises OSError or ValueError if
    config.json cannot be read.
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
