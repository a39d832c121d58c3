"""Plan memory: sampler pool, KV cache and models in training. `memory_plan` plans micro-batches.

`start_plan` calls these functions before anything is allocated, with the memory that the arrays of
earlier steps will leave: weights, sampler pool, KV cache. The KV cache leaves as much memory as
training needs to keep the devices busy, see `_count_training_bytes`.

Devices such as CPUs do not report their memory. For these, fixed defaults apply, within the share
of host memory that `get_planned_bytes` returns.

No plan depends on how much memory is available at the moment, because another plan would change
the last bits of results after a restart. If too little is available, the backend refuses to start
or logs a warning.
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
from skyrl_tx.backends.jax.mesh import count_replicas, make_training_layout
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.backends.jax.train.training_state import pad_rank
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, TrainingCosts, count_adapter_bytes
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.meters import DeviceMemory
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.remat import HOST_MEMORY, RematPolicy
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from skyrl_tx.process.memory import get_memory_limit, read_available_memory

TRAINING_SHARE = 0.55
"""Share of the memory left by weights and KV cache that a micro-batch may take.
The rest is for models."""
ROW_SHARE = 0.9
"""Share of the memory left by weights and KV cache that one long example may take.
A long example has more tokens than a micro-batch."""
HOST_SHARE = 0.5
"""Share of host memory that the offloaded inputs of layers may take for one example."""
PLANNED_SHARE = 0.5
"""Share of host memory for everything besides the weights, on devices that do not report memory.
The rest is for compiled programs, temporary memory, other processes, and the file cache."""
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


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory for arrays that are not planned yet."""

    num_bytes: int
    """Bytes on each device, or on the host if devices do not report their memory."""
    layout: Layout
    """How arrays are sharded over separate memories.
    Devices that do not report their memory share the memory of the host: UNSHARDED."""
    is_reported: bool
    """Whether devices report their memory."""

    @classmethod
    def after_weights(
        cls, layout: Layout, *, limit_bytes: int | None, weight_bytes: int, host_weight_bytes: int
    ) -> "FreeMemory":
        """Return the memory that the weights leave.

        `limit_bytes` and `weight_bytes` are on each device. If the limit is None, devices do not
        report their memory, and the weights take `host_weight_bytes` of the host.
        """
        if limit_bytes is None:
            return cls(get_planned_bytes(host_weight_bytes), UNSHARDED, is_reported=False)
        return cls(limit_bytes - weight_bytes, layout, is_reported=True)

    def without(self, num_bytes: int) -> "FreeMemory":
        """Return the memory that is left after arrays of `num_bytes` on each device.

        In the memory of the host, all kinds of arrays have the same limit, and take memory in time.
        """
        return replace(self, num_bytes=self.num_bytes - num_bytes) if self.is_reported else self

    def describe(self) -> str:
        """Describe the memory for the log."""
        if self.is_reported:
            return f"{format_gib(self.num_bytes)} are free"
        limit = format_gib(get_memory_limit())
        return f"the plan has {format_gib(self.num_bytes)} besides the weights, of {limit} of memory"


def get_planned_bytes(weight_bytes: int) -> int:
    """Return how many bytes of host memory the plan may use for everything besides the weights.

    On multiple hosts this is the minimum of all hosts, so that all hosts have the same plan.
    """
    limit = get_memory_limit()
    return agree_on_minimum(max(min(int(PLANNED_SHARE * limit), limit - weight_bytes), 0))


