"""Read and check `adapter_config.json`, which has the settings of a LoRA adapter in PEFT's layout."""

import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.state_files import CONFIG_FILE
from skyrl_tx.weights.weight_map import FUSED_MAPS


class AdapterError(UserError):
    """The files are not an adapter that this server supports.

    The message names the file, key or tensor.
    """


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
