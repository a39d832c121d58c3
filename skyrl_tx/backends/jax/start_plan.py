"""Plan the start of the backend, and warm it up.

`plan_start` computes the allocations and choices of `JaxBackend.start` from the shapes of a model
and the total memory of devices. How much memory is free changes nothing, so each start of a server
has the same plan: its programs are in the compilation cache, and its results are bit-equal. The
plan is complete before the weights are loaded, so programs are compiled meanwhile. `skyrl-tx doctor`
makes the plan for the devices of this machine, and `skyrl-tx plan` for any devices.

`warm_up` runs every common shape once, so that all programs are compiled before the server is
ready.
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
from skyrl_tx.backends.jax.host_memory import count_host_weight_bytes, format_gib
from skyrl_tx.backends.jax.kernel_choice import can_share_prefixes, choose_kernels, count_moe_layers
from skyrl_tx.backends.jax.memory import (
    CacheBytes,
    choose_adapter_slots,
    choose_max_models,
    count_model_bytes,
    count_planned_bytes,
    count_shards,
    find_longest_row,
    get_free_bytes,
    get_memory_layout,
    plan_sample_memory,
    plan_training_memory,
)
from skyrl_tx.backends.jax.memory_plan import MemoryPlan
from skyrl_tx.backends.jax.sample.sampler_pool import LOWEST_RANK
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory, iter_ascending
from skyrl_tx.backends.jax.train.packing import choose_micro_batch_length
from skyrl_tx.backends.jax.train.shared_prefixes import SHARING_VERSION
from skyrl_tx.backends.jax.train.training_programs import TrainingPrograms
from skyrl_tx.backends.jax.train.training_state import pad_rank
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
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.layers.kernels.registry import Kernels
from skyrl_tx.layers.parameter import Parameter, flatten, map_named
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout

WARM_UP_ID = "warm-up"
_NUM_LOGITS = {"tpu": 4}
"""How many arrays of the logits' size a decode step has at the same time; elsewhere 1."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The allocations and choices of `JaxBackend.start`. All bytes are on each device."""

    num_parameters: int
    dtype: str
    kernels: Kernels
    shares_prefixes: bool
    """Whether training can compute the common beginning of examples once."""
    weight_bytes: int
    free_bytes: int | None
    """Memory that the weights leave.
    Negative if they do not fit, None if devices do not report their memory."""
    num_adapter_slots: int
    """Slots of the sampler pool at the start."""
    pool_rank: int
    """The rank of the sampler pool at the start."""
    pool_bytes: int
    """Memory of the sampler pool."""
    samples: SampleMemory
    kv_bytes: int
    """Memory of the KV cache: pages and states."""
    slice_bytes: int
    """Temporary memory of a decode slice.

    It consists of copies of states, the keys and values of new tokens, logits, and copies of the
    weights of experts.
    """
    costs: TrainingCosts | None
    """Memory costs of training. None if devices do not report their memory."""
    passes: MemoryPlan
    pass_bytes: int
    """Temporary memory of a micro-batch. 0 if devices do not report their memory."""
    longest_row: int | None
    """The longest training example that fits, in tokens.
    None if devices do not report their memory."""
    offloaded_bytes: int
    """Host memory that each device needs to offload the longest training example.
    It has `longest_row` tokens, but at most the model's context. 0 if it is not offloaded."""
    max_models: int
    model_bytes: int
    """Weights, gradient and moments of one model of the highest rank."""
    host_weight_bytes: int
    """Host memory of the weights, if devices do not report their memory."""
    host_bytes: int
    """Host memory that the KV cache and the models in training may take in time.
    This counts only if devices do not report their memory."""

    def check_weights_fit(self) -> None:
        """Raise UserError if the weights do not fit on the devices."""
        if self.free_bytes is not None and self.free_bytes < 0:
            raise UserError(
                f"--base-model: its weights take {format_gib(self.weight_bytes)} on each device, which has "
                f"{format_gib(self.weight_bytes + self.free_bytes)}. Choose a smaller model, or use more devices: "
                "`skyrl-tx plan` says how many"
            )

    def make_fingerprint(self, model: models.ModelConfig) -> dict[str, str]:
        """Return the choices that change the last bits of results, for the fingerprint of the backend."""
        kernels, samples = self.kernels, self.samples
        return {
            "dtype": self.dtype,
            "attention_kernel": kernels.attention_name,
            "pages_kernel": kernels.pages_name,
            **({"experts_kernel": kernels.experts_name} if count_moe_layers(model) else {}),
            "shared_prefixes": SHARING_VERSION if self.shares_prefixes else "off",
            "sample_slots": f"{samples.num_slots} of {samples.tokens} tokens",
        }


