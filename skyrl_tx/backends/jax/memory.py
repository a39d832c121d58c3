"""How many tokens are computed and kept at once, in training and in sampling: from a model of the device's memory.

What the backward pass keeps is not guessed: the forward pass is traced without being run, at two lengths, and the
arrays that it hands on are counted. The difference is what a token costs; weights, handed on whole, fall out of it.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.adapters import padded_rank
from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.layers.kept import Kept
from skyrl_tx.layers.logprobs import CHUNK
from skyrl_tx.layers.lora import Adapter, AdapterWeights

UNKNOWN_MEMORY_TOKENS = 1024  # of a micro-batch where the device does not tell its memory, as no CPU does
SHARE = 0.5  # of what is free beside weights, cache and prompts; the rest is for models in training and fragmentation
SAMPLE_SHARE = 0.5  # of what is free beside weights, for the keys and values of samples and of prompts
POOL_SHARE = 0.05  # of the same, for frozen adapters from the start; more samplers in use take more
FEWEST_PLACES = 4  # of which one is the base model's
MODEL_SHARE = (
    0.4  # of what is free beside weights, cache and prompts, for all that models in training have of their own
)
MOST_MODELS = 64  # a team's; more would seldom be in use at once
UNKNOWN_SAMPLE_TOKENS = 65536  # in the cache where the device does not tell its memory, if the host has that much
FEWEST, MOST = 256, 16384  # tokens of each device in a micro-batch
ENOUGH = 4096  # with that many and no second computation of layers, a device has enough to do
RANK = 32  # tinker/lib/public_interfaces/service_client.py, create_lora_training_client

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What bounds the memory of a micro-batch."""

    micro_batch_tokens: int  # on all devices together, padding included
    remat: bool

    def smaller(self) -> Iterator["MemoryPlan"]:
        """Yield what to try, in turn, when this was too much."""
        tokens = self.micro_batch_tokens // 2
        while tokens > 0:
            yield replace(self, micro_batch_tokens=tokens)
            tokens //= 2
        if not self.remat:
            yield replace(self, remat=True)


@dataclass(frozen=True, slots=True)
class SampleRoom:
    """Positions that have keys and values at once, on all devices together.

    Those of samples are there from the start. Prompts take theirs as they come, the least recently used of those that
    are only kept making room: for the longest there may be and one that a step computes whole, at least.
    """

    tokens: int
    prompt_tokens: int
    prefix_tokens: int  # of prompts that are only kept
    max_length: int  # of one sample, prompt and new tokens
    prompt_bytes: int = 0  # what prompts take of each device


class Memory:
    """The plan in force. It only ever shrinks: what did not fit, where less did, is not tried again in this process."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan

    def shrink(self, plan: MemoryPlan) -> None:
        """Keep to a plan that helped, unless another pass has shown since that less is needed."""
        self.plan = min(self.plan, plan, key=lambda each: (each.micro_batch_tokens, not each.remat))
        log.warning("from now on %s, as that helped", self.plan)


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of one device, by trace."""

    fixed: int
    token: int  # with what products gave kept
    token_with_remat: int


def is_exhausted(error: Exception) -> bool:
    """Return whether a device, or the host for it, had no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error)


def no_memory(purpose: str, error: Exception) -> CapacityError:
    """Return what the caller is told of an exhausted device; the log has the device's own words."""
    log.error("no memory left for %s: %s", purpose, error)
    return CapacityError(
        f"the device has no memory left for {purpose}: nothing was changed. A start with a lower "
        "--backend-config.max-lora-adapters, --backend-config.max-lora-rank or --backend-config.max-sample-tokens "
        "leaves it more"
    )


