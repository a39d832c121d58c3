"""Adapters as files in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

The tensors are `base_model.model.<module>.lora_A.weight` [R, I] and `.lora_B.weight` [O, R]. The
update of a linear map is B A times `lora_alpha / r`. Experts are stored one by one
(`….mlp.experts.7.gate_proj`), or stacked per layer (`….mlp.experts.w1`, [E, R, I] and [E, O, R],
where E is 1 if all experts share the factor). `read_adapter` reads both.

`AdapterFiles` is any adapter, with the module names of its files. `AdapterFormat` converts between
files and the arrays of one base model, which are transposed, stacked over layers, and named by
target.

Legend: L layers, E experts, I inputs and O outputs of a linear map, R rank.
"""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skyrl_tx.contract.state_files import (
    CONFIG_FILE,
    LORA_A,
    LORA_B,
    PREFIX,
    TIED_UNEMBED_MODULE,
    WEIGHTS_FILE,
    adapter_config,
)
from skyrl_tx.layers.lora import AdapterWeights, LoraPair
from skyrl_tx.weights.adapter_factors import (
    AdapterError,
    Factors,
    convert_form,
    find_stack,
    fuse_modules,
    group_by_stack,
    is_shared,
    is_stack,
    stack_experts,
    suggest_expert_lora,
    unstack,
)
from skyrl_tx.weights.hf import locate_tensors
from skyrl_tx.weights.nesting import NOT_NESTED, Nesting, find_nesting
from skyrl_tx.weights.weight_map import FUSED_MAPS, FUSED_PARTS, FusedModules, Rows, expand_pattern

_A, _B, _BASE = LORA_A, LORA_B, ".base_layer.weight"

_WITHOUT_EFFECT = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping"),
        *("r", "lora_alpha", "use_rslora", "lora_dropout", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size"),
    }
)
"""Keys of adapter_config.json that may have any value in the last check of `read_config`.

They do not change the meaning of the LoRA factors, or other code reads them, such as `r` and
`lora_alpha`. The names are from PEFT 0.21. The config of an initialisation, for example
`eva_config`, may have any value because `init_lora_weights` says which initialisation was used.
"""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    # Other initialisations subtract the initial product of the factors from the base weights. Such
    # an adapter is wrong with unchanged base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
"""Keys that may change the meaning of the factors, with the values that do not."""
_UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})
"""The values that any other key may have, because they leave a feature of PEFT off."""

