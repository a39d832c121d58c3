"""Asks JAX for its devices, and plans the memory of a model on them without loading its weights.

A program of its own, so that the caller can limit its time, and so that what it takes of a device is released at its
end: `python -m skyrl_tx.doctor.probe` reads a `Question` as JSON from standard input and writes an `Answer`.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import (
    DEFAULT_MICRO_BATCH_TOKENS,
    MemoryPlan,
    costs_of,
    free_bytes,
    max_models,
    num_adapter_slots,
    plan_for,
    plan_sample_memory,
)
from skyrl_tx.backends.jax.sample.adapter_pool import LOWEST_RANK
from skyrl_tx.doctor.probe_messages import Answer, Device, Plan, Question
from skyrl_tx.layers.parameter import Parameter, flatten, map_named
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.weights import hf


class _PlannedDevice:
    """A device as `skyrl_tx.backends.jax.memory` reads it, after the allocation of `used` bytes."""

    def __init__(self, device: Any, used: int) -> None:
        self._device = device
        self._used = used
        self.id = device.id

    def memory_stats(self) -> dict[str, int] | None:
        stats = self._device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        return {"bytes_limit": stats["bytes_limit"], "bytes_in_use": self._used}


class _PlannedArray:
    """The shape of an array that would be on devices."""

    def __init__(self, parameter: Parameter, dtype: np.dtype, devices: frozenset[_PlannedDevice]) -> None:
        self.shape, self.dtype = parameter.shape, dtype
        self.size = int(np.prod(parameter.shape))
        self.nbytes = self.size * dtype.itemsize
        self._devices = devices

    def devices(self) -> frozenset[_PlannedDevice]:
        return self._devices


def examine(question: Question) -> Answer:
    """Return the devices and the plan."""
    config = JaxConfig.model_validate(question.backend_config)
    try:
        devices = [_describe(device) for device in jax.devices()]
    except RuntimeError as error:
        return Answer(devices=[], problem=" ".join(str(error).split()))
    try:
        layout = mesh.make_layout(config.mesh)
        if not question.base_model:
            return Answer(devices=devices)
        directory = hf.resolve(question.base_model, with_weights=False)
        family = models.find_family(content := hf.read_json(directory, "config.json"))
        model = models.in_form(family.config_from_hf(content), config.expert_lora)
        mesh.check_divides(layout, model)
        file_bytes = _size_of_weights(question.base_model, directory) if config.load_format == "auto" else None
        has_end = bool(hf.read_eos_token_ids(directory))
        plan = _plan(config, layout, model)
    except mesh.MeshError as error:
        return Answer(devices=devices, problem=str(error), setting="--backend-config.mesh")
    except (models.UnsupportedModel, hf.CheckpointError) as error:
        return Answer(devices=devices, problem=str(error), setting="--base-model")
    return Answer(devices=devices, plan=msgspec.structs.replace(plan, file_bytes=file_bytes, has_end=has_end))


def _describe(device: Any) -> Device:
    stats = device.memory_stats() or {}
    return Device(kind=device.device_kind, platform=device.platform, limit_bytes=stats.get("bytes_limit"))


def _size_of_weights(base_model: str, directory: Path) -> int | None:
    """Return the size of the weight files. Raises CheckpointError if some are missing from a directory of the user."""
    if not Path(base_model).expanduser().is_dir() and not any(directory.glob("*.safetensors")):
        return None
    return sum(path.stat().st_size for path in set(hf.locate_tensors(directory).values()))


def _plan(config: JaxConfig, layout: Layout, model: models.ModelConfig) -> Plan:
    """Plan as `JaxBackend.start` does, in its order: weights, sampler pool, KV cache, micro-batches, models."""
    described = models.describe_params(model)
    dtype = np.dtype(mesh.choose_dtype(config, layout))
    assert layout.mesh is not None
    weight_bytes = sum(
        int(np.prod(mesh.parameter_sharding(layout, each).shard_shape(each.shape))) * dtype.itemsize
        for each in flatten(described).values()
    )

    def params_after(used: int) -> models.DecoderParams:
        devices = frozenset(_PlannedDevice(device, used) for device in layout.mesh.devices.flat)  # type: ignore[union-attr]
        planned = map_named(lambda _, parameter: _PlannedArray(parameter, dtype, devices), described)
        return replace(planned, layout=layout)

    params = params_after(weight_bytes)
    free = free_bytes(params)
    pool = jax.tree.leaves(models.adapter_shapes(model, LOWEST_RANK).weights)
    pool_bytes = num_adapter_slots(config, params, model) * sum(leaf.size * leaf.dtype.itemsize for leaf in pool)
    params = params_after(weight_bytes + pool_bytes)
    samples = plan_sample_memory(config, params, model)
    token_bytes = (
        samples.prompt_bytes // samples.prompt_tokens
    )  # of prompts, which are not split by rows as the cache is
    params = params_after(weight_bytes + pool_bytes + samples.tokens * token_bytes // layout.num_shards("batch"))
    if (left := free_bytes(params)) is None:
        passes = MemoryPlan(config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS, bool(config.remat))
    else:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        costs = costs_of(shapes, model)
        passes = plan_for(left - samples.prompt_bytes, costs, config, num_shards=layout.num_shards("batch"))
    return Plan(
        num_parameters=sum(int(np.prod(each.shape)) for each in flatten(described).values()),
        dtype=dtype.name,
        weight_bytes=weight_bytes,
        free_bytes=-1 if free is None else free,
        max_context_length=model.max_context_length,
        kv_tokens=samples.tokens,
        max_length=samples.max_length,
        micro_batch_tokens=passes.micro_batch_tokens,
        is_remat=passes.remat,
        max_models=max_models(config, params, model, reserved=samples.prompt_bytes),
        file_bytes=None,
        has_end=True,
    )


def main() -> None:
    """Answer the question on standard input."""
    logging.disable(logging.WARNING)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(examine(question)))


if __name__ == "__main__":
    main()