@contextmanager
def said_if_exhausted(purpose: str) -> Iterator[None]:
    """Raise CapacityError where the device has no memory left for what is done inside."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if is_exhausted(error):
            raise no_memory(purpose, error) from error
        raise


def choose(
    config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig, *, promised: int = 0
) -> MemoryPlan:
    """Return the plan for this device, and say why; the flags, where given, have the last word.

    To be asked once weights and cache are on the device, of which so many bytes are promised to others.
    """
    tokens, remat = config.micro_batch_tokens, config.remat
    free = free_bytes(params)
    if free is None:
        reason = "the device does not tell its memory"
        plan = MemoryPlan(tokens or UNKNOWN_MEMORY_TOKENS, bool(remat))
    else:
        costs = costs_of(params, model)
        free -= promised
        plan = plan_for(free, costs, config, num_shards=params.layout.num_shards("batch"))
        cost = costs.token_with_remat if plan.remat else costs.token
        reason = f"{free / 2**30:.1f} GiB are free, a token takes {cost / 2**10:.0f} KiB"
    told = [name for name, value in (("micro_batch_tokens", tokens), ("remat", remat)) if value is not None]
    log.info(
        "micro-batches of %d tokens, %s: %s%s",
        plan.micro_batch_tokens,
        "layers computed twice" if plan.remat else "results of products kept",
        reason,
        f" ({' and '.join(told)} as told)" if told else "",
    )
    return plan


def plan_for(free: int, costs: Costs, config: JaxConfig, *, num_shards: int) -> MemoryPlan:
    """Return the plan for so many free bytes of each device, of which there are `num_shards` with rows of their own."""

    def tokens_of(cost: int) -> int:
        fitting = (SHARE * free - costs.fixed) / cost
        return min(max(1 << int(math.log2(max(fitting, 1))), FEWEST), MOST)

    remat = tokens_of(costs.token) < ENOUGH if config.remat is None else config.remat
    fitting = tokens_of(costs.token_with_remat) if remat else tokens_of(costs.token)
    return MemoryPlan(config.micro_batch_tokens or fitting * num_shards, remat)


def free_bytes(params: models.DecoderParams) -> int | None:
    """Return what the fullest of the devices has left; None when they do not tell."""
    found: list[int] = []
    for device in params.embed.devices():
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        found.append(stats["bytes_limit"] - stats["bytes_in_use"])
    return min(found)


def sample_room(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> SampleRoom:
    """Return the room for samples, and say why; the flags, where given, have the last word.

    To be asked once weights are on the device. Never more than all slots could use.
    """
    layout, dtype = params.layout, params.embed.dtype
    kv_heads = model.num_kv_heads // math.gcd(layout.num_shards("kv_heads"), model.num_kv_heads)
    rows = layout.num_shards("batch")  # a prompt is one row, which is not cut
    free = free_bytes(params)
    most = config.sample_slots * (config.max_context_length or model.max_context_length)
    if free is None:
        free = _free_on_host(params)
        most = min(most, UNKNOWN_SAMPLE_TOKENS)
        kv_heads, rows = model.num_kv_heads, 1  # all devices are this host
    token = 2 * model.num_layers * kv_heads * model.head_dim * dtype.itemsize
    room = _largest_room(int(SAMPLE_SHARE * max(free, 0) / token), rows, most, config, model)
    log.info(
        "samples of %d tokens at once%s, and prompts of %d: %.1f GiB are free, a token takes %.1f KiB",
        room.tokens,
        " (as told)" if config.max_sample_tokens else "",
        room.prompt_tokens,
        free / 2**30,
        token / 2**10,
    )
    return replace(room, prompt_bytes=room.prompt_tokens * token)


def _largest_room(fitting: int, rows: int, most: int, config: JaxConfig, model: models.ModelConfig) -> SampleRoom:
    """Return what a device takes that has room for so many positions, and one of `rows` parts of each sample's."""
    if config.max_sample_tokens:
        return _room_beside(config.max_sample_tokens, config, model)
    room = _room_beside(max(min(_rounded_down(fitting * rows), most), 1), config, model)
    while room.tokens > 1 and room.tokens / rows + room.prompt_tokens > fitting:
        room = _room_beside(_rounded_down(room.tokens - 1), config, model)
    return room


def _room_beside(tokens: int, config: JaxConfig, model: models.ModelConfig) -> SampleRoom:
    """Return the room for prompts that goes with so many tokens of samples."""
    context = model.max_context_length
    max_length = min(context, config.max_context_length or context, tokens)
    chunks = Chunks.of(config, max_length)
    prefix_tokens = tokens // 4 if config.prefix_cache_tokens is None else config.prefix_cache_tokens
    needed = chunks.longest + chunks.room_of(min(config.prefill_tokens, max_length))
    return SampleRoom(tokens, max(prefix_tokens, needed), prefix_tokens, max_length)


