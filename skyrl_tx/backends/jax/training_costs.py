"""The memory of a micro-batch, counted from shapes.

The memory that the backward pass needs is measured, not guessed: the forward pass is traced without being run, at two
lengths, and the bytes of the arrays that it passes on are counted. The difference is the cost of a token; weights,
which both traces pass on whole, cancel out. What there is next to that differs by time: first logits, then what one
layer needs for its gradient. Compilers confirm the result, see tests/unit/backends/jax/test_costs.py.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.kernel_choice import count_moe_layers
from skyrl_tx.layers.kernels.registry import TRITON
from skyrl_tx.layers.logprobs import CHUNK_POSITIONS, JOINED_CHUNKS
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.delta_net import DeltaNet
from skyrl_tx.models.parts.feed_forward import Mixture

_TRACED_LENGTHS = 512, 1024
"""Tokens of the rows that are traced."""
_TPU_DIM = 128
"""Along its last dim an array of a TPU has a multiple of this number of elements in memory."""
_TRACED_MOE_LENGTHS = 16384, 32768
"""The same for models with experts. Rows of fewer tokens have smaller tiles, so memory is not linear below."""
_DELTA_RULE_ARRAYS = 12
"""Arrays of values of all value heads, float32, that a delta net has next to what it passes on.

Compared with the compilers for H200 and v5p: 4,096 to 16,384 tokens of Qwen3.5-9B, on one device and with tp=4."""
_IN_FLIGHT = 2
"""Inputs of layers that are on their way to the host's memory, or back, at the same time."""
DEFAULT_RANK = 32
"""The SDK's default rank (tinker/lib/public_interfaces/service_client.py, create_lora_training_client)."""


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Bytes that training needs on each device, by trace."""

    fixed: int  # whatever the number of tokens, while layers compute their gradients
    head: int  # the same while log-probabilities are computed
    token: int  # with the results of matrix products kept for the backward pass
    token_with_remat: int
    token_offloaded: int  # with the inputs of layers in the host's memory
    host_token: int  # those inputs
    layer_token: int  # the part of each of these that only layers need while they compute their gradients

    def get_bytes_per_token(self, remat: RematPolicy) -> int:
        """Return the bytes of each token by the remat policy."""
        match remat:
            case RematPolicy.OFFLOAD:
                return self.token_offloaded
            case RematPolicy.FULL:
                return self.token_with_remat
            case RematPolicy.SAVE_MATMULS | RematPolicy.NONE:
                return self.token

    def count_micro_batch_bytes(self, num_tokens: int, *, remat: RematPolicy) -> int:
        """Return the bytes that a micro-batch with `num_tokens` on each device takes there."""
        in_layers = self.fixed + self.get_bytes_per_token(remat) * num_tokens
        return max(in_layers, self.head + (self.get_bytes_per_token(remat) - self.layer_token) * num_tokens)

    def count_fitting_tokens(self, size: float, *, remat: RematPolicy) -> int:
        """Return the most tokens of a micro-batch on each device for `size` bytes there; 0 or less if none fit."""
        of_token = self.get_bytes_per_token(remat)
        return int(min((size - self.fixed) / of_token, (size - self.head) / (of_token - self.layer_token)))


def estimate_costs(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> TrainingCosts:
    """Return the bytes that training needs on each device in addition to the weights.

    Layers' inputs, and what mixers return, are whole on each device of `tp`; what else one layer holds, and logits, are
    cut. While experts compute their gradient, compilers hold none of the layer's other arrays. `platform` is as JAX
    names it.
    """
    layout = params.layout
    tp = layout.num_shards("mlp")

    lengths = _choose_traced_lengths(config)

    def count_bytes_per_token(policy: RematPolicy) -> int:
        short, long = (count_residual_bytes(params, config, length, policy) for length in lengths)
        return (long - short) // (lengths[1] - lengths[0]) // layout.num_shards("batch")

    itemsize = params.embed.dtype.itemsize
    stream = config.hidden_size * 4  # the input of one layer
    inputs = len(config.blocks) * stream
    with_head = count_bytes_per_token(RematPolicy.FULL)  # these, and what the final norm and the rest of the head need
    kept = count_bytes_per_token(RematPolicy.SAVE_MATMULS) - with_head
    mixed = min(kept, _count_mixer_output_bytes(config, itemsize))
    kept = mixed + (kept - mixed) // tp
    experts_fixed, of_experts = _estimate_expert_costs(layout, config, itemsize)
    one_layer = max(_count_layer_bytes(params, config), of_experts)
    has_experts = count_moe_layers(config) > 0
    if not has_experts:
        kept -= min(kept // config.num_layers, one_layer)  # the layer in work holds its own part already
    # Parts of the sum of gradients, which are copies if there are several loops over layers, or cycles. With one loop
    # there are none, but programs of dense models take as much as when there were.
    gradient = count_adapter_bytes(config, DEFAULT_RANK, layout)
    if platform == "tpu":  # XLA for TPUs rounds the factors of all layers before the loop over them
        gradient += gradient * itemsize // 4
    copied = count_copied_expert_bytes(params, config, platform)
    head = _count_head_bytes(params, config, platform) + copied
    # The arrays of experts are large, and compilers leave gaps between them: about what three arrays of logits take.
    gaps = (
        3 * CHUNK_POSITIONS * config.vocab_size * 4 // tp + _count_unembedding_bytes(params, platform)
        if has_experts
        else 0
    )
    return TrainingCosts(
        fixed=gradient + experts_fixed + _count_gathered_bytes(params, platform) + gaps + copied,
        head=head,
        token=inputs + kept + one_layer,
        token_with_remat=inputs + one_layer,
        token_offloaded=_IN_FLIGHT * stream + one_layer,
        host_token=inputs,
        # The head has its own arrays instead, and the gradient of the last hidden states.
        layer_token=max(one_layer - (with_head - inputs) - stream, 0),
    )


def _choose_traced_lengths(config: models.ModelConfig) -> tuple[int, int]:
    """Return the numbers of tokens of a device between which memory is taken to be linear."""
    return _TRACED_MOE_LENGTHS if count_moe_layers(config) else _TRACED_LENGTHS


def _count_head_bytes(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> int:
    """Return the bytes for log-probabilities and their gradient: logits of a chunk, and copies of the unembedding."""
    itemsize, num_logits = params.unembed_VD.dtype.itemsize, CHUNK_POSITIONS * config.vocab_size
    of_logits = 3 * num_logits * 4
    if platform == "gpu" and itemsize < 4:  # logits in float32, and their gradient in the weights' type
        of_logits = JOINED_CHUNKS * num_logits * (4 + itemsize)
    return of_logits // params.layout.num_shards("mlp") + _count_unembedding_bytes(params, platform)


def _count_unembedding_bytes(params: models.DecoderParams, platform: str) -> int:
    """Return the bytes of the copies of the unembedding."""
    unembed_VD, layout = params.unembed_VD, params.layout
    if unembed_VD.dtype == jnp.float32:
        return unembed_VD.size * 4  # with the adapter, see layers.lora.AdaptedMap
    # On GPU it lies next to a factor of the adapter, see layers.lora.ConcatenatedMap.
    copies = (platform == "gpu") + (layout.num_shards("embed") > 1)
    return copies * unembed_VD.size * unembed_VD.dtype.itemsize // layout.num_shards("mlp")


def count_adapter_bytes(model: models.ModelConfig, rank: int, layout: Layout) -> int:
    """Return the bytes of an adapter's weights on each device, which are cut as `mesh.make_adapter_placement` does."""
    axes = models.get_adapter_axes(model)

    def size(leaf: jax.Array, of: tuple[Axis | None, ...]) -> int:
        cut = leaf.shape if layout.mesh is None else layout.sharding(of, leaf.shape).shard_shape(leaf.shape)
        return math.prod(cut) * leaf.dtype.itemsize

    weights = models.describe_adapter(model, rank).weights
    return sum(size(pair.a, axes[name][0]) + size(pair.b, axes[name][1]) for name, pair in weights.items())


