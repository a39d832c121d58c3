"""Reads an adapter from outside, and writes it in the form that the server trains.

`skyrl-tx import` calls `read_import`. The API process runs this module as a child process, because
it does not load JAX itself, and because a hostile file must not take its memory. The child reads a
JSON object from standard input, and writes the result as one to standard output.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.contract.state_files import ALPHA, CONFIG_FILE, PREFIX, WEIGHTS_FILE
from skyrl_tx.models import UnsupportedModel, read_model
from skyrl_tx.models.adapters import choose_expert_lora, fit_adapter, get_trained_targets, make_adapter_format
from skyrl_tx.weights import hf, peft

_FLOAT_BYTES = 4
_ENTRY_BYTES = 160
"""Bytes of a tensor's entry in the header of a safetensors file, without its name."""


def read_import(
    directory: Path, source: str, base_model: str, lora: LoraSpec | None = None
) -> tuple[LoraSpec, Callable[[Path], None]]:
    """Read an adapter. Return its LoRA settings, and a function that writes its files.

    Args:
        directory: The directory of the adapter, in PEFT's layout.
        source: Hub id or directory of the base model.
        base_model: The name of the base model in the files that are written.
        lora: The settings that the adapter must have. The default are the rank and the groups of
            modules of the adapter.

    Raises:
        AdapterError: The adapter cannot be read or does not fit.
        UnsupportedModel, CheckpointError, OSError: The base model cannot be read.
    """
    adapter = peft.read_adapter(directory)
    if lora is not None and lora.rank != adapter.rank:
        raise peft.AdapterError(f"{CONFIG_FILE}: r = {adapter.rank} must be the rank of lora_config, {lora.rank}")
    family, model = read_model(hf.resolve_model(source, with_weights=False))
    if adapter.base_layers:
        tensors = {rule.path: rule.tensor for rule in family.weights}
        adapter.check_base_layers(hf.resolve_model(source), tensors, is_tied=model.tied_embeddings)

    # Convert the adapter to the modules and ranks that the server trains.
    model = replace(model, expert_lora=choose_expert_lora(model, adapter))
    layout = make_adapter_format(model, family.weights, base_model)
    lora, weights = fit_adapter(model, layout, adapter, lora)

    def write(folder: Path) -> None:
        save_file(dict(layout.to_tensors(weights)), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        layout.write_config(folder, tuple(weights), lora.rank, ALPHA)

    return lora, write


def compute_max_bytes(source: str, lora: LoraSpec) -> int:
    """Return the maximum size of the weights file of an adapter with these settings.

    The file has float32 factors. Each expert has its own, and fused modules are stored as PEFT
    stores them, with a B for all their maps. Raises like `read_import` for the base model.
    """
    family, model = read_model(hf.resolve_model(source, with_weights=False))
    layout = make_adapter_format(replace(model, expert_lora="own"), family.weights, source)
    num_bytes = 0
    for target in get_trained_targets(model, lora):
        module = layout.modules[target]
        num_fused = max((len(parts) for parts in layout.fused.values() if module.leaf in parts), default=1)
        num_a, num_b = (math.prod(stack) for stack in module.stacks)
        num_floats = num_a * module.inputs + num_b * module.outputs * num_fused
        num_bytes += num_floats * lora.rank * _FLOAT_BYTES
        num_bytes += (num_a + num_b) * (len(PREFIX) + len(module.module) + _ENTRY_BYTES)
    return num_bytes


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a request of the API process.

    With `directory`, an adapter is converted into the existing directory `out`. Without it,
    `max_bytes` is computed. The result has the key `refused` if the adapter is wrong, or
    `unavailable` if the base model cannot be read.
    """
    source, lora = request["source"], LoraSpec(**request["lora"])
    try:
        if "directory" not in request:
            return {"max_bytes": compute_max_bytes(source, lora)}
        _, write = read_import(Path(request["directory"]), source, request["base_model"], lora)
        write(Path(request["out"]))
    except peft.AdapterError as error:
        text = error.message.removeprefix("adapter: ")
        is_named = text.startswith((CONFIG_FILE, WEIGHTS_FILE))
        return {"refused": text if is_named else f"{WEIGHTS_FILE}: {text}"}
    except (UnsupportedModel, hf.CheckpointError, OSError) as error:
        return {"unavailable": str(error)}
    return {}


if __name__ == "__main__":
    os.nice(10)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
