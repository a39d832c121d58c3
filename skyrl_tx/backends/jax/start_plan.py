"""The plan that the backend makes at its start, from the shapes of a model: without its weights, also without devices.

`skyrl-tx doctor` asks for the devices of this machine, `skyrl-tx plan` for devices that are elsewhere.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.kernel_choice import choose_kernels
from skyrl_tx.backends.jax.memory import (
    CacheBytes,
    MemoryPlan,
    choose_adapter_slots,
    choose_max_models,
    choose_training_plan,
    count_model_bytes,
    count_shards,
    find_longest_row,
    get_free_bytes,
    get_memory_layout,
    make_default_memory_plan,
    plan_sample_memory,
)
from skyrl_tx.backends.jax.sample.sampler_pool import LOWEST_RANK
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory, iter_ascending
from skyrl_tx.backends.jax.train.packing import choose_micro_batch_length
from skyrl_tx.backends.jax.training_costs import (
    DEFAULT_RANK,
    TrainingCosts,
    count_adapter_bytes,
    count_copied_expert_bytes,
    count_state_copies,
    estimate_costs,
)
from skyrl_tx.contract.backend import AbstractBackend, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.layers.kernels.registry import Kernels
from skyrl_tx.layers.parameter import Parameter, flatten, map_named
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout

_LOGITS = {"tpu": 4}
"""Arrays of the logits' size that a decode step has at the same time, by the compiler; on other devices one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The allocations and choices of `JaxBackend.start`. Bytes are of each device."""

    num_parameters: int
    dtype: str
    kernels: Kernels
    weight_bytes: int
    free_bytes: int | None
    """Memory that the weights leave; negative if they do not fit, None if devices do not report their memory."""
    num_adapter_slots: int
    """Adapter slots for sampling at the start, of the lowest rank."""
    pool_bytes: int
    samples: SampleMemory
    kv_bytes: int
    """The KV cache: pages and states."""
    slice_bytes: int
    """Temporary memory of a decode slice.

    That is of states, which it changes in copies, of the keys of its tokens, of logits, and of copies of experts' maps.
    """
    costs: TrainingCosts | None
    """None if devices do not report their memory."""
    passes: MemoryPlan
    pass_bytes: int
    """Temporary memory of a micro-batch; 0 if devices do not report their memory."""
    longest_row: int | None
    """The most tokens of an example in training by memory; None if devices do not report theirs."""
    offloaded_bytes: int
    """Memory of its host that a device needs for that example, or for the model's longest if that is shorter."""
    max_models: int
    model_bytes: int
    """Weights, gradient and moments of one model of the highest rank."""


def make_abstract_layout(config: MeshConfig) -> Layout:
    """Return a layout for shapes and shardings. Arrays cannot be placed on it."""
    axes = config.axes
    auto = (AxisType.Auto,) * len(axes)  # as those of a mesh of devices; since jax 0.11 the default is another
    without = AbstractMesh(tuple(axes.values()), tuple(axes), auto)
    return mesh.layout_from_mesh(cast(Mesh, without))  # a Mesh has more only for who places arrays