FLOATS = ("F16", "BF16", "F32", "F64")
"""The dtypes of factors."""
Tensors = Mapping[str, np.ndarray]
"""Host arrays by tensor name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A linear map that adapters can change, with A [*stack, I, R] and B [*stack, R, O].

    `stacks` are the leading dims of A and of B. `module` is the name in files, in which `{layer}`
    stands for each number in `layers`. If `layers` is None, it stands for all numbers from 0 on.
    """

    module: str
    stacks: tuple[tuple[int, ...], tuple[int, ...]]
    layers: tuple[int, ...] | None
    inputs: int
    outputs: int

    @property
    def leaf(self) -> str:
        """The last part of the module's name. `target_modules` of adapter_config.json lists it."""
        return self.module.rpartition(".")[2]

    def make_zeros(self, rank: int) -> LoraPair:
        """Return float32 factors that are zero."""
        a = np.zeros((*self.stacks[0], self.inputs, rank), np.float32)
        b = np.zeros((*self.stacks[1], rank, self.outputs), np.float32)
        return LoraPair(a=a, b=b)  # type: ignore[arg-type]

    def iterate_tensors(self, pair: LoraPair) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name of each tensor in files, with a view of its values in `pair`."""
        for factor, array, stack in zip((_A, _B), (np.asarray(pair.a), np.asarray(pair.b)), self.stacks, strict=True):
            for index, module in expand_pattern(self.module, stack, self.layers):
                yield f"{PREFIX}{module}{factor}", array[index].swapaxes(-1, -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFormat:
    """The adapter files of one base model: name and shape of each linear map, by target."""

    base_model: str
    modules: Mapping[str, TargetModule]
    fused: FusedModules = field(default_factory=dict[str, Mapping[str, Rows]])

    def to_tensors(self, weights: AdapterWeights, prefix: str = "") -> Tensors:
        """Return the tensors of the files as host arrays. Each name gets the prefix."""
        return {
            f"{prefix}{name}": np.ascontiguousarray(array)
            for target, pair in weights.items()
            for name, array in self.modules[target].iterate_tensors(pair)
        }

    def to_weights(
        self, tensors: Tensors, targets: tuple[str, ...], rank: int, prefix: str = "", *, any_form: bool = False
    ) -> AdapterWeights:
        """Return the weights of these tensors, the inverse of `to_tensors`.

        Maps that are not targets get zeros.

        With `any_form`, factors of experts are converted between shared and own if that changes no
        number. Raises AdapterError if a tensor is missing, unexpected or has another shape.
        """
        weights = {name: module.make_zeros(rank) for name, module in self.modules.items()}
        expected: set[str] = set()
        for target in targets:
            for name, destination in self.modules[target].iterate_tensors(weights[target]):
                # Find the tensor and check its shape.
                array = tensors.get(prefix + name)
                if array is None:
                    raise AdapterError(f"adapter: lacks tensor {prefix + name!r}")

                if any_form:
                    array = convert_form(array, destination.shape)
                if array.shape != destination.shape:
                    raise AdapterError(
                        f"adapter: tensor {prefix + name!r} is {array.shape}, this base needs {destination.shape}"
                        f"{suggest_expert_lora(array.shape, destination.shape)}"
                    )
                destination[...] = array
                expected.add(prefix + name)
        unexpected = sorted(name for name in tensors.keys() - expected if name.startswith(prefix))
        if unexpected:
            raise AdapterError(f"adapter: unexpected tensor {unexpected[0]!r}")
        return weights

    def read_targets(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the targets that an adapter_config.json lists.

        Raises AdapterError for an unknown module.
        """
        listed = config.get("target_modules")
        if not isinstance(listed, list) or not listed:
            raise AdapterError(f"adapter: {CONFIG_FILE} has target_modules = {listed!r}")
        known = list(dict.fromkeys(module.leaf for module in self.modules.values()))
        unknown = sorted(set(listed) - set(known))
        if unknown:
            raise AdapterError(f"adapter: target_modules has {unknown[0]!r}; this base model has {', '.join(known)}")
        return tuple(name for name, module in self.modules.items() if module.leaf in listed)

    def write_config(self, directory: Path, targets: tuple[str, ...], rank: int, alpha: float) -> None:
        """Write adapter_config.json into an existing directory."""
        leaves = (self.modules[name].leaf for name in targets)
        config = adapter_config(self.base_model, rank, leaves, alpha)
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    def with_factors(self, weights: AdapterWeights, factors: Mapping[str, Factors], b_scale: float) -> AdapterWeights:
        """Return copies of `weights` in which the given factors of modules are replaced.

        B is multiplied by `b_scale`.

        If experts share a factor in `weights`, their given factors must be equal. Raises
        AdapterError for a module or a shape that does not exist in `weights`.
        """
        weights = {name: LoraPair(a=np.array(p.a), b=np.array(p.b)) for name, p in weights.items()}  # type: ignore[arg-type]
        modules = {target: self.modules[target] for target in weights}
        views = {
            name: (view, module.stacks)
            for target, module in modules.items()
            for name, view in module.iterate_tensors(weights[target])
        }

        # Write the factors into views of the copies.
        for module, (a, b) in factors.items():
            stack, expert = find_stack(module)
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = b * np.float32(b_scale)
            if not np.isfinite(scaled).all() or (b.any() and not scaled.any()):
                raise AdapterError(f"lora_alpha / r makes the numbers of module {module!r} infinite or zero")
            for name, array in ((_A, a), (_B, scaled)):
                view, stacks = views.get(f"{PREFIX}{stack}{name}", (None, ()))
                if view is not None and expert is not None:
                    is_known = expert < max(stack[-1] for stack in stacks)
                    view = view[expert if len(view) > 1 else 0] if is_known else None

                if view is None:
                    known = ", ".join(sorted(target.leaf for target in self.modules.values()))
                    raise AdapterError(f"module {module!r} is not a trainable module of this base model ({known})")
                if view.shape != array.shape:
                    raise AdapterError(
                        f"{name.split('.')[1]} of {module!r} is {array.shape}, {self.base_model} needs {view.shape}"
                    )
                view[...] = array
        return weights


TIED_UNEMBED_NAMES: Mapping[str, str] = {"peft": "lm_head", "cookbook": TIED_UNEMBED_MODULE}
"""The module name of a tied unembedding in each layout.

PEFT, and other programs that read its files, find modules by their names in the Hugging Face model.
The layout "cookbook" also stacks the experts of each layer.
"""

