"""A base model and an adapter as one model: read, added and written one file of the checkpoint at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from skyrl_tx.weights.adapter_files import AdapterError, AdapterFiles
from skyrl_tx.weights.hf import INDEX_FILE, REDUNDANT_TENSORS, locate_tensors, read_json
from skyrl_tx.weights.weight_map import TIED_UNEMBED_MODULE, WeightMap

DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_NOT_COPIED = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})


@dataclass(slots=True)
class _Written:
    """What the index of a sharded checkpoint has to say."""

    files: dict[str, str] = field(default_factory=dict[str, str])
    num_bytes: int = 0

    def save(self, tensors: Mapping[str, np.ndarray], path: Path) -> None:
        """Write one file."""
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, {"format": "pt"})
        self.files |= dict.fromkeys(tensors, path.name)
        self.num_bytes += sum(array.nbytes for array in tensors.values())


def merge(base: Path, weights: WeightMap, adapter: AdapterFiles, out: Path, dtype: str | None = None) -> None:
    """Write into an empty directory what `base` computes with the adapter, as a model without one.

    Sums are taken in float32 and stored in the type that the checkpoint has, or in `dtype`. A tied unembedding that
    the adapter changes becomes one of its own, as the input embedding must stay what it is. Raises AdapterError for an
    adapter that does not fit, CheckpointError for a base model that cannot be read.
    """
    config = read_json(base, "config.json")
    tensor_of = {rule.path: rule.tensor for rule in weights}
    embed, unembed = tensor_of["embed"], tensor_of["unembed"]
    is_tied = bool(config.get("tie_word_embeddings", False))
    pending = {_tensor(module, unembed): pair for module, pair in adapter.factors.items()}
    unties = is_tied and unembed in pending
    written = _Written()
    for path, names in _by_file(locate_tensors(base)):
        tensors: dict[str, np.ndarray] = {}
        with safe_open(path, framework="np") as file:
            for name in names:
                if is_tied and name in REDUNDANT_TENSORS:
                    continue
                array = file.get_tensor(name)
                if unties and name == embed:
                    tensors[unembed] = _stored(_sum(unembed, array, pending.pop(unembed), adapter.scale), array, dtype)
                if name in pending:
                    tensors[name] = _stored(_sum(name, array, pending.pop(name), adapter.scale), array, dtype)
                else:
                    tensors[name] = _stored(array, array, dtype)
        written.save(tensors, out / path.name)
    if pending:
        raise AdapterError(f"adapter: the base model has no tensor {min(pending)!r} for it to change")
    if len(set(written.files.values())) > 1:
        index = {"metadata": {"total_size": written.num_bytes}, "weight_map": dict(sorted(written.files.items()))}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _copy_the_rest(base, out)
    changed = dict(config)
    if unties:
        changed["tie_word_embeddings"] = False
    if dtype is not None:
        changed.pop("torch_dtype", None)
        changed["dtype"] = dtype
    (out / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _tensor(module: str, unembed: str) -> str:
    return unembed if module == TIED_UNEMBED_MODULE else f"{module}.weight"


def _by_file(files: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    for path in sorted(set(files.values())):
        yield path, sorted(name for name, file in files.items() if file == path)


def _sum(name: str, array: np.ndarray, pair: tuple[np.ndarray, np.ndarray], scale: float) -> np.ndarray:
    a_RI, b_OR = pair
    if array.shape != (b_OR.shape[0], a_RI.shape[1]):
        raise AdapterError(f"adapter: {name!r} is {array.shape} in the base model; factors {b_OR.shape}, {a_RI.shape}")
    return np.asarray(array, np.float32) + np.float32(scale) * (b_OR @ a_RI)


def _stored(array: np.ndarray, before: np.ndarray, dtype: str | None) -> np.ndarray:
    """Return an array in the type it shall be stored in; whole numbers stay as they are."""
    if before.dtype.kind in "iub":
        return array
    return array.astype(before.dtype if dtype is None else DTYPES[dtype])


def _copy_the_rest(base: Path, out: Path) -> None:
    """Copy tokenizer and configuration."""
    for path in base.iterdir():
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(path, out / path.name)
