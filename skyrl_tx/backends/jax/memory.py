"""Plans memory: the size of micro-batches, the KV cache, the adapter pool, and the number of models in training."""

import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import agree_on_minimum, list_local_devices
from skyrl_tx.backends.jax.mesh import count_replicas
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.backends.jax.train.training_state import pad_rank
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, TrainingCosts, count_adapter_bytes, estimate_costs
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.meters import DeviceMemory
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.remat import HOST_MEMORY, RematPolicy
from skyrl_tx.layers.sharding import UNSHARDED, Layout

TRAINING_SHARE = 0.5
"""Share of the memory left by weights and KV cache that a micro-batch may take; models need the rest."""
ROW_SHARE = 0.9
"""Share of that memory that one example may take which is longer than a micro-batch."""
HOST_SHARE = 0.5
"""Share of a host's memory that the inputs of layers of one example may take."""
SAMPLE_SHARE = 0.5
"""Share of the memory left by weights that the cache of samples and prompts may take."""
POOL_SHARE = 0.05
"""Share of the memory left by weights that the adapter pool takes at start-up; it grows when more samplers are used."""
MODEL_SHARE = 0.4
"""Share of the memory left by weights and KV cache for the state of models in training."""

MIN_ADAPTER_SLOTS = 4
"""Adapter slots for sampling at start-up, at least; one of them is the base model's."""
MAX_MODELS = 64
"""Models in training at the same time, at most, unless configured; a larger team seldom uses more."""
DEFAULT_MICRO_BATCH_TOKENS = 1024
"""Tokens of a micro-batch on a device that does not report its memory, as CPUs do not."""
DEFAULT_SAMPLE_TOKENS = 65536
"""Positions of the KV cache on a device that does not report its memory, if the host has as much."""
DEFAULT_SLOTS = (256, 128, 64, 32)
"""Samples at the same time, unless configured: on accelerators the first with SLOT_TOKENS for each, on CPU the last.

An accelerator reads the weights once for all of them, so with `dp` each copy of the weights has as many; arithmetic is
the limit of a CPU."""
SLOT_TOKENS = 512
MIN_TOKENS, MAX_TOKENS = 256, 16384
"""Bounds of the tokens of each device in a micro-batch."""
SUFFICIENT_TOKENS = 4096
"""Tokens without rematerialization that keep a device busy; with fewer, layers are rematerialized."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The settings that bound the memory of a micro-batch."""

    micro_batch_tokens: int  # on all devices together, padding included
    remat: bool
    remat_above: int | None = None
    """Longer rows are rematerialized although micro-batches are not; in tokens of each device. None: no row is."""
    offload_above: int | None = None
    """Longer rows have the inputs of layers in the host's memory; in tokens of each device. None: no row has."""

    def get_remat_policy(self, num_tokens: int) -> RematPolicy:
        """Return the remat policy of a micro-batch, or of a longer row, of `num_tokens` on each device."""
        if self.offload_above is not None and num_tokens > self.offload_above:
            return RematPolicy.OFFLOAD
        if self.remat or (self.remat_above is not None and num_tokens > self.remat_above):
            return RematPolicy.FULL
        return RematPolicy.SAVE_MATMULS

    @property
    def longest_row_policy(self) -> RematPolicy:
        """The remat policy of rows that fit with no other."""
        return self.get_remat_policy(1 << 62)

    @property
    def fingerprint(self) -> dict[str, str]:
        """The choices that the bits of results depend on, by name."""
        above = {"remat_above": self.remat_above, "offload_above": self.offload_above}
        return {
            "micro_batch_tokens": str(self.micro_batch_tokens),
            "remat": str(self.remat),
            **{name: str(size) for name, size in above.items() if size is not None},
        }

    def iter_smaller(self) -> Iterator["MemoryPlan"]:
        """Yield plans to try, in this order, when the device has too little memory for this one."""
        tokens = self.micro_batch_tokens // 2
        while tokens > 0:
            yield replace(self, micro_batch_tokens=tokens)
            tokens //= 2
        if not self.remat:
            yield replace(self, remat=True)
        if self.offload_above:
            yield replace(self, remat=True, offload_above=0)