_HOSTED_ATTENTION = (".attn.", ".self_attn.")
"""A part of module names in hosted adapters of gpt-oss, and the usual name instead of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter in memory: its `adapter_config.json`, and the two factors of each module.

    `base_layers` are copies of base weights. PEFT writes them if an adapter changes the
    unembedding.
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
        """The factor of the product B A.

        With `use_rslora` it is rank-stabilised (arXiv:2312.03732).
        """
        rank = math.sqrt(self.rank) if self.config.get("use_rslora") else self.rank
        return self.config["lora_alpha"] / rank

    @property
    def has_fused_parts(self) -> bool:
        """Whether the adapter changes single maps of fused modules.

        The base model knows which maps these are.
        """
        return any(module.rpartition(".")[2] in FUSED_PARTS for module in self.factors)

    def has_shared_factors(self, num_experts: int) -> bool:
        """Return whether the experts of each layer share A of gate and up, and B of down."""
        stacks = group_by_stack(self.factors)
        return all(len(pairs) == num_experts and is_shared(stack, pairs) for stack, pairs in stacks.items())

    @property
    def has_repeated_factors(self) -> bool:
        """Whether all experts of some layer have the same factor next to the hidden size."""
        stacks = group_by_stack(self.factors)
        return any(len(pairs) > 1 and is_shared(stack, pairs) for stack, pairs in stacks.items())

    def to_layout(
        self, layout: str, fused: FusedModules | None = None, nesting: Nesting = NOT_NESTED
    ) -> "AdapterFiles":
        """Return the adapter with the names of another layout.

        The layout "peft" needs the base model's `fused` and `nesting`.
        """
        names = {TIED_UNEMBED_MODULE: TIED_UNEMBED_NAMES[layout]}
        factors = {names.get(module, module): pair for module, pair in self.factors.items()}
        config = dict(self.config)
        if layout == "cookbook":
            factors = stack_experts(factors)
        else:
            factors = fuse_modules(factors, fused or {})
            factors = {nesting.add_prefix(module): pair for module, pair in factors.items()}
            config |= make_fused_patterns(config, {module.rpartition(".")[2] for module in factors})
        config["target_modules"] = list(dict.fromkeys(module.rpartition(".")[2] for module in factors))
        return replace(self, factors=factors, config=config)

    def write(self, directory: Path) -> None:
        """Write the adapter into an existing directory."""
        tensors = {
            f"{PREFIX}{module}{name}": np.ascontiguousarray(array)
            for module, pair in self.factors.items()
            for name, array in zip((_A, _B), pair, strict=True)
        }
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(dict(self.config), indent=2) + "\n", encoding="utf-8")

    def check_base_layers(self, base: Path, tensor_of: Mapping[str, str], *, is_tied: bool) -> None:
        """Raise AdapterError if `base_layers` differ from the base model.

        `tensor_of` has tensor names by target.
        """
        files = locate_tensors(base) if self.base_layers else {}
        nesting = find_nesting(files)
        for module, copy in self.base_layers.items():
            name = f"{module}.weight"
            if is_tied and name == tensor_of["unembed"]:
                name = tensor_of["embed"]
            name = nesting.add_prefix(name)
            if name not in files:
                raise AdapterError(f"adapter: it holds weights of {module!r}, which the base model does not have")
            with safe_open(files[name], framework="np") as file:
                ours = file.get_tensor(name)
            if ours.shape != copy.shape or not np.array_equal(ours.astype(copy.dtype), copy):
                raise AdapterError(
                    f"adapter: its base weights of {module!r} differ from the base model; it belongs to another model"
                )


def check_file(path: Path) -> Path:
    """Return `path`. Raises OSError if it exists and is not a regular file.

    For example, reading a pipe could block forever.
    """
    if path.exists() and not path.is_file():
        raise OSError("is not a regular file")
    return path


def read_config(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises AdapterError if it is invalid or may change the meaning of the factors.
    """
    try:
        config = json.loads(check_file(directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG_FILE}: not a JSON object")
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type {config['peft_type']!r} is not LORA")

    # Check rank and alpha.
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{CONFIG_FILE}: r = {rank!r} must be a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= sys.float_info.max:
        raise AdapterError(f"{CONFIG_FILE}: lora_alpha = {alpha!r} must be a number above 0")
    if config.get("use_rslora") not in (True, False, None):
        raise AdapterError(f"{CONFIG_FILE}: use_rslora = {config['use_rslora']!r} must be true or false")

    # Check all other keys. `rank_pattern` and `alpha_pattern` are accepted if they have the values
    # that `AdapterFiles.to_layout` writes for fused modules.
    ranks = config.get("rank_pattern")
    patterns = make_fused_patterns(config, ranks if isinstance(ranks, dict) else ())
    for key in sorted(config.keys() - _WITHOUT_EFFECT):
        if patterns["rank_pattern"] and config[key] == patterns.get(key, ()):
            continue
        if config[key] not in _NEUTRAL.get(key, _UNSET):
            raise AdapterError(
                f"{CONFIG_FILE}: {key} = {config[key]!r} is not supported, because it may change the numbers"
            )
    return config


def make_fused_patterns(config: Mapping[str, Any], leaves: Collection[str]) -> dict[str, dict[str, float]]:
    """Return `rank_pattern` and `alpha_pattern`: the ranks and alphas of fused modules.

    A fused module, for example `in_proj_qkv`, consists of multiple linear maps. Its rank is the sum
    of their ranks, and its alpha gives the same scale (alpha / rank) as the maps have. `leaves` are
    the last parts of the names of the adapter's modules.
    """
    num_maps = {leaf: number for leaf, number in FUSED_MAPS.items() if leaf in leaves}
    get_alpha_factor = math.sqrt if config.get("use_rslora") else float
    return {
        "rank_pattern": {leaf: config["r"] * number for leaf, number in num_maps.items()},
        "alpha_pattern": {leaf: config["lora_alpha"] * get_alpha_factor(number) for leaf, number in num_maps.items()},
    }


def read_adapter(directory: Path) -> AdapterFiles:
    """Read an adapter.

    Raises AdapterError for invalid files, and for settings that would change its numbers here.
    """
    config = read_config(directory)
    stored = read_tensors(directory / WEIGHTS_FILE, FLOATS)

    # Use the names of the text model alone.
    nesting = find_nesting([name.removeprefix(PREFIX) for name in stored])
    plain = {name: nesting.remove_prefix(name.removeprefix(PREFIX)) for name in stored if name.startswith(PREFIX)}
    names = {name: (PREFIX + plain[name]).replace(*_HOSTED_ATTENTION) if name in plain else name for name in stored}
    tensors = {names[name]: array for name, array in stored.items()}
    if len(tensors) < len(stored):
        raise AdapterError(f"{WEIGHTS_FILE}: holds modules both with and without {nesting.prefix!r} in their names")

    factors: dict[str, Factors] = {}
    base_layers = {name.removeprefix(PREFIX).removesuffix(_BASE): name for name in tensors if name.endswith(_BASE)}
    for name in sorted(tensors.keys() - base_layers.values()):
        if not (name.startswith(PREFIX) and name.endswith((_A, _B))):
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name!r} is not of the form {PREFIX}<module>{_A} or {_B}")
        module = name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)

        # Find the two factors of the module.
        a, b = (tensors.get(f"{PREFIX}{module}{factor}") for factor in (_A, _B))
        if a is None or b is None:
            raise AdapterError(f"{WEIGHTS_FILE}: module {module!r} has lora_A or lora_B, not both")
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if ".experts." in module and not a.size and not b.size:
            continue  # the hosted service writes an empty factor if the experts of a model lack a map

        # A stack has the factors of all experts of a layer.
        if is_stack(module) and a.ndim == b.ndim == 3:
            if not {len(a), len(b)} <= {1, max(len(a), len(b))}:
                raise AdapterError(f"{WEIGHTS_FILE}: module {module!r} has factors of {len(a)} and of {len(b)} experts")
            experts = unstack(module, a, b)
        else:
            experts = {module: (a, b)}
        for expert, (a, b) in experts.items():
            _check_factors(expert, a, b, (config.get("rank_pattern") or {}).get(expert.rpartition(".")[2], config["r"]))
        factors |= experts
    if not factors:
        raise AdapterError(f"{WEIGHTS_FILE}: holds no tensors")
    copies = {module: tensors[name] for module, name in base_layers.items()}
    return AdapterFiles(config=config, factors=factors, base_layers=copies)


def _check_factors(module: str, a: np.ndarray, b: np.ndarray, rank: int) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(f"{WEIGHTS_FILE}: module {module!r} has factors {a.shape} and {b.shape}, not of r = {rank}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(f"{WEIGHTS_FILE}: module {module!r} contains numbers that are not finite")


def read_tensors(path: Path, dtypes: Collection[str] = ("I32", *FLOATS)) -> Tensors:
    """Read a safetensors file. Raises AdapterError if it cannot be read or has other dtypes."""
    try:
        with safe_open(check_file(path), framework="np") as file:
            found = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  (no mapping)
            for name, dtype in found.items():
                if dtype not in dtypes:
                    raise AdapterError(f"{path.name}: tensor {name!r} is {dtype}; supported: {', '.join(dtypes)}")
            return {name: file.get_tensor(name) for name in found}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path.name}: {error}") from error