def _count_mixer_output_bytes(config: models.ModelConfig, itemsize: int) -> int:
    """Return the bytes of a token's results of mixers that are kept for the feed-forwards after them, of all layers."""
    number = sum(block.mixer is not None and block.feed_forward is not None for block in config.blocks)
    return number * config.hidden_size * itemsize


def _count_layer_bytes(params: models.DecoderParams, config: models.ModelConfig) -> int:
    """Return the bytes of a token that one layer holds while it computes its gradient.

    These are the arrays that the gradient needs. Compilers fuse all that is between products, so arrays there have the
    weights' type, in which products read them; those of the hidden size are sums in float32, and whole on each device
    of `tp`.
    """
    layout, itemsize = params.layout, params.embed.dtype.itemsize

    def count_sizes(length: int) -> tuple[int, int]:
        arrays = trace_residuals(params, config, length, RematPolicy.NONE)
        whole = [each.size * each.dtype.itemsize for each in arrays if each.shape[-1:] == (config.hidden_size,)]
        cut = [
            each.size * min(each.dtype.itemsize, itemsize)
            for each in arrays
            if each.shape[-1:] != (config.hidden_size,)
        ]
        return sum(whole), sum(cut)

    lengths = _choose_traced_lengths(config)
    of_short, of_long = map(count_sizes, lengths)
    # A layer of one part may hold twice what such layers do on average, as a mixture does next to a mixer.
    num_layers = max(sum(len(block.parts) for block in config.blocks) // 2, 1)
    num_tokens = (lengths[1] - lengths[0]) * layout.num_shards("batch") * num_layers
    whole, cut = ((long - short) // num_tokens for short, long in zip(of_short, of_long, strict=True))
    if params.kernels.attention is TRITON:  # has keys, values and their gradients for each query head
        heads = (b.mixer.num_heads * b.mixer.head_dim for b in config.blocks if isinstance(b.mixer, Attention))
        cut += 4 * max(heads, default=0) * itemsize
    return (
        whole
        + (cut + _count_delta_rule_bytes(params, config)) // layout.num_shards("mlp")
        + _count_lora_product_bytes(config)
    )


def _count_delta_rule_bytes(params: models.DecoderParams, config: models.ModelConfig) -> int:
    """Return the bytes of a token while a delta net computes its gradient, of which no trace counts anything."""
    if not params.kernels.chunks_together:
        return 0
    nets = (block.mixer for block in config.blocks if isinstance(block.mixer, DeltaNet))
    return max((_DELTA_RULE_ARRAYS * 4 * each.num_value_heads * each.value_dim for each in nets), default=0)


def _count_lora_product_bytes(config: models.ModelConfig) -> int:
    """Return the bytes of a token's products with first factors of adapters, and of their gradients, in one layer.

    They are whole on each device of `tp`. No trace counts them, because the backward pass computes them again.
    """
    num_maps = max(sum(each.num_experts is None for each in block.targets().values()) for block in config.blocks)
    return 2 * num_maps * DEFAULT_RANK * 4


def _count_gathered_bytes(params: models.DecoderParams, platform: str) -> int:
    """Return the bytes of the weights of layers that a device gathers over `fsdp`.

    XLA for GPUs gathers all of a layer whole, and has them twice: the parts, and those in order (see `layers.gather`).
    For TPUs it gathers those of experts, and sends parts of others around.
    """
    layout = params.layout
    if layout.num_shards("embed") == 1:
        return 0
    shards = layout.num_shards("mlp") * layout.num_shards("expert")
    least = 0 if platform == "gpu" else 4  # dims: experts have [n, E, I, O]
    layers = [
        sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(stack) if leaf.ndim >= least)
        for stack in params.layers
    ]
    return (2 if platform == "gpu" else 1) * max(layers) // shards * params.embed.dtype.itemsize


def count_copied_expert_bytes(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> int:
    """Return the bytes of the maps of experts that the compiler of TPUs copies for the kernel, of all layers at once.

    A TPU stores a multiple of _TPU_DIM along the last dim of an array, and the compiler has the dim last that wastes
    less. The kernel reads outputs last. `tp` may cut these to a number for which that is a copy.
    """
    if platform != "tpu" or params.kernels.experts is None:
        return 0
    layout, found = params.layout, 0

    def pad_dim(size: int) -> int:
        return -(-size // _TPU_DIM) * _TPU_DIM

    for block in config.blocks:
        for target in block.targets().values():
            inputs, outputs = (
                size // (layout.num_shards("mlp") if axis == "mlp" else 1)
                for size, axis in zip((target.inputs, target.outputs), target.axes, strict=True)
            )
            if target.num_experts and pad_dim(outputs) * inputs > pad_dim(inputs) * outputs:
                found += target.num_experts // layout.num_shards("expert") * inputs * pad_dim(outputs)
    return found * params.embed.dtype.itemsize


def count_state_copies(layout: Layout, config: models.ModelConfig, platform: str) -> int:
    """Return how many copies of its states a decode slice has: one, which it changes.

    On meshes of GPUs the compiler gives some delta nets another order of dims in the loop of the steps, and copies
    the states of all before it.
    """
    has_nets = any(isinstance(block.mixer, DeltaNet) for block in config.blocks)
    return 2 if has_nets and platform == "gpu" and layout.num_shards("batch") > 1 else 1


def _estimate_expert_costs(layout: Layout, config: models.ModelConfig, itemsize: int) -> tuple[int, int]:
    """Return fixed bytes, and bytes for each token of a device, that the backward pass of one mixture takes.

    No trace counts these arrays, because the gradient is written by hand and they live within it only. All tokens of
    an `ep` group pass through each of its devices.
    """
    ep = layout.num_shards("expert")
    short, long = (
        max(
            (
                block.feed_forward.estimate_backward_bytes(
                    length * ep, DEFAULT_RANK, ep, layout.num_shards("mlp"), itemsize
                )
                for block in dict.fromkeys(config.blocks)
                if isinstance(block.feed_forward, Mixture)
            ),
            default=0,
        )
        for length in _TRACED_MOE_LENGTHS
    )
    of_token = (long - short) // (_TRACED_MOE_LENGTHS[1] - _TRACED_MOE_LENGTHS[0])
    return max(short - of_token * _TRACED_MOE_LENGTHS[0], 0), of_token


def count_residual_bytes(
    params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy
) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, weights included, for one row per shard."""
    return sum(each.size * each.dtype.itemsize for each in trace_residuals(params, config, length, policy))


def trace_residuals(
    params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy
) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays that the forward pass keeps for the backward pass, weights included, for one row per shard.

    Experts are traced without kernel. It keeps the same, but with few tokens its tiles have more places that are empty.
    """
    params = replace(params, kernels=replace(params.kernels, experts=None))

    def run(weights: AdapterWeights, scale: jax.Array, params: models.DecoderParams, tokens_BT: jax.Array):
        def compute_hidden(weights: AdapterWeights) -> jax.Array:
            own, start_BT = Adapter(weights, scale), jnp.zeros_like(tokens_BT)
            return models.forward(params, config, tokens_BT, own, start_BT=start_BT, remat=policy)

        return jax.vjp(compute_hidden, weights)

    adapter = models.describe_adapter(config, DEFAULT_RANK)
    tokens = jax.ShapeDtypeStruct((params.layout.num_shards("batch"), length), jnp.int32)
    return jax.tree.leaves(jax.eval_shape(run, adapter.weights, adapter.scale, params, tokens))