class ActiveMemoryPlan:
    """The memory plan in force. It only shrinks during the life of the process."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan

    def shrink(self, plan: MemoryPlan) -> None:
        """Adopt a smaller plan with which a pass succeeded, unless the plan in force is smaller already."""
        self.plan = min(
            self.plan, plan, key=lambda each: (each.micro_batch_tokens, not each.remat, each.offload_above or 0)
        )
        log.warning(
            "all passes now use %s; the next start begins with the larger plan again, and what it replays is not "
            "bit-equal: start with --backend-config.micro-batch-tokens %d --%sbackend-config.remat%s to avoid that",
            self.plan,
            self.plan.micro_batch_tokens,
            "" if self.plan.remat else "no-",
            " --backend-config.offload" if self.plan.offload_above == 0 else "",
        )


def estimate_training_costs(params: models.DecoderParams, model: models.ModelConfig) -> TrainingCosts | None:
    """Return what training costs with the layout of training; None when devices do not report their memory."""
    if not read_device_memory(params):
        return None
    return estimate_costs(params, model, next(iter(params.embed.devices())).platform)


def plan_training_memory(
    config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig, costs: TrainingCosts | None
) -> MemoryPlan:
    """Return the memory plan for this device, and log its reason. Configured values take precedence.

    Call it when weights and KV cache are on the device, with the `estimate_training_costs`. Raises UserError for `offload` where
    devices cannot copy to the host's memory.
    """
    if not can_offload(params):
        if config.offload:
            raise UserError("--backend-config.offload: these devices cannot copy to the host's memory")
        config = config.model_copy(update={"offload": False})
    if costs is None:
        reason = "the device does not report its memory"
        plan = make_default_memory_plan(config)
    else:
        free = _get_reported_free_bytes(params)
        plan = choose_training_plan(free, count_model_bytes(config, params, model), costs, config, params.layout)
        cost = costs.get_bytes_per_token(plan.get_remat_policy(plan.micro_batch_tokens // count_shards(params.layout)))
        reason = f"{free / 2**30:.1f} GiB are free, a token takes {cost / 2**10:.0f} KiB"
    configured = [name for name in ("micro_batch_tokens", "remat", "offload") if getattr(config, name) is not None]
    log.info(
        "micro-batches of %d tokens, %s: %s%s",
        plan.micro_batch_tokens,
        "layers rematerialized" if plan.remat else "results of matrix products kept",
        reason,
        f" ({' and '.join(configured)} configured)" if configured else "",
    )
    for above, what in ((plan.remat_above, "are rematerialized"), (plan.offload_above, "are offloaded to the host")):
        if above is not None:
            log.info("rows of more than %d tokens %s", above * params.layout.num_shards("tokens"), what)
    return plan


def find_longest_example(
    config: JaxConfig,
    params: models.DecoderParams,
    model: models.ModelConfig,
    costs: TrainingCosts | None,
    plan: MemoryPlan,
) -> int:
    """Return the most tokens of an example: the model's limit, or what fits on the devices that share its row.

    Call it as `plan_training_memory`. A row longer than a micro-batch has one to itself, and all memory but a tenth,
    next to the state of one model of the highest rank.
    """
    if costs is None:
        return model.max_context_length
    free = _get_reported_free_bytes(params) - count_model_bytes(config, params, model)
    return min(model.max_context_length, find_longest_row(free, costs, plan, params.layout, _get_offload_limit(params)))


def can_offload(params: models.DecoderParams) -> bool:
    """Return whether the devices of this host can copy to its memory."""
    kinds = (
        {each.kind for each in device.addressable_memories()} for device in list_local_devices(params.embed.devices())
    )
    return all(HOST_MEMORY in each for each in kinds)


def _get_offload_limit(params: models.DecoderParams) -> int:
    """Return the memory of the smallest host that each of its devices may offload to."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return agree_on_minimum(int(HOST_SHARE * physical) // len(list_local_devices(params.embed.devices())))


