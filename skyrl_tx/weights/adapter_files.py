"""Adapters as files: PEFT's layout, read from anywhere, written under the names that a reader expects.

A tensor is `base_model.model.<module>.lora_A.weight` [R, I] or `.lora_B.weight` [O, R]; the map's update is B A times
`lora_alpha / r`. Experts are modules of their own (`….mlp.experts.7.gate_proj`), or those of a layer are stacked
(`….mlp.experts.w1`, [E, R, I] and [E, O, R]); both are read.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from skyrl_tx.weights.weight_map import STACKED_EXPERTS, TIED_UNEMBED_MODULE

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
Factors = tuple[np.ndarray, np.ndarray]
"""A [R, I] and B [O, R] of one module."""
_A, _B, _BASE = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a reader of adapters names the modules whose names readers do not agree on."""

    tied_unembed: str
    stacks_experts: bool


LAYOUTS: Mapping[str, Layout] = {
    "peft": Layout(tied_unembed="lm_head", stacks_experts=False),
    "cookbook": Layout(tied_unembed=TIED_UNEMBED_MODULE, stacks_experts=True),
}
"""PEFT, and whoever reads its files, find modules by their names in the Hugging Face model."""

_EXPERT_OF = {stacked: name for name, stacked in STACKED_EXPERTS.items()}
_EXPERT = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(STACKED_EXPERTS)})")
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_EXPERT_OF)})")

# What an adapter says that does not change what its factors mean, as PEFT 0.21 has it. What its factors were begun
# with is told by `init_lora_weights` alone; the settings of each kind of beginning say no more.
_WITHOUT_EFFECT = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping"),
        *("r", "lora_alpha", "use_rslora", "lora_dropout", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size"),
    }
)
# What would change it, with the values under which it does not; of what is not named here those that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    # The others take what the factors begin with out of the base weights, so that they belong on changed ones.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


class AdapterError(ValueError):
    """The files are no adapter that we can use; the text names the file, the key or the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter in memory: its `adapter_config.json`, and the two factors of each module.

    `base_layers` are copies of base weights, which PEFT puts beside the adapter of an unembedding.
    """

    config: Mapping[str, Any]
    factors: Mapping[str, Factors]
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
        wanted = LAYOUTS[layout]
        names = {TIED_UNEMBED_MODULE: wanted.tied_unembed}
        factors = {names.get(module, module): pair for module, pair in self.factors.items()}
        if wanted.stacks_experts:
            factors = _stacked(factors)
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
    factors: dict[str, Factors] = {}
    base_layers = {name.removeprefix(PREFIX).removesuffix(_BASE): name for name in tensors if name.endswith(_BASE)}
    for name in sorted(tensors.keys() - base_layers.values()):
        if not (name.startswith(PREFIX) and name.endswith((_A, _B))):
            raise AdapterError(f"{path}: tensor {name!r} is not of the form {PREFIX}<module>{_A} or {_B}")
        module = name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)
        pair = tuple(tensors.get(f"{PREFIX}{module}{factor}") for factor in (_A, _B))
        if pair[0] is None or pair[1] is None:
            raise AdapterError(f"{path}: module {module!r} has lora_A or lora_B, not both")
        a, b = (np.asarray(array, np.float32) for array in pair)
        if (stack := _STACK.fullmatch(module)) and a.ndim == b.ndim == 3:
            experts = _unstacked(stack, a, b, path)
        else:
            experts = {module: (a, b)}
        for each, (a, b) in experts.items():
            _check(each, a, b, config["r"], path)
        factors |= experts
    if not factors:
        raise AdapterError(f"{path}: holds no tensors")
    copies = {module: tensors[name] for module, name in base_layers.items()}
    return AdapterFiles(config=config, factors=factors, base_layers=copies)


def _check(module: str, a: np.ndarray, b: np.ndarray, rank: int, path: Path) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(f"{path}: module {module!r} has factors {a.shape} and {b.shape}, not of r = {rank}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(f"{path}: module {module!r} holds numbers that are not finite")


def place_in_stack(module: str) -> tuple[str, int | None]:
    """Return which stack holds a module, and where; a module that is none of an expert stands by itself."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    prefix, index, leaf = match.groups()
    return f"{prefix}.{STACKED_EXPERTS[leaf]}", int(index)


def _unstacked(stack: re.Match[str], a: np.ndarray, b: np.ndarray, path: Path) -> dict[str, Factors]:
    """Give each expert its own factors; one that all share has a leading 1."""
    prefix, leaf = stack.groups()
    num_experts = max(len(a), len(b))
    if not {len(a), len(b)} <= {1, num_experts}:
        raise AdapterError(f"{path}: module {stack.group()!r} has factors of {len(a)} and of {len(b)} experts")
    each_a, each_b = (np.broadcast_to(array, (num_experts, *array.shape[1:])) for array in (a, b))
    return {f"{prefix}.{index}.{_EXPERT_OF[leaf]}": (each_a[index], each_b[index]) for index in range(num_experts)}


def _stacked(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Put the experts of a layer together, in their order; experts without an update get one of zeros."""
    found: dict[str, Factors] = {}
    experts: dict[str, dict[int, Factors]] = {}
    for module, pair in factors.items():
        stack, index = place_in_stack(module)
        if index is None:
            found[module] = pair
        else:
            experts.setdefault(stack, {})[index] = pair
    for module, pairs in experts.items():
        a, b = next(iter(pairs.values()))
        empty = np.zeros_like(a), np.zeros_like(b)
        all_pairs = [pairs.get(index, empty) for index in range(max(pairs) + 1)]
        found[module] = np.stack([a for a, _ in all_pairs]), np.stack([b for _, b in all_pairs])
    return found


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
    for key in sorted(config.keys() - _WITHOUT_EFFECT):
        if config[key] not in _NEUTRAL.get(key, _NOTHING):
            raise AdapterError(f"{path}: {key} = {config[key]!r} is not supported, as it may change the numbers")
    return config