def make_abstract_layout(config: MeshConfig) -> Layout:
    """Return a layout without devices.

    The layout gives shapes and shardings, but no array can be placed on it.
    """
    axes = config.axes
    axis_types = (AxisType.Auto,) * len(axes)  # as in a Mesh; AbstractMesh has another default since jax 0.11
    abstract_mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types)
    return mesh.layout_from_mesh(cast(Mesh, abstract_mesh))  # what a Mesh has in addition places arrays


def plan_start(
    config: JaxConfig,
    layout: Layout,
    model: models.ModelConfig,
    dtype: np.dtype,
    *,
    platform: str,
    limit_bytes: int | None,
    offload_bytes: int | None = None,
) -> StartPlan:
    """Plan the start, and log the choices.

    The order is: weights, sampler pool, KV cache, micro-batches, models in training.

    Args:
        config: The settings of the backend.
        layout: The layout of sampling, which may be abstract.
        model: The model's config.
        dtype: Type of the base weights.
        platform: `cpu`, `gpu` or `tpu`.
        limit_bytes: Memory of each device; None for devices that do not report it, such as CPUs.
        offload_bytes: Host memory that each device may offload to. None means no limit.

    Raises UserError if `offload` is configured and `offload_bytes` is 0.
    """
    config = config.with_platform_defaults(platform)
    kernels = choose_kernels(config, platform, dtype)
    described = models.describe_params(model)
    weight_bytes = count_bytes_per_device(described, layout, dtype)

    def make_params(used: int) -> models.DecoderParams:
        devices = frozenset({_PlannedDevice(platform, limit_bytes, used)})
        planned = map_named(lambda _, parameter: _PlannedArray(parameter, dtype, devices), described)
        return replace(planned, layout=layout, kernels=kernels)

    # Sampler pool
    params = make_params(weight_bytes)
    free = get_free_bytes(params)
    num_slots = choose_adapter_slots(config, params, model)
    pool_rank = LOWEST_RANK
    if config.warmup or limit_bytes is not None:  # samplers of the default rank then find their memory and programs
        pool_rank = pad_rank(min(DEFAULT_RANK, config.max_lora_rank))
    pool_bytes = num_slots * count_adapter_bytes(model, pool_rank, get_memory_layout(params))

    # Costs of training: the KV cache leaves memory for them
    in_training, costs = mesh.make_training_layout(layout), None
    if free is not None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        costs = estimate_costs(replace(shapes, layout=in_training), model, platform)

    # KV cache
    params = make_params(weight_bytes + pool_bytes)
    samples = plan_sample_memory(config, params, model, costs)
    cache = CacheBytes.from_model(model, get_memory_layout(params), dtype.itemsize)
    kv_bytes = cache.count(samples) // layout.num_shards("batch")

    # Decode slices
    num_rows = samples.num_rows // layout.num_shards("batch")
    num_logits = _NUM_LOGITS.get(platform, 1) * model.vocab_size
    row_bytes = (
        cache.state * count_state_copies(layout, model, platform)
        + config.decode_slice_tokens * cache.position
        + num_logits * np.dtype(np.float32).itemsize
    )

    # Training
    params = make_params(weight_bytes + pool_bytes + kv_bytes)
    model_bytes = count_model_bytes(config, params, model)
    trained = replace(params, layout=in_training)
    passes = plan_training_memory(config, trained, model, costs, offload_bytes=offload_bytes)
    pass_bytes, longest, offloaded_bytes = 0, None, 0
    left = get_free_bytes(params)
    if left is not None and costs is not None:
        tokens = -(-passes.micro_batch_tokens // count_shards(in_training))
        pass_bytes = costs.count_micro_batch_bytes(tokens, remat=passes.get_remat_policy(tokens))
        longest = find_longest_row(left - model_bytes, costs, passes, in_training, offload_bytes)
        if passes.longest_row_policy is RematPolicy.OFFLOAD:
            tokens = -(-min(longest, model.max_context_length) // in_training.num_shards("tokens"))
            offloaded_bytes = costs.host_token_bytes * tokens if tokens > (passes.offload_above or 0) else 0

    # Models in training, and the plan in host memory
    max_models = choose_max_models(config, params, model)
    host_bytes = count_planned_bytes(config, params, model, samples, max_models)

    return StartPlan(
        num_parameters=sum(int(np.prod(parameter.shape)) for parameter in flatten(described).values()),
        dtype=dtype.name,
        kernels=kernels,
        shares_prefixes=not layout.is_sharded and can_share_prefixes(kernels, model),
        weight_bytes=weight_bytes,
        free_bytes=free,
        num_adapter_slots=num_slots,
        pool_rank=pool_rank,
        pool_bytes=pool_bytes,
        samples=samples,
        kv_bytes=kv_bytes,
        # Temporary memory of sampling, then training
        slice_bytes=num_rows * row_bytes + count_copied_expert_bytes(params, model, platform),
        costs=costs,
        passes=passes,
        pass_bytes=pass_bytes,
        longest_row=longest,
        offloaded_bytes=offloaded_bytes,
        max_models=max_models,
        model_bytes=model_bytes,
        # Host memory, if devices report none
        host_weight_bytes=count_host_weight_bytes(params),
        host_bytes=host_bytes,
    )


def count_bytes_per_device(described: models.DecoderParams, layout: Layout, dtype: np.dtype) -> int:
    """Return the bytes of the base weights on each device of a mesh."""
    return sum(
        int(np.prod(mesh.get_parameter_sharding(layout, parameter).shard_shape(parameter.shape))) * dtype.itemsize
        for parameter in flatten(described).values()
    )


class _PlannedDevice:
    """A device with `used` allocated bytes, and the attributes that `memory` reads."""

    def __init__(self, platform: str, limit: int | None, used: int) -> None:
        self.platform, self.id, self.process_index = platform, 0, jax.process_index()
        self._limit = limit
        self._used = used

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._limit is None else {"bytes_limit": self._limit, "bytes_in_use": self._used}


class _PlannedArray:
    """An array on planned devices: shape, type and size, but no values."""

    def __init__(self, parameter: Parameter, dtype: np.dtype, devices: frozenset[_PlannedDevice]) -> None:
        self.shape, self.dtype = parameter.shape, np.dtype(np.float32) if parameter.is_float32 else dtype
        self.size = int(np.prod(parameter.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self._devices = devices

    def devices(self) -> frozenset[_PlannedDevice]:
        return self._devices


def warm_up(
    backend: AbstractBackend,
    config: JaxConfig,
    scheduler: SampleScheduler,
    programs: TrainingPrograms | None,
    *,
    max_length: int,
    micro_batch_tokens: int,
    num_rows: int = 1,
) -> None:
    """Train and sample once in every common shape, with a temporary model.

    With `programs`, the usual programs are being compiled in parallel, and other likely programs
    continue in the background. Without, all programs are compiled one after another. `num_rows` is
    the number of rows in a training micro-batch, one for each shard of the batch.
    """
    started = time.monotonic()
    model, sampler = ModelId(WARM_UP_ID), SamplerId(WARM_UP_ID)
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=min(DEFAULT_RANK, config.max_lora_rank), seed=0)))
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))

    # Training. The gradient of a second batch is added to the first one.
    budget = micro_batch_tokens // num_rows
    for length in iter_training_lengths(budget, max_length) if programs is None else (budget, budget):
        batch = make_training_batch(model, length, max_length, num_rows)
        backend.forward_backward(batch)
        if programs is None:
            backend.forward(batch)
    backend.gradient_norm(model)
    backend.optim_step(model, OptimizerParams())

    # Sampling: prefill with and without an adapter, then decoding
    lengths = PrefillShapes.from_config(config, max_length).iter_prompt_lengths(max_length)
    for length, weights in itertools.product(lengths, (None, sampler)):
        backend.sample(_make_first_token_batch(weights, length - 1, scores=programs is None))
    scheduler.compile_all(sampler, usual_only=programs is not None)

    backend.drop_sampler(sampler)
    backend.delete_model(model)
    if programs is not None:
        programs.wait_for_usual()
    log.info("warm-up: the usual programs are compiled after %.1f s", time.monotonic() - started)


def iter_training_lengths(budget: int, max_length: int) -> Iterator[int]:
    """Yield every row length that a training micro-batch of one example can have."""
    return iter_ascending(lambda size: choose_micro_batch_length(size, budget), max(budget, max_length))


def make_training_batch(model: ModelId, num_tokens: int, max_length: int, num_rows: int) -> PreparedModelPassBatch:
    """Return examples that fill one micro-batch: `num_rows` rows of `num_tokens` tokens each."""
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


def _make_first_token_batch(sampler: SamplerId | None, prompt_length: int, *, scores: bool) -> PreparedSampleBatch:
    """Return a request for one token. The prefill draws this token, so the request needs no slot."""
    request = SampleRequest(
        request_id=RequestId(WARM_UP_ID),
        sampler=sampler,
        prompt=np.zeros(prompt_length, np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=1, eos_stops=False),
        options=PromptOptions(logprobs=scores),
    )
    return PreparedSampleBatch(requests=(request,))
