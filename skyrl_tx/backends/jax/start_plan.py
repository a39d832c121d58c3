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
from skyrl_tx.backends.jax.kernel_choice import can_share_prefixes, choose_kernels, count_moe_layers
from skyrl_tx.backends.jax.memory import (
    CacheBytes,
    FreeMemory,
    choose_adapter_slots,
    choose_max_models,
    count_host_weight_bytes,
    count_model_bytes,
    count_shards,
    format_gib,
    plan_sample_memory,
)
from skyrl_tx.backends.jax.memory_plan import MemoryPlan, find_longest_row, plan_training_memory
from skyrl_tx.backends.jax.sample.sampler_pool import LOWEST_RANK
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import PrefillShapes, SampleMemory, iter_ascending
from skyrl_tx.backends.jax.train.packing import choose_micro_batch_length
from skyrl_tx.backends.jax.train.shared_prefixes import SHARING_VERSION
from skyrl_tx.backends.jax.train.training_programs import TrainingPrograms, make_param_shapes
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
from skyrl_tx.layers.parameter import flatten
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
    in_training = mesh.make_training_layout(layout)

    # Weights
    described = models.describe_params(model)
    params = make_param_shapes(described, layout, kernels, dtype)
    weight_bytes, host_weight_bytes = count_bytes_per_device(described, layout, dtype), count_host_weight_bytes(params)
    free = besides_weights = FreeMemory.after_weights(
        layout, limit_bytes=limit_bytes, weight_bytes=weight_bytes, host_weight_bytes=host_weight_bytes
    )

    # Sampler pool
    num_slots = choose_adapter_slots(config, model, free)
    pool_rank = LOWEST_RANK
    if config.warmup or free.is_reported:  # samplers of the default rank then find their memory and programs
        pool_rank = pad_rank(min(DEFAULT_RANK, config.max_lora_rank))
    pool_bytes = num_slots * count_adapter_bytes(model, pool_rank, free.layout)
    free = free.without(pool_bytes)

    # KV cache. It leaves memory for training.
    costs = estimate_costs(replace(params, layout=in_training), model, platform) if free.is_reported else None
    samples = plan_sample_memory(config, model, free, layout, dtype.itemsize, costs)
    cache = CacheBytes.from_model(model, free.layout, dtype.itemsize)
    kv_bytes = cache.count(samples) // layout.num_shards("batch")
    free = free.without(kv_bytes)

    # Decode slices
    num_rows = samples.num_rows // layout.num_shards("batch")
    num_logits = _NUM_LOGITS.get(platform, 1) * model.vocab_size
    row_bytes = (
        cache.state * count_state_copies(layout, model, platform)
        + config.decode_slice_tokens * cache.position
        + num_logits * np.dtype(np.float32).itemsize
    )

    # Training
    model_bytes = count_model_bytes(config, model, free.layout)
    passes = plan_training_memory(
        config, free, model_bytes, in_training, costs, platform=platform, offload_bytes=offload_bytes
    )
    pass_bytes, longest, offloaded_bytes = 0, None, 0
    if costs is not None:
        tokens = -(-passes.micro_batch_tokens // count_shards(in_training))
        pass_bytes = costs.count_micro_batch_bytes(tokens, remat=passes.get_remat_policy(tokens))
        longest = find_longest_row(free.num_bytes - model_bytes, costs, passes, in_training, offload_bytes)
        if passes.longest_row_policy is RematPolicy.OFFLOAD:
            tokens = -(-min(longest, model.max_context_length) // in_training.num_shards("tokens"))
            offloaded_bytes = costs.host_token_bytes * tokens if tokens > (passes.offload_above or 0) else 0
    max_models = choose_max_models(config, model, free)

    return StartPlan(
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        dtype=dtype.name,
        kernels=kernels,
        shares_prefixes=not layout.is_sharded and can_share_prefixes(kernels, model),
        weight_bytes=weight_bytes,
        free_bytes=besides_weights.num_bytes if besides_weights.is_reported else None,
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
        host_weight_bytes=host_weight_bytes,
        host_bytes=cache.count(samples) + max_models * model_bytes,
    )


def count_bytes_per_device(described: models.DecoderParams, layout: Layout, dtype: np.dtype) -> int:
    """Return the bytes of the base weights on each device of a mesh."""
    return sum(
        int(np.prod(mesh.get_parameter_sharding(layout, parameter).shard_shape(parameter.shape))) * dtype.itemsize
        for parameter in flatten(described).values()
    )


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