def plan_start(
    config: JaxConfig,
    layout: Layout,
    model: models.ModelConfig,
    dtype: np.dtype,
    *,
    platform: str,
    limit_bytes: int | None,
) -> StartPlan:
    """Plan as `JaxBackend.start` does, in its order: weights, sampler pool, KV cache, micro-batches, models.

    `platform` is as JAX names it. `limit_bytes` is the memory of each device; None for devices that do not report it,
    as CPUs do not.
    """
    kernels = choose_kernels(config, platform, dtype)
    described = models.describe_params(model)
    weight_bytes = count_bytes_per_device(described, layout, dtype)

    def make_params(used: int) -> models.DecoderParams:
        devices = frozenset({_PlannedDevice(limit_bytes, used)})
        planned = map_named(lambda _, parameter: _PlannedArray(parameter, dtype, devices), described)
        return replace(planned, layout=layout, kernels=kernels)

    params = make_params(weight_bytes)
    free = get_free_bytes(params)
    num_slots = choose_adapter_slots(config, params, model)
    pool_bytes = num_slots * count_adapter_bytes(model, LOWEST_RANK, get_memory_layout(params))
    params = make_params(weight_bytes + pool_bytes)
    samples = plan_sample_memory(config, params, model)
    room = CacheBytes.from_model(model, get_memory_layout(params), dtype.itemsize)
    positions = samples.num_pages * samples.page
    kv_bytes = (positions * room.position + samples.num_states * room.state) // layout.num_shards("batch")
    params = make_params(weight_bytes + pool_bytes + kv_bytes)
    num_rows, num_logits = samples.num_rows // layout.num_shards("batch"), _LOGITS.get(platform, 1) * model.vocab_size
    of_row = (
        room.state * count_state_copies(layout, model, platform)
        + config.decode_slice_tokens * room.position
        + num_logits * np.dtype(np.float32).itemsize
    )
    model_bytes = count_model_bytes(config, params, model)
    costs, pass_bytes, longest, offloaded_bytes = None, 0, None, 0
    if (left := get_free_bytes(params)) is None:
        passes = make_default_memory_plan(config)
    else:
        in_training = mesh.make_training_layout(layout)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        costs = estimate_costs(replace(shapes, layout=in_training), model, platform)
        passes = choose_training_plan(left, model_bytes, costs, config, in_training)
        tokens = -(-passes.micro_batch_tokens // count_shards(in_training))
        pass_bytes = costs.count_micro_batch_bytes(tokens, remat=passes.get_remat_policy(tokens))
        longest = find_longest_row(left - model_bytes, costs, passes, in_training)
        if passes.longest_row_policy is RematPolicy.OFFLOAD:
            tokens = -(-min(longest, model.max_context_length) // in_training.num_shards("tokens"))
            offloaded_bytes = costs.host_token * tokens if tokens > (passes.offload_above or 0) else 0
    return StartPlan(
        num_parameters=sum(int(np.prod(each.shape)) for each in flatten(described).values()),
        dtype=dtype.name,
        kernels=kernels,
        weight_bytes=weight_bytes,
        free_bytes=free,
        num_adapter_slots=num_slots,
        pool_bytes=pool_bytes,
        samples=samples,
        kv_bytes=kv_bytes,
        slice_bytes=num_rows * of_row + count_copied_expert_bytes(params, model, platform),
        costs=costs,
        passes=passes,
        pass_bytes=pass_bytes,
        longest_row=longest,
        offloaded_bytes=offloaded_bytes,
        max_models=choose_max_models(config, params, model),
        model_bytes=model_bytes,
    )


def count_bytes_per_device(described: models.DecoderParams, layout: Layout, dtype: np.dtype) -> int:
    """Return the bytes of the base weights on each device of a mesh."""
    return sum(
        int(np.prod(mesh.get_parameter_sharding(layout, each).shard_shape(each.shape))) * dtype.itemsize
        for each in flatten(described).values()
    )


class _PlannedDevice:
    """A device as `skyrl_tx.backends.jax.memory` reads it, after the allocation of `used` bytes."""

    def __init__(self, limit: int | None, used: int) -> None:
        self._limit = limit
        self._used = used
        self.id = 0

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._limit is None else {"bytes_limit": self._limit, "bytes_in_use": self._used}


class _PlannedArray:
    """The shape of an array that would be on devices."""

    def __init__(self, parameter: Parameter, dtype: np.dtype, devices: frozenset[_PlannedDevice]) -> None:
        self.shape, self.dtype = parameter.shape, dtype
        self.size = int(np.prod(parameter.shape))
        self.nbytes = self.size * dtype.itemsize
        self._devices = devices

    def devices(self) -> frozenset[_PlannedDevice]:
        return self._devices


WARM_UP_ID = "warm-up"

log = logging.getLogger(__name__)


def warm_up(
    backend: AbstractBackend,
    config: JaxConfig,
    scheduler: SampleScheduler,
    *,
    max_length: int,
    micro_batch_tokens: int,
    num_rows: int = 1,
) -> None:
    """Train and sample once in every shape with a temporary model. `num_rows` is the batch's number of shards."""
    started = time.monotonic()
    model, sampler = ModelId(WARM_UP_ID), SamplerId(WARM_UP_ID)
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=min(DEFAULT_RANK, config.max_lora_rank), seed=0)))
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))
    num_shapes = 0
    for length in iter_training_lengths(micro_batch_tokens // num_rows, max_length):
        batch = make_training_batch(model, length, max_length, num_rows)
        backend.forward(batch)
        backend.forward_backward(batch)
        num_shapes += 1
    backend.optim_step(model, OptimizerParams())
    lengths = PrefillShapes.from_config(config, max_length).iter_prompt_lengths(max_length)
    for length, each in itertools.product(lengths, (None, sampler)):
        backend.sample(_make_first_token_batch(each, length - 1))
    scheduler.compile_all(sampler)
    backend.drop_sampler(sampler)
    backend.delete_model(model)
    log.info("warm-up: %d training shapes and all sampling shapes in %.1f s", num_shapes, time.monotonic() - started)


def iter_training_lengths(budget: int, max_length: int) -> Iterator[int]:
    """Yield the length of every row shape of a micro-batch."""
    return iter_ascending(lambda size: choose_micro_batch_length(size, budget), max(budget, max_length))


def make_training_batch(model: ModelId, num_tokens: int, max_length: int, num_rows: int) -> PreparedModelPassBatch:
    """Return the examples of one micro-batch of `num_rows` rows of `num_tokens` tokens."""
    lengths = [min(max_length, num_tokens - start) for start in range(0, num_tokens, max_length)]
    examples = [
        PassExample(
            request_id=RequestId(WARM_UP_ID),
            model_id=model,
            tokens=np.zeros(length, np.int32),
            loss="cross_entropy",
            loss_inputs={"target_tokens": np.zeros(length, np.int32), "weights": np.ones(length, np.float32)},
            loss_config={},
        )
        for length in lengths * num_rows
    ]
    return PreparedModelPassBatch(examples=tuple(examples))


def _make_first_token_batch(sampler: SamplerId | None, prompt_length: int) -> PreparedSampleBatch:
    """Return a request for one token, which needs no slot."""
    request = SampleRequest(
        request_id=RequestId(WARM_UP_ID),
        sampler=sampler,
        prompt=np.zeros(prompt_length, np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=1, eos_stops=False),
        options=PromptOptions(logprobs=True),
    )
    return PreparedSampleBatch(requests=(request,))
