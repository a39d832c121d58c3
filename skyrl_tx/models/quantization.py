"""The quantization configs of checkpoints whose packed tensors the server reads."""

from collections.abc import Mapping
from typing import Any

from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.weights.scaled import FP8_BLOCK, INT4_GROUP

_NAME = "quantization_config"
_Accepted = Mapping[str, tuple[Any, ...]]

_FP8: _Accepted = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # activations are not quantized here
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
}
_INT4: _Accepted = {
    "format": ("pack-quantized",),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_INT4_GROUP: _Accepted = {"format": (None, "pack-quantized")}
_INT4_WEIGHTS: _Accepted = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (INT4_GROUP,),
    "dynamic": (False, None),
}
_WITHOUT_EFFECT = frozenset(
    {
        *("quant_method", "scale_fmt", "modules_to_not_convert"),  # which tensors are packed is seen by their names
        *("config_groups", "global_compression_ratio", "ignore", "quantization_status", "version"),
        *("targets", "weights", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)


def refuse_other_quantization(given: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModel, naming the key and its value, unless tensors are plain, in FP8 blocks or INT4 groups."""
    if given is None:
        return
    method = given.get("quant_method")
    if method == "fp8":
        _refuse_other(_NAME, given, _FP8)
    elif method == "compressed-tensors":
        _refuse_other(_NAME, given, _INT4)
        for name, group in (given.get("config_groups") or {}).items():
            path = f"{_NAME}.config_groups.{name}"
            _refuse_other(path, group, _INT4_GROUP)
            _refuse_other(f"{path}.weights", group.get("weights") or {}, _INT4_WEIGHTS)
    else:
        raise UnsupportedModel(f"config.json has {_NAME}.quant_method = {method!r}; supported: 'fp8', of DeepSeek-V3")


def _refuse_other(path: str, given: Mapping[str, Any], accepted: _Accepted) -> None:
    """Raise UnsupportedModel for a key with a value that is not accepted; an unknown one must be None."""
    for key in sorted({*given, *accepted} - _WITHOUT_EFFECT):
        values = accepted.get(key, (None,))
        if given.get(key) not in values:
            raise UnsupportedModel(f"config.json has {path}.{key} = {given.get(key)!r}; supported: {values[0]!r}")