def model_room(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig, *, promised: int = 0) -> int:
    """Return how many models may be in training at once, and say why; the flag, where given, has the last word.

    To be asked once weights and cache are on the device, of which so many bytes are promised to others. A model takes
    memory when it is made, and for its own rank: weights, gradient and two moments. Here all are of the highest rank
    that a client may ask for, and whole on one device, though `tp` may cut them.
    """
    if config.max_lora_adapters is not None:
        return config.max_lora_adapters
    free, cost = max(_free(params) - promised, 0), 4 * _adapter_bytes(model, padded_rank(config.max_lora_rank))
    fitting = int(MODEL_SHARE * free / cost) - 1  # a step, or a load, has the new state of one beside the old
    room = max(1, min(fitting, MOST_MODELS))
    log.info(
        "%d models in training at once: %.1f GiB are free, one of rank %d takes %.1f MiB",
        room,
        free / 2**30,
        config.max_lora_rank,
        cost / 2**20,
    )
    return room


def sampler_places(config: JaxConfig, params: models.DecoderParams, model: models.ModelConfig) -> int:
    """Return how many places for frozen adapters to lay out from the start, the base model's included.

    Places for all that there may be, so that no program changes when another is loaded; or for what a share of the
    memory holds at the default rank. To be asked once weights are on the device.
    """
    fitting = int(POOL_SHARE * _free(params) / _adapter_bytes(model, min(RANK, config.max_lora_rank)))
    return min(1 + config.max_sampler_adapters, max(fitting, FEWEST_PLACES))


def _adapter_bytes(model: models.ModelConfig, rank: int) -> int:
    """Return what an adapter takes."""
    weights = models.adapter_shapes(model, rank).weights
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def _free(params: models.DecoderParams) -> int:
    """Return what the fullest device has left, or the host where devices do not tell."""
    told = free_bytes(params)
    return _free_on_host(params) if told is None else told


def _free_on_host(params: models.DecoderParams) -> int:
    """Return what the host has beside the weights, which decoding has by layer once more."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((params, params.layers)))
    return max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - weights, 0)


def _rounded_down(size: int) -> int:
    """Return `size` to three bits, so that a little less memory at the next start makes no other shapes."""
    step = 1 << max(size.bit_length() - 3, 0)
    return size // step * step


def costs_of(params: models.DecoderParams, config: models.ModelConfig) -> Costs:
    """Return what training takes beside what lies on the device already. Heads that `tp` cuts are counted whole."""

    def of_token(kept: Kept) -> int:
        short, long = (bytes_kept(params, config, length, kept) for length in (512, 1024))
        return (long - short) // (512 * params.layout.num_shards("batch"))

    one_layer = of_token(Kept.ALL) // config.num_layers  # what a layer's own backward pass holds besides
    logits = CHUNK * config.vocab_size * 4
    merged = params.unembed_VD.size * 4 if params.embed.dtype == jnp.float32 else 0  # see layers.lora.AdaptedMap
    return Costs(
        fixed=3 * logits + merged,
        token=of_token(Kept.PRODUCTS) + one_layer,
        token_with_remat=of_token(Kept.INPUTS) + one_layer,
    )


def bytes_kept(params: models.DecoderParams, config: models.ModelConfig, length: int, kept: Kept) -> int:
    """Return what the forward pass hands to the backward pass, by trace: one row a shard, weights counted too."""

    def run(weights: AdapterWeights, scale: jax.Array, params: models.DecoderParams, tokens_BT: jax.Array):
        def hidden_of(weights: AdapterWeights) -> jax.Array:
            own, start_BT = Adapter(weights, scale), jnp.zeros_like(tokens_BT)
            return models.forward(params, config, tokens_BT, own, start_BT=start_BT, kept=kept)

        return jax.vjp(hidden_of, weights)

    adapter = models.adapter_shapes(config, RANK)
    tokens = jax.ShapeDtypeStruct((params.layout.num_shards("batch"), length), jnp.int32)
    outputs = jax.eval_shape(run, adapter.weights, adapter.scale, params, tokens)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(outputs))
