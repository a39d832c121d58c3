"""Merge an adapter into its base model, one checkpoint file at a time."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from skyrl_tx.weights.hf import (
    INDEX_FILE,
    SINGLE_FILE,
    get_tensor_slice,
    locate_tensors,
    open_file,
    read_json,
)
from skyrl_tx.weights.nesting import Nesting, find_nesting
from skyrl_tx.weights.peft import AdapterError, AdapterFiles, Factors
from skyrl_tx.weights.tensor_file import find_packing, find_plain_names
from skyrl_tx.weights.weight_map import (
    TIED_UNEMBED_MODULE,
    WeightMap,
    WeightRule,
    find_fused,
    fit_to_checkpoint,
)

DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_NOT_COPIED = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of one linear map.

    Without a rule, the map is a whole tensor [O, I]. With a rule, the map is a part of a tensor,
    for example of a tensor that stacks the maps of all experts.
    """

    pair: Factors
    rule: WeightRule | None = None
    expert: int | None = None

    def get_part(self, tensor: np.ndarray) -> np.ndarray | None:
        """Return the map [I, O], or None if there is no such expert."""
        if self.rule is None:
            return tensor.T
        if self.expert is None:
            return self.rule.view(tensor)
        experts = self.rule.view(tensor)
        return experts[self.expert] if self.expert < len(experts) else None

    def put(self, tensor: np.ndarray, part_IO: np.ndarray) -> None:
        """Write the map into the tensor."""
        if self.rule is None:
            tensor[...] = part_IO.T
        elif self.expert is None:
            self.rule.put(tensor, part_IO)
        else:
            self.rule.view(tensor)[self.expert] = part_IO


def merge_adapter(
    base: Path,
    weights: WeightMap,
    adapter: AdapterFiles,
    out: Path,
    dtype: str | None = None,
    *,
    is_tied: bool = False,
) -> None:
    """Write the base model with the adapter merged into it to the empty directory `out`.

    Sums are computed in float32 and stored in the dtype of the checkpoint, or in `dtype`. Packed
    tensors are stored unpacked, in bfloat16 or `dtype`, because few bits could not represent an
    update. If the adapter changes a tied unembedding, the merged model has an untied unembedding,
    because the input embedding must not change.

    `weights` come from `ModelFamily.bind_weights`. `is_tied` says whether embeddings are tied, as
    `read_model` decides. Raises AdapterError for an adapter that does not fit, and
    CheckpointError for a base model that cannot be read.
    """
    config = read_json(base, "config.json")
    located = locate_tensors(base)
    weights = fit_to_checkpoint(weights, located)
    tensor_of = {rule.path: rule.tensor for rule in weights}
    embed, unembed = tensor_of["embed"], tensor_of["unembed"]
    # Find the updates of each tensor.
    text = config.get("text_config", {})
    pending = _collect_updates(weights, adapter, unembed, find_nesting(located))
    unties = is_tied and unembed in pending

    # Copy the tensors file by file, and add the updates.
    written: dict[str, str] = {}
    num_bytes = 0
    files = find_plain_names(located)
    opened = {path: open_file(path) for path in set(located.values())}
    for path in sorted(set(files.values())):
        tensors: dict[str, np.ndarray] = {}

        for name in sorted(name for name in files if files[name] == path):
            if is_tied and name == unembed:
                continue
            tensor = get_tensor_slice(opened, located, name)
            array = tensor[tuple(slice(0, size) for size in tensor.get_shape())]
            if unties and name == embed:
                tensors[unembed] = _cast(
                    _add_updates(unembed, array, pending.pop(unembed), adapter.scale), array, dtype
                )

            merged = _add_updates(name, array, pending.pop(name), adapter.scale) if name in pending else array
            unpacked = None if find_packing(name, located) is None else "bfloat16"
            tensors[name] = _cast(merged, array, dtype or unpacked)

        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(tensors, out / path.name, {"format": "pt"})
        written |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(array.nbytes for array in tensors.values())
    if pending:
        raise AdapterError(f"adapter: the base model has no tensor {min(pending)!r} for it to change")

    # Write the index, and copy the tokenizer and other files.
    if set(written.values()) != {SINGLE_FILE}:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(written.items()))}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in base.iterdir():
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(path, out / path.name)

    # Write the changed configuration.
    changed = dict(config)
    if not is_tied or unties:
        changed["tie_word_embeddings"] = False
        if text:
            text = changed["text_config"] = {**text, "tie_word_embeddings": False}
    if files.keys() != located.keys():
        changed.pop("quantization_config", None)
        if text:
            changed["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    if dtype is not None:
        changed.pop("torch_dtype", None)
        changed["dtype"] = dtype
    (out / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _collect_updates(
    weights: WeightMap, adapter: AdapterFiles, unembed: str, nesting: Nesting
) -> dict[str, list[_Update]]:
    """Return the updates of each tensor, by tensor name."""
    updates: dict[str, list[_Update]] = {}
    for module, pair in adapter.factors.items():
        if (fused := find_fused(weights, module)) is not None:
            rule, name, expert = fused
            updates.setdefault(name, []).append(_Update(pair, rule, expert))
        else:
            name = f"{nesting.add_prefix(module)}.weight"
            updates[unembed if module == TIED_UNEMBED_MODULE else name] = [_Update(pair)]
    return updates


def _add_updates(name: str, array: np.ndarray, updates: Sequence[_Update], scale: float) -> np.ndarray:
    summed = np.array(array, np.float32)
    for update in updates:
        a_RI, b_OR = update.pair
        part_IO = update.get_part(summed)
        if part_IO is None:
            raise AdapterError(f"adapter: {name!r} has no expert {update.expert} in the base model for it to change")
        if part_IO.shape != (a_RI.shape[1], b_OR.shape[0]):
            shape = part_IO.shape[::-1]
            raise AdapterError(f"adapter: {name!r} is {shape} in the base model; factors {b_OR.shape}, {a_RI.shape}")
        update.put(summed, part_IO + (np.float32(scale) * (b_OR @ a_RI)).T)
    return summed


def _cast(array: np.ndarray, stored: np.ndarray, dtype: str | None) -> np.ndarray:
    """Return an array in `dtype`, or else in the dtype of `stored`. Integers are unchanged.

    `stored` is the array of the checkpoint, before updates were added.
    """
    if stored.dtype.kind in "iub":
        return array
    return array.astype(stored.dtype if dtype is None else DTYPES[dtype])
