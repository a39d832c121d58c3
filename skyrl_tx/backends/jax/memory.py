"""Plan device memory: micro-batches, KV cache, sampler pool, and models in training.

`start_plan` calls these functions before anything is allocated, with parameters that stand for the
arrays that are on the devices at each step: weights, sampler pool, KV cache. Then it plans
micro-batches and models in training for the memory that is left. The KV cache leaves as much memory
as training needs to keep the devices busy, see `_count_training_bytes`.

Devices such as CPUs do not report their memory. For these, fixed defaults apply, within the share
of host memory that `host_memory.get_planned_bytes` returns. No plan depends on how much memory is
free, because results after a restart would then not be bit-equal.
"""

import logging
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import agree_on_minimum, list_local_devices
from skyrl_tx.backends.jax.host_memory import format_gib, get_planned_bytes
from skyrl_tx.backends.jax.memory_plan import MemoryPlan
from skyrl_tx.backends.jax.mesh import count_replicas, make_training_layout
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.backends.jax.train.training_state import pad_rank
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, TrainingCosts, count_adapter_bytes
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.meters import DeviceMemory
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.remat import HOST_MEMORY, RematPolicy
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.process.memory import get_memory_limit

TRAINING_SHARE = 0.55
"""Share of the memory left by weights and KV cache that a micro-batch may take.
The rest is for models."""
ROW_SHARE = 0.9
"""Share of the memory left by weights and KV cache that one long example may take.
A long example has more tokens than a micro-batch."""
HOST_SHARE = 0.5
"""Share of host memory that the offloaded inputs of layers may take for one example."""
SAMPLE_SHARE, MAX_SAMPLE_SHARE = 0.5, 0.6
"""Share of the memory left by weights and sampler pool for the KV cache, and the largest share.
It may be smaller if a micro-batch without rematerialization then fits."""
POOL_SHARE = 0.05
"""Share of the memory left by weights for the sampler pool at the start.
The pool grows when more samplers are used."""
MODEL_SHARE = 0.4
"""Share of the memory left by weights and KV cache for the state of models in training."""

MIN_ADAPTER_SLOTS = 4
"""Minimum number of adapter slots for sampling at the start, including the slot of the base model.
"""
MAX_MODELS = 64
"""Maximum number of models in training at the same time, unless configured."""
DEFAULT_MICRO_BATCH_TOKENS = 1024
"""Tokens of a micro-batch on devices that do not report their memory."""
DEFAULT_SAMPLE_TOKENS = 65536
"""Maximum number of KV cache positions on devices that do not report their memory."""
DEFAULT_SLOTS = (256, 128, 64, 32)
"""Choices for the number of samples at the same time, for each copy of the weights.

Accelerators use the first choice that leaves SLOT_TOKENS of KV cache for each sample, because a
decode step reads the weights once for all samples. CPUs use the last choice, because they are
limited by arithmetic.
"""
SLOT_TOKENS = 512
MIN_TOKENS, MAX_TOKENS = 256, 16384
"""Bounds for the tokens of a micro-batch on each device."""
SATURATING_TOKENS = 4096
"""Tokens on each device that keep it busy.
If fewer fit without rematerialization, layers are rematerialized."""

log = logging.getLogger(__name__)


