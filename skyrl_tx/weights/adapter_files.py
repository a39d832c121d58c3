"""Adapters as files: PEFT's layout, read from anywhere, written under the names that a reader expects.

A tensor is `base_model.model.<module>.lora_A.weight` [R, I] or `.lora_B.weight` [O, R]; the map's update is B A times
`lora_alpha / r`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx.weights.weight_map import TIED_UNEMBED_MODULE

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_A, _B, _BASE = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "peft": {TIED_UNEMBED_MODULE: "lm_head"},
    "cookbook": {},
}
"""Modules that a layout names otherwise than we store them.

The cookbook's tools know the unembedding of a tied model as `unembed_tokens`; PEFT and whoever reads its files find
modules by their names in the Hugging Face model, where it is `lm_head`, tied or not.
"""

# What an adapter may say that would change its numbers, with the values under which it does not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
}


class AdapterError(ValueError):
    """The files are no adapter that we can use; the text names the file, the key or the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter in memory: its `adapter_config.json`, and the two factors of each module.

    `base_layers` are copies of base weights, which PEFT puts beside the adapter of an unembedding.
    """

    config: Mapping[str, Any]
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    base_layers: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    @property
    def rank(self) -> int:
        """The rank of all factors."""
        return self.config["r"]

    @property
    def scale(self) -> float:
        """What the product of two factors is multiplied with (rank-stabilised: arXiv:2312.03732)."""
        rank = math.sqrt(self.rank) if self.config.get("use_rslora") else self.rank
        return self.config["lora_alpha"] / rank

    def in_layout(self, layout: str) -> "AdapterFiles":
        """Return the same adapter under the names of a layout."""
        names = LAYOUTS[layout]
        factors = {names.get(module, module): pair for module, pair in self.factors.items()}
        targets = list(dict.fromkeys(module.rpartition(".")[2] for module in factors))
        return replace(self, factors=factors, config={**self.config, "target_modules": targets})

    def write(self, directory: Path) -> None:
        """Write into an existing directory."""
        tensors = dict(self._tensors())
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for module, (a, b) in self.factors.items():
            yield f"{PREFIX}{module}{_A}", np.ascontiguousarray(a)
            yield f"{PREFIX}{module}{_B}", np.ascontiguousarray(b)


def read_adapter(directory: Path) -> AdapterFiles:
    """Read an adapter; raises AdapterError for what is none, or would not give its own numbers here."""
    config = _read_config(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path}: {error}") from error
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    base_layers = {name.removeprefix(PREFIX).removesuffix(_BASE): name for name in tensors if name.endswith(_BASE)}
    for name in sorted(tensors.keys() - base_layers.values()):
        if not (name.startswith(PREFIX) and name.endswith((_A, _B))):
            raise AdapterError(f"{path}: tensor {name!r} is not of the form {PREFIX}<module>{_A} or {_B}")
        module = name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)
        pair = tuple(tensors.get(f"{PREFIX}{module}{factor}") for factor in (_A, _B))
        if pair[0] is None or pair[1] is None:
            raise AdapterError(f"{path}: module {module!r} has lora_A or lora_B, not both")
        a, b = (np.asarray(array, np.float32) for array in pair)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != config["r"] or b.shape[1] != config["r"]:
            raise AdapterError(
                f"{path}: module {module!r} has factors {a.shape} and {b.shape}, not of r = {config['r']}"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise AdapterError(f"{path}: module {module!r} holds numbers that are not finite")
        factors[module] = a, b
    if not factors:
        raise AdapterError(f"{path}: holds no tensors")
    copies = {module: tensors[name] for module, name in base_layers.items()}
    return AdapterFiles(config=config, factors=factors, base_layers=copies)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: not a JSON object")
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path}: peft_type {config['peft_type']!r} is not LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{path}: r = {rank!r} is no rank")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
        raise AdapterError(f"{path}: lora_alpha = {alpha!r} must be a number above 0")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise AdapterError(f"{path}: {key} = {config[key]!r} is not supported; supported is {neutral[0]!r}")
    return config
