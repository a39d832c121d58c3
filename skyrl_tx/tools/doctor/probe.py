"""Asks JAX for its devices, and makes the memory plan of a model without loading its weights.

This is a program: `python -m skyrl_tx.tools.doctor.probe` reads a `ProbeQuestion` as JSON from standard input and
writes a `ProbeAnswer` to standard output. As a separate process it can be given a time limit, and its device memory is
released when it ends.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import get_offload_limit, read_memory_limit
from skyrl_tx.backends.jax.start_plan import plan_start
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.tools.doctor.machine import Device, Plan, ProbeAnswer, ProbeQuestion, answer_parent
from skyrl_tx.weights import hf


def answer_question(question: ProbeQuestion) -> ProbeAnswer:
    """Return the devices and the plan. Problems become part of the answer."""
    # Find the devices.
    config = JaxConfig.model_validate(question.backend_config)
    try:
        devices = [_describe(device) for device in jax.devices()]
    except RuntimeError as error:
        return ProbeAnswer(devices=[], problem=" ".join(str(error).split()))

    # Plan the model on them.
    try:
        layout = mesh.make_layout(config.mesh)
        if not question.base_model:
            return ProbeAnswer(devices=devices)
        directory = hf.resolve_model(question.base_model, with_weights=False)
        model = replace(models.read_model(directory)[1], expert_lora=config.expert_lora)
        mesh.check_divisible(layout, model)

        file_bytes = _count_weight_bytes(question.base_model, directory) if config.load_format == "auto" else None
        has_end = bool(hf.read_eos_token_ids(directory))
        plan = _make_plan(config, layout, model)
    except mesh.MeshError as error:
        return ProbeAnswer(devices=devices, problem=str(error), setting="--backend-config.mesh")
    except (models.UnsupportedModel, hf.CheckpointError) as error:
        return ProbeAnswer(devices=devices, problem=str(error), setting="--base-model")
    return ProbeAnswer(devices=devices, plan=msgspec.structs.replace(plan, file_bytes=file_bytes, has_end=has_end))


def _describe(device: Any) -> Device:
    stats = device.memory_stats() or {}
    return Device(kind=device.device_kind, platform=device.platform, limit_bytes=stats.get("bytes_limit"))


def _count_weight_bytes(base_model: str, directory: Path) -> int | None:
    """Return the size of the weight files, or None if a model of the hub is not downloaded yet.

    Raises CheckpointError if files are missing from a directory that the user named.
    """
    if not Path(base_model).expanduser().is_dir() and not any(directory.glob("*.safetensors")):
        return None
    return sum(path.stat().st_size for path in set(hf.locate_tensors(directory).values()))


def _make_plan(config: JaxConfig, layout: Layout, model: models.ModelConfig) -> Plan:
    # The plan that the backend would make.
    assert layout.mesh is not None
    devices = list(layout.mesh.devices.flat)
    plan = plan_start(
        config,
        layout,
        model,
        np.dtype(mesh.choose_dtype(config, layout)),
        platform=mesh.get_platform(layout),
        limit_bytes=read_memory_limit(devices),
        offload_bytes=get_offload_limit(devices),
    )

    return Plan(
        num_parameters=plan.num_parameters,
        dtype=plan.dtype,
        weight_bytes=plan.weight_bytes,
        free_bytes=-1 if plan.free_bytes is None else plan.free_bytes,
        # Limits
        max_context_length=model.max_context_length,
        kv_tokens=plan.samples.tokens,
        max_length=plan.samples.max_length,
        micro_batch_tokens=plan.passes.micro_batch_tokens,
        is_remat=plan.passes.remat,
        max_models=plan.max_models,
        host_weight_bytes=plan.host_weight_bytes,
        host_bytes=plan.host_bytes,
        file_bytes=None,
        has_end=True,
    )


if __name__ == "__main__":
    answer_parent(answer_question)