def _get_reported_free_bytes(params: models.DecoderParams) -> int:
    free = get_free_bytes(params)
    assert free is not None, "the devices report their memory: see estimate_training_costs"
    return free


def find_longest_row(
    free: int, costs: TrainingCosts, plan: MemoryPlan, layout: Layout, host_bytes: int | None = None
) -> int:
    """Return the most tokens of a row for `free` bytes of each device, with the layout of training.

    Each device may offload `host_bytes` to its host; None is as many as it likes.
    """
    remat = plan.longest_row_policy
    fitting = costs.count_fitting_tokens(ROW_SHARE * free, remat=remat)
    if remat is RematPolicy.OFFLOAD and host_bytes is not None:
        fitting = max(min(fitting, host_bytes // costs.host_token), plan.offload_above or 0)
    return max(fitting * layout.num_shards("tokens"), plan.micro_batch_tokens // layout.num_shards("batch"))


def make_default_memory_plan(config: JaxConfig) -> MemoryPlan:
    """Return the memory plan for devices that do not report their memory."""
    offload_above = 0 if config.offload else None
    tokens = config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    return MemoryPlan(tokens, bool(config.remat or config.offload), offload_above=offload_above)


def count_shards(layout: Layout) -> int:
    """Return the number of devices that share the tokens of a micro-batch, in the layout of training."""
    return layout.num_shards("batch") * layout.num_shards("tokens")


def choose_training_plan(
    free: int, model_bytes: int, costs: TrainingCosts, config: JaxConfig, layout: Layout
) -> MemoryPlan:
    """Return the memory plan for `free` bytes of each device, with the layout of training.

    A row that is longer than a micro-batch may use what one model, of `model_bytes` on each device, leaves.
    """
    num_shards = count_shards(layout)
    plan = choose_memory_plan(free, costs, config, num_shards=num_shards)
    return add_long_row_policies(plan, free - model_bytes, costs, config, num_shards=num_shards)


def choose_memory_plan(free: int, costs: TrainingCosts, config: JaxConfig, *, num_shards: int) -> MemoryPlan:
    """Return the memory plan for `free` bytes of each device and `num_shards` shards of a micro-batch's tokens."""

    def count_tokens(remat: RematPolicy) -> int:
        fitting = costs.count_fitting_tokens(TRAINING_SHARE * free, remat=remat)
        return min(max(1 << int(math.log2(max(fitting, 1))), MIN_TOKENS), MAX_TOKENS)

    remat = bool(config.offload or config.remat)
    if not config.offload and config.remat is None:
        remat = count_tokens(RematPolicy.SAVE_MATMULS) < SUFFICIENT_TOKENS
    plan = MemoryPlan(config.micro_batch_tokens or 0, remat, offload_above=0 if config.offload else None)
    fitting = count_tokens(plan.get_remat_policy(SUFFICIENT_TOKENS))
    return plan if config.micro_batch_tokens else replace(plan, micro_batch_tokens=fitting * num_shards)


def add_long_row_policies(
    plan: MemoryPlan, free: int, costs: TrainingCosts, config: JaxConfig, *, num_shards: int
) -> MemoryPlan:
    """Return the plan with the remat policies of rows that are longer than a micro-batch.

    Such a row has `free` bytes of each device to itself. The first policy with which it fits is taken, so that a row
    takes no more time than its length needs. Settings that were configured hold for all rows.
    """
    own = -(-plan.micro_batch_tokens // num_shards)

    def count_tokens(remat: RematPolicy) -> int:
        return max(_round_down(max(costs.count_fitting_tokens(ROW_SHARE * free, remat=remat), 0)), own)

    if not plan.remat and config.remat is None:
        plan = replace(plan, remat_above=count_tokens(RematPolicy.SAVE_MATMULS))
    if config.offload is None and config.remat is not False:
        plan = replace(plan, offload_above=count_tokens(RematPolicy.FULL))
    return plan


def read_device_memory(params: models.DecoderParams) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device of this host, by their ids; empty when devices do not report their memory."""
    found: list[DeviceMemory] = []
    for device in list_local_devices(params.embed.devices()):
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return ()
        found.append(DeviceMemory(used_bytes=stats["bytes_in_use"], limit_bytes=stats["bytes_limit"]))
    return tuple(found)


def get_free_bytes(params: models.DecoderParams) -> int | None:
    """Return the free memory of the fullest device of all hosts; None when devices do not report their memory."""
    free = min((each.limit_bytes - each.used_bytes for each in read_device_memory(params)), default=None)
    return None if free is None else agree_on_minimum(free)


def plan_sample_memory(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> SampleMemory:
    """Return the memory of the cache of samples and prompts, and log its reason. Configured values take precedence.

    Call it when the weights are on the device. There are never more pages than all slots can use.
    """
    layout, dtype = params.layout, params.embed.dtype
    room, shards = CacheBytes.from_model(model, layout, dtype.itemsize), layout.num_shards("batch")
    free, memories = get_free_bytes(params), shards
    most, numbers = sys.maxsize, tuple(number * count_replicas(layout) for number in DEFAULT_SLOTS)
    if free is None:
        free = _get_free_host_memory(params)
        most, numbers = DEFAULT_SAMPLE_TOKENS, DEFAULT_SLOTS[-1:]
        room, memories = (
            CacheBytes.from_model(model, UNSHARDED, dtype.itemsize),
            1,
        )  # all devices share the host's memory
    fitting = int(SAMPLE_SHARE * max(free, 0)) // room.position * memories
    if config.sample_slots is not None:
        numbers = (config.sample_slots,)
    each = (_find_largest_sample_memory(number, fitting, most, config, model, room, shards) for number in numbers)
    memory = next(memory for memory in each if memory.num_slots == numbers[-1] or _has_enough_tokens(memory))
    log.info(
        "KV cache of %d samples and %d tokens%s, and of %d for prefixes: %.1f GiB are free, a token takes %.1f KiB%s",
        memory.num_slots,
        memory.tokens,
        " (configured)" if config.max_sample_tokens else "",
        memory.prefix_tokens,
        free / 2**30,
        room.position / 2**10,
        f", and the state of a sample {room.state / 2**20:.1f} MiB" if room.state else "",
    )
    return memory


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The bytes that the cache takes on each device."""

    position: int
    """For one position."""
    state: int
    """For the state of one sample, or of one prompt, whatever its length."""

    @classmethod
    def from_model(cls, model: models.ModelConfig, layout: Layout, itemsize: int) -> "CacheBytes":
        """Return the bytes for a model whose base weights have `itemsize`."""

        def size(each: Parameter) -> int:
            shards = (math.gcd(layout.num_shards(axis), size) for axis, size in zip(each.axes, each.shape, strict=True))
            return math.prod(each.shape) // math.prod(shards) * (4 if each.is_float32 else itemsize)

        rooms = [(len(stack.layers), stack.block.describe_cache()) for stack in model.stacks]
        position = sum(number * size(each) for number, room in rooms for each in jax.tree.leaves(room.positions))
        return cls(
            position=max(position, 1),  # a model without attention keeps nothing of positions
            state=sum(number * size(each) for number, room in rooms for each in jax.tree.leaves(room.fixed)),
        )

    @property
    def state_tokens(self) -> int:
        """The positions that take as many bytes as a state."""
        return -(-self.state // self.position)


def _has_enough_tokens(memory: SampleMemory) -> bool:
    """Return whether there are enough tokens for each of its samples."""
    return memory.tokens >= memory.num_slots * min(SLOT_TOKENS, memory.max_length)


def _find_largest_sample_memory(
    num_slots: int, fitting: int, most: int, config: JaxConfig, model: models.ModelConfig, room: CacheBytes, shards: int
) -> SampleMemory:
    """Return the largest memory that takes as many bytes as `fitting` positions, on all devices together.

    It counts what decode slices take. A sample is on one shard, and has at most the tokens of a shard.
    """
    context = min(model.max_context_length, config.max_context_length or model.max_context_length)
    most = min(most, num_slots * (config.max_context_length or context))

    def make_memory(tokens: int) -> SampleMemory:
        return SampleMemory(
            num_slots=num_slots,
            tokens=tokens,
            prefix_tokens=tokens // 4 if config.prefix_cache_tokens is None else config.prefix_cache_tokens,
            max_length=max(min(context, tokens // shards), 1),
            state_tokens=room.state_tokens,
            shards=shards,
        )

    if config.max_sample_tokens:
        return make_memory(config.max_sample_tokens)
    memory = make_memory(max(min(_round_down(fitting), most), 1))
    while memory.tokens > 1 and memory.all_tokens + memory.slice_tokens > fitting:
        memory = make_memory(_round_down(memory.tokens - 1))
    return memory


def choose_max_models(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return how many models may be in training at the same time, and log the reason.

    A configured number takes precedence. Call it when weights and KV cache are on the device. A model takes memory when
    it is created, for its own rank: weights, gradient and two moments. This estimate assumes the highest rank that a
    client may ask for.
    """
    if config.max_lora_adapters is not None:
        return config.max_lora_adapters
    free, cost = max(_get_free_memory(params), 0), count_model_bytes(config, params, model)
    fitting = int(MODEL_SHARE * free / cost) - 1  # a step, or a load, needs the new and the old state of one model
    found = max(1, min(fitting, MAX_MODELS))
    log.info(
        "%d models in training at the same time: %.1f GiB are free, a model of rank %d takes %.1f MiB",
        found,
        free / 2**30,
        config.max_lora_rank,
        cost / 2**20,
    )
    return found


def count_model_bytes(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return the bytes of a model in training of the highest rank on each device: weights, gradient and two moments."""
    return 4 * count_adapter_bytes(model, pad_rank(config.max_lora_rank), get_memory_layout(params))


def choose_adapter_slots(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return how many adapter slots the sampler pool has at start-up, the base model's included.

    That is the configured maximum, so that no program is compiled again when a sampler is loaded, or what fits into
    POOL_SHARE of the memory at the default rank. Call it when the weights are on the device.
    """
    cost = count_adapter_bytes(model, min(DEFAULT_RANK, config.max_lora_rank), get_memory_layout(params))
    return min(
        1 + config.max_sampler_adapters, max(int(POOL_SHARE * _get_free_memory(params) / cost), MIN_ADAPTER_SLOTS)
    )


def get_memory_layout(params: models.DecoderParams) -> Layout:
    """Return how arrays are cut over memories: not at all where all devices share that of the host."""
    return UNSHARDED if get_free_bytes(params) is None else params.layout


def _get_free_memory(params: models.DecoderParams) -> int:
    """Return the free memory of the fullest device, or of the host when devices do not report theirs."""
    reported = get_free_bytes(params)
    return _get_free_host_memory(params) if reported is None else reported


def _get_free_host_memory(params: models.DecoderParams) -> int:
    """Return the memory of the smallest host less the weights, of which decoding holds a second copy split by layer."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((params, params.layers)))
    return agree_on_minimum(max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weights, 0))


def _round_down(size: int) -> int:
    """Return `size` rounded down to three bits, so that slightly less memory at a restart changes no shapes."""
    step = 1 << max(size.bit_length() - 3, 0)
    return size // step * step