def count_host_weight_bytes(params: models.DecoderParams) -> int:
    """Return the bytes that the weights take in host memory. `params` may hold only their shapes.

    The weights of layers count twice, because decoding uses a second copy of them that is split by
    layer.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params.layers)))


def check_weights_fit(weight_bytes: int) -> None:
    """Raise UserError if weights of this size do not fit into the memory of this host now."""
    if weight_bytes > (available := read_available_memory()):
        raise UserError(
            f"--base-model: its weights take {format_gib(weight_bytes)}, but only {format_gib(available)} of memory "
            f"are available; this process may use at most {format_gib(get_memory_limit())}. End other programs, or "
            "choose --backend-config.dtype bfloat16 or a smaller model"
        )


def warn_if_memory_is_scarce(planned_bytes: int) -> None:
    """Log a warning if less memory is available on this host than the plan may use in time."""
    if planned_bytes > (available := read_available_memory()):
        log.warning(
            "only %s of memory are available, but KV cache and models may take %s in time. Without more "
            "memory, the kernel may end this process. End other programs, or lower --backend-config.max-sample-tokens "
            "and --backend-config.max-lora-adapters",
            format_gib(available),
            format_gib(planned_bytes),
        )


def format_gib(num_bytes: int) -> str:
    """Return a number of bytes for messages, for example 1.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def get_offload_limit(devices: Collection[Any]) -> int:
    """Return the bytes of host memory that each device may offload to, on the smallest host.

    The result is 0 if not all devices of this host can copy to host memory.
    """
    local = list_local_devices(devices)
    kinds = ({memory.kind for memory in device.addressable_memories()} for device in local)
    can_offload = all(HOST_MEMORY in kind for kind in kinds)
    return agree_on_minimum(int(HOST_SHARE * get_memory_limit()) // len(local) if can_offload else 0)


def count_shards(layout: Layout) -> int:
    """Return how many devices share the tokens of a micro-batch, in the layout of training."""
    return layout.num_shards("batch") * layout.num_shards("tokens")


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
    config: JaxConfig,
    model: models.ModelConfig,
    free: FreeMemory,
    layout: Layout,
    itemsize: int,
    costs: TrainingCosts | None = None,
) -> SampleMemory:
    """Choose the size of the KV cache, and log it. Configured values take precedence.

    `free` is the memory besides weights and sampler pool, `layout` the layout of sampling, and
    `itemsize` the bytes of a number in the base weights. `costs` are the costs of training, or None
    if the devices do not report their memory. The cache never has more pages than all slots
    together can use.
    """
    num_shards = layout.num_shards("batch")
    cache_bytes = CacheBytes.from_model(model, free.layout, itemsize)
    max_tokens, slot_choices = DEFAULT_SAMPLE_TOKENS, DEFAULT_SLOTS[-1:]
    if free.is_reported:
        max_tokens = sys.maxsize
        slot_choices = tuple(num_slots * count_replicas(layout) for num_slots in DEFAULT_SLOTS)
    if config.sample_slots is not None:
        slot_choices = (config.sample_slots,)

    # How many positions fit? Leave memory to training.
    size = SAMPLE_SHARE * free.num_bytes
    if costs is not None:
        # For each slot: tokens, a quarter more for prefixes, a state, and its copy in a decode slice.
        slot_tokens = SLOT_TOKENS * 5 // 4 + 2 * cache_bytes.state_tokens
        slots_bytes = slot_choices[0] * slot_tokens // num_shards * cache_bytes.position
        model_bytes, in_training = count_model_bytes(config, model, free.layout), make_training_layout(layout)
        training_bytes = _count_training_bytes(free.num_bytes, slots_bytes, model_bytes, costs, config, in_training)
        size = free.num_bytes - training_bytes
    fitting = int(max(size, 0)) // cache_bytes.position * free.layout.num_shards("batch")

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
        free.describe(),
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
    memory = make_memory(max(min(round_down(fitting), max_tokens), 1))
    while memory.tokens > 1 and memory.all_tokens + memory.slice_tokens > fitting:
        memory = make_memory(round_down(memory.tokens - 1))
    return memory


def choose_max_models(config: JaxConfig, model: models.ModelConfig, free: FreeMemory) -> int:
    """Choose how many models may be in training at the same time, and log it.

    A configured number takes precedence. `free` is the memory besides weights and KV cache. Each
    model takes memory for the weights, gradient and two moments of its adapter. The estimate assumes
    the highest rank that a client may request.
    """
    if config.max_lora_adapters is not None:
        return config.max_lora_adapters
    cost = count_model_bytes(config, model, free.layout)
    fitting = int(MODEL_SHARE * free.num_bytes / cost)
    max_models = max(1, min(fitting - 1, MAX_MODELS))  # an optimizer step or a load has an old and a new state
    log.info(
        "%d models in training at the same time: %s, a model of rank %d takes %.1f MiB",
        max_models,
        free.describe(),
        config.max_lora_rank,
        cost / 2**20,
    )
    return max_models


def count_model_bytes(config: JaxConfig, model: models.ModelConfig, layout: Layout) -> int:
    """Return the bytes on each device of a model in training with the highest rank.

    These are weights, gradient and two moments. `layout` is as in `FreeMemory`.
    """
    return 4 * count_adapter_bytes(model, pad_rank(config.max_lora_rank), layout)


def choose_adapter_slots(config: JaxConfig, model: models.ModelConfig, free: FreeMemory) -> int:
    """Return how many adapters the sampler pool has room for at the start (slots).

    One of the slots is for the base model. If the configured maximum fits into POOL_SHARE of the
    free memory at the default rank, the pool has that size. The pool then never grows, so loading a
    sampler compiles no program again. Otherwise the number is what fits, but at least
    MIN_ADAPTER_SLOTS. `free` is the memory besides the weights.
    """
    assert config.max_sampler_adapters is not None
    cost = count_adapter_bytes(model, min(DEFAULT_RANK, config.max_lora_rank), free.layout)
    return min(1 + config.max_sampler_adapters, max(int(POOL_SHARE * free.num_bytes / cost), MIN_ADAPTER_SLOTS))


def round_down(size: int) -> int:
    """Round `size` down to three significant bits, for example 1000 to 896.

    So the shapes stay the same if slightly less memory is free at the next start.
    """
    step = 1 << max(size.bit_length() - 3, 0)
    return size // step * step