def plan_training_memory(
    config: JaxConfig,
    params: models.DecoderParams,
    model: models.ModelConfig,
    costs: TrainingCosts | None,
    *,
    offload_bytes: int | None = None,
) -> MemoryPlan:
    """Choose the memory plan of training, and log it. Configured values take precedence.

    Call it when weights and KV cache are on the device. `params` has the layout of training, and
    `costs` is None if the devices do not report their memory. Each device may offload
    `offload_bytes` to host memory; None means no limit. Raises UserError if `offload` is configured
    and this is 0.
    """
    if offload_bytes == 0:
        if config.offload:
            raise UserError("--backend-config.offload: these devices cannot copy to host memory; remove this setting")
        config = config.model_copy(update={"offload": False})

    # Choose the plan.
    if costs is None:
        is_cpu = next(iter(params.embed.devices())).platform == "cpu"
        reason = f"the default {'on a CPU' if is_cpu else 'for a device that does not report its memory'}"
        plan = make_default_memory_plan(config)
    else:
        free = get_free_bytes(params)
        assert free is not None, "the devices report their memory"
        plan = choose_training_plan(free, count_model_bytes(config, params, model), costs, config, params.layout)
        cost = costs.get_bytes_per_token(plan.get_remat_policy(plan.micro_batch_tokens // count_shards(params.layout)))
        reason = f"{_describe_free(params, free)}, a token takes {cost / 2**10:.0f} KiB"

    # Log it.
    configured = [name for name in ("micro_batch_tokens", "remat", "offload") if getattr(config, name) is not None]
    log.info(
        "micro-batches of %d tokens, %s: %s%s",
        plan.micro_batch_tokens,
        "layers rematerialized" if plan.remat else "results of matrix products kept",
        reason,
        f" ({' and '.join(configured)} configured)" if configured else "",
    )
    for above, action in ((plan.remat_above, "are rematerialized"), (plan.offload_above, "are offloaded to the host")):
        if above is not None:
            log.info("rows of more than %d tokens %s", above * params.layout.num_shards("tokens"), action)
    return plan


def get_offload_limit(devices: Collection[Any]) -> int:
    """Return the bytes of host memory that each device may offload to, on the smallest host.

    The result is 0 if not all devices of this host can copy to host memory.
    """
    local = list_local_devices(devices)
    kinds = ({memory.kind for memory in device.addressable_memories()} for device in local)
    can_offload = all(HOST_MEMORY in kind for kind in kinds)
    return agree_on_minimum(int(HOST_SHARE * get_memory_limit()) // len(local) if can_offload else 0)


def find_longest_row(
    free: int, costs: TrainingCosts, plan: MemoryPlan, layout: Layout, offload_bytes: int | None = None
) -> int:
    """Return the length of the longest row, in tokens, for `free` bytes on each device.

    These are the bytes that are left when one model of the highest rank is in training. The row may
    take ROW_SHARE of them. `layout` is the layout of training. Each device may offload
    `offload_bytes` to host memory; None means no limit.
    """
    remat = plan.longest_row_policy
    fitting = costs.count_fitting_tokens(ROW_SHARE * free, remat=remat)
    if remat is RematPolicy.OFFLOAD and offload_bytes is not None:
        fitting = max(min(fitting, offload_bytes // costs.host_token_bytes), plan.offload_above or 0)
    return max(fitting * layout.num_shards("tokens"), plan.micro_batch_tokens // layout.num_shards("batch"))


def make_default_memory_plan(config: JaxConfig) -> MemoryPlan:
    """Return the memory plan for devices that do not report their memory, as CPUs do not."""
    offload_above = 0 if config.offload else None
    tokens = config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    return MemoryPlan(tokens, bool(config.remat or config.offload), offload_above=offload_above)


def count_shards(layout: Layout) -> int:
    """Return how many devices share the tokens of a micro-batch, in the layout of training."""
    return layout.num_shards("batch") * layout.num_shards("tokens")


def choose_training_plan(
    free: int, model_bytes: int, costs: TrainingCosts, config: JaxConfig, layout: Layout
) -> MemoryPlan:
    """Return the memory plan for `free` bytes on each device, including the policies of long rows.

    `layout` is the layout of training. `model_bytes` are the bytes of one model in training on each
    device. A long row may use the memory that such a model leaves.
    """
    num_shards = count_shards(layout)
    size = min(TRAINING_SHARE * free, ROW_SHARE * (free - model_bytes))
    plan = choose_memory_plan(size, costs, config, num_shards=num_shards)
    return add_long_row_policies(plan, free - model_bytes, costs, config, num_shards=num_shards)


def choose_memory_plan(size: float, costs: TrainingCosts, config: JaxConfig, *, num_shards: int) -> MemoryPlan:
    """Choose rematerialization, and a micro-batch that takes at most `size` bytes on each device.

    `num_shards` is the number of devices that share the tokens of a micro-batch.
    """

    def count_tokens(remat: RematPolicy) -> int:
        fitting = costs.count_fitting_tokens(size, remat=remat)
        return min(max(1 << int(math.log2(max(fitting, 1))), MIN_TOKENS), MAX_TOKENS)

    remat = bool(config.offload or config.remat)
    if not config.offload and config.remat is None:
        remat = count_tokens(RematPolicy.SAVE_MATMULS) < SATURATING_TOKENS
    plan = MemoryPlan(config.micro_batch_tokens or 0, remat, offload_above=0 if config.offload else None)
    fitting = count_tokens(plan.get_remat_policy(SATURATING_TOKENS))
    return plan if config.micro_batch_tokens else replace(plan, micro_batch_tokens=fitting * num_shards)


def add_long_row_policies(
    plan: MemoryPlan, free: int, costs: TrainingCosts, config: JaxConfig, *, num_shards: int
) -> MemoryPlan:
    """Return the plan with remat policies for rows that are longer than a micro-batch.

    Such a row has `free` bytes on each device to itself. It gets the fastest policy that fits: no
    rematerialization, rematerialization, or offloading to the host. If the user has configured
    `remat` or `offload`, the setting applies to all rows.
    """
    micro_batch_tokens = -(-plan.micro_batch_tokens // num_shards)  # on each device

    def count_tokens(remat: RematPolicy) -> int:
        fitting = max(costs.count_fitting_tokens(ROW_SHARE * free, remat=remat), 0)
        return max(_round_down(fitting), micro_batch_tokens)

    if not plan.remat and config.remat is None:
        plan = replace(plan, remat_above=count_tokens(RematPolicy.SAVE_MATMULS))
    if config.offload is None and config.remat is not False:
        plan = replace(plan, offload_above=count_tokens(RematPolicy.FULL))
    return plan


def read_device_memory(devices: Collection[Any]) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device of this host, in the order of their ids.

    Returns an empty tuple if the devices do not report their memory.
    """
    memories: list[DeviceMemory] = []
    for device in list_local_devices(devices):
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return ()
        memories.append(DeviceMemory(used_bytes=stats["bytes_in_use"], limit_bytes=stats["bytes_limit"]))
    return tuple(memories)


def read_memory_limit(devices: Collection[Any]) -> int | None:
    """Return the memory of the smallest device of all hosts; None if devices report none."""
    limit = min((memory.limit_bytes for memory in read_device_memory(devices)), default=None)
    return None if limit is None else agree_on_minimum(limit)


def get_free_bytes(params: models.DecoderParams) -> int | None:
    """Return the memory that planned arrays leave on each device; None if devices report none."""
    memories = read_device_memory(params.embed.devices())
    return min((memory.limit_bytes - memory.used_bytes for memory in memories), default=None)


def _count_training_bytes(
    free: int, slots_bytes: int, model_bytes: int, costs: TrainingCosts, config: JaxConfig, layout: Layout
) -> int:
    """Return how many of `free` bytes on each device the KV cache leaves to training.

    This is enough for a micro-batch of 4,096 to 16,384 tokens without rematerialization, the
    largest that leaves `slots_bytes` to the cache, and always for one model and the smallest
    micro-batch. `layout` is the layout of training.
    """
    sizes = MAX_TOKENS, MAX_TOKENS // 2, SATURATING_TOKENS
    if config.micro_batch_tokens:
        sizes = (-(-config.micro_batch_tokens // count_shards(layout)),)
    policy = RematPolicy.FULL if config.remat or config.offload else RematPolicy.SAVE_MATMULS
    needed = (costs.count_micro_batch_bytes(size, remat=policy) / TRAINING_SHARE for size in sizes)
    share = (1 - SAMPLE_SHARE) * free
    wanted = next((size for size in needed if size <= max(share, free - slots_bytes)), share)

    smallest = costs.count_micro_batch_bytes(MIN_TOKENS, remat=RematPolicy.FULL)
    return int(max(wanted, (1 - MAX_SAMPLE_SHARE) * free, smallest / ROW_SHARE + model_bytes))


def plan_sample_memory(
    config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig, costs: TrainingCosts | None = None
) -> SampleMemory:
    """Choose the size of the KV cache, and log it. Configured values take precedence.

    Call this when the weights are on the device, with the `costs` of training, or None if the devices
    do not report their memory. The cache never has more pages than all slots together can use.
    """
    layout, dtype = params.layout, params.embed.dtype
    num_shards = layout.num_shards("batch")

    # How many positions fit? Devices that report no memory share the memory of the host.
    free = get_free_bytes(params)
    if free is None:
        free, num_memories = get_planned_bytes(params), 1
        cache_bytes = CacheBytes.from_model(model, UNSHARDED, dtype.itemsize)
        max_tokens, slot_choices = DEFAULT_SAMPLE_TOKENS, DEFAULT_SLOTS[-1:]
    else:
        num_memories = num_shards
        cache_bytes = CacheBytes.from_model(model, layout, dtype.itemsize)
        max_tokens = sys.maxsize
        slot_choices = tuple(num_slots * count_replicas(layout) for num_slots in DEFAULT_SLOTS)
    if config.sample_slots is not None:
        slot_choices = (config.sample_slots,)

    # Leave memory to training.
    size = SAMPLE_SHARE * free
    if costs is not None:
        # For each slot: tokens, a quarter more for prefixes, a state, and its copy in a decode slice.
        slot_tokens = SLOT_TOKENS * 5 // 4 + 2 * cache_bytes.state_tokens
        slots_bytes = slot_choices[0] * slot_tokens // num_shards * cache_bytes.position
        model_bytes, in_training = count_model_bytes(config, params, model), make_training_layout(layout)
        size = free - _count_training_bytes(free, slots_bytes, model_bytes, costs, config, in_training)
    fitting = int(max(size, 0)) // cache_bytes.position * num_memories

    # Choose the number of slots: the first with enough tokens for each, or the last.
    candidates = (
        _find_largest_sample_memory(num_slots, fitting, max_tokens, config, model, cache_bytes, num_shards)
        for num_slots in slot_choices
    )
    memory = next(memory for memory in candidates if memory.num_slots == slot_choices[-1] or _has_enough_tokens(memory))

    log.info(
        "KV cache of %d samples and %d tokens%s, and of %d for prefixes: %s, a token takes %.1f KiB%s",
        memory.num_slots,
        memory.tokens,
        " (configured)" if config.max_sample_tokens else "",
        memory.prefix_tokens,
        _describe_free(params, free),
        cache_bytes.position / 2**10,
        f", and the state of a sample {cache_bytes.state / 2**20:.1f} MiB" if cache_bytes.state else "",
    )
    return memory


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of the KV cache on each device."""

    position: int
    """Bytes of one position: keys and values of all layers."""
    state: int
    """Bytes of one state of linear attention, which has the same size for all lengths."""

    @classmethod
    def from_model(cls, model: models.ModelConfig, layout: Layout, itemsize: int) -> "CacheBytes":
        """Return the bytes for a model whose base weights take `itemsize` bytes for each number."""

        def count_bytes(array: Parameter) -> int:
            dims = zip(array.axes, array.shape, strict=True)
            num_shards = math.prod(math.gcd(layout.num_shards(axis), size) for axis, size in dims)
            return math.prod(array.shape) // num_shards * (4 if array.is_float32 else itemsize)

        caches = [(len(stack.layers), stack.block.describe_cache()) for stack in model.stacks]
        position = sum(n * count_bytes(array) for n, cache in caches for array in jax.tree.leaves(cache.positions))
        return cls(
            position=max(position, 1),  # a model without attention stores nothing for positions
            state=sum(n * count_bytes(array) for n, cache in caches for array in jax.tree.leaves(cache.fixed)),
        )

    @property
    def state_tokens(self) -> int:
        """The number of positions that take as many bytes as a state."""
        return -(-self.state // self.position)

    def count(self, memory: SampleMemory) -> int:
        """Return the bytes of all pages and states."""
        return memory.num_pages * memory.page * self.position + memory.num_states * self.state


def _has_enough_tokens(memory: SampleMemory) -> bool:
    """Return whether each slot has SLOT_TOKENS, or the tokens of the longest sample if fewer."""
    return memory.tokens >= memory.num_slots * min(SLOT_TOKENS, memory.max_length)


def _find_largest_sample_memory(
    num_slots: int,
    fitting: int,
    max_tokens: int,
    config: JaxConfig,
    model: models.ModelConfig,
    cache_bytes: CacheBytes,
    num_shards: int,
) -> SampleMemory:
    """Return the largest cache that fits into the memory of `fitting` positions on all devices.

    The arrays of decode slices must fit into the same memory. A sample is on one shard, so the
    longest sample has at most the tokens of one shard. If the user has configured the number of
    tokens, the result has that number.
    """
    context = min(model.max_context_length, config.max_context_length or model.max_context_length)
    max_tokens = min(max_tokens, num_slots * (config.max_context_length or context))

    def make_memory(tokens: int) -> SampleMemory:
        return SampleMemory(
            num_slots=num_slots,
            tokens=tokens,
            prefix_tokens=tokens // 4 if config.prefix_cache_tokens is None else config.prefix_cache_tokens,
            max_length=max(min(context, tokens // num_shards), 1),
            state_tokens=cache_bytes.state_tokens,
            shards=num_shards,
        )

    if config.max_sample_tokens:
        return make_memory(config.max_sample_tokens)
    memory = make_memory(max(min(_round_down(fitting), max_tokens), 1))
    while memory.tokens > 1 and memory.all_tokens + memory.slice_tokens > fitting:
        memory = make_memory(_round_down(memory.tokens - 1))
    return memory


def choose_max_models(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Choose how many models may be in training at the same time, and log it.

    A configured number takes precedence. Call this when weights and KV cache are on the device.
    Each model takes memory for the weights, gradient and two moments of its adapter. The estimate
    assumes the highest rank that a client may request.
    """
    if config.max_lora_adapters is not None:
        return config.max_lora_adapters
    free, cost = max(_get_free_memory(params), 0), count_model_bytes(config, params, model)
    fitting = int(MODEL_SHARE * free / cost) - 1  # an optimizer step or a load has the old and the new state of a model
    max_models = max(1, min(fitting, MAX_MODELS))
    log.info(
        "%d models in training at the same time: %s, a model of rank %d takes %.1f MiB",
        max_models,
        _describe_free(params, free),
        config.max_lora_rank,
        cost / 2**20,
    )
    return max_models


def count_model_bytes(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return the bytes on each device of a model in training with the highest rank.

    These are weights, gradient and two moments.
    """
    return 4 * count_adapter_bytes(model, pad_rank(config.max_lora_rank), get_memory_layout(params))


def choose_adapter_slots(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return how many adapters the sampler pool has room for at the start (slots).

    One of the slots is for the base model. If the configured maximum fits into POOL_SHARE of the
    free memory at the default rank, the pool has that size. The pool then never grows, so loading a
    sampler compiles no program again. Otherwise the number is what fits, but at least
    MIN_ADAPTER_SLOTS. Call this when the weights are on the device.
    """
    assert config.max_sampler_adapters is not None
    cost = count_adapter_bytes(model, min(DEFAULT_RANK, config.max_lora_rank), get_memory_layout(params))
    return min(
        1 + config.max_sampler_adapters, max(int(POOL_SHARE * _get_free_memory(params) / cost), MIN_ADAPTER_SLOTS)
    )


def get_memory_layout(params: models.DecoderParams) -> Layout:
    """Return how arrays are sharded over separate memories.

    Devices that do not report their memory share the memory of the host, so for these the result is
    UNSHARDED.
    """
    return UNSHARDED if get_free_bytes(params) is None else params.layout


def _get_free_memory(params: models.DecoderParams) -> int:
    """Return the free memory of the fullest device, or of the host if devices report none."""
    reported = get_free_bytes(params)
    return get_planned_bytes(params) if reported is None else reported


def count_planned_bytes(
    config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig, samples: SampleMemory, max_models: int
) -> int:
    """Return how many bytes KV cache and models in training may take in the memory of a host."""
    cache = CacheBytes.from_model(model, UNSHARDED, params.embed.dtype.itemsize)
    return cache.count(samples) + max_models * count_model_bytes(config, params, model)


def _describe_free(params: models.DecoderParams, free: int) -> str:
    """Describe `free` bytes for the log: free memory of a device, or the planned share of a host's memory."""
    if get_free_bytes(params) is not None:
        return f"{format_gib(free)} are free"
    return f"the plan has {format_gib(free)} besides the weights, of {format_gib(get_memory_limit())} of memory"


def _round_down(size: int) -> int:
    """Round `size` down to three significant bits, for example 1000 to 896.

    So the shapes stay the same if slightly less memory is free at the next start.
    """
    step = 1 << max(size.bit_length() - 3, 0)
    return size // step * step
