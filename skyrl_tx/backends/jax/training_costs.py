"""Estimate the memory of a training micro-batch from shapes.

The forward pass is traced for two row lengths, without running it. For each trace, we count the
bytes of the arrays that the forward pass keeps for the backward pass (residuals). The difference
between the two traces, divided by the difference of the lengths, is the cost of a token. Weights
are in both traces and cancel out.

Temporary arrays come on top. The backward pass first has the logits in memory, and later the arrays
of the layer whose gradient it computes, but not both. So the larger of the two is added.

tests/unit/backends/jax/test_training_costs.py compares the estimates with the memory that compilers
report.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.kernel_choice import count_moe_layers
from skyrl_tx.backends.jax.mesh import map_factors
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
"""The two row lengths that are traced, in tokens."""
_TRACED_MOE_LENGTHS = 16384, 32768
"""The two row lengths for models with experts.

Shorter rows have smaller tiles, so their memory does not grow linearly.
"""
_TPU_DIM = 128
"""TPUs pad the last dim of an array to a multiple of this number of elements."""
_DELTA_RULE_ARRAYS = 12
"""How many float32 arrays with the size of the values exist while a delta net computes its gradient.

Each has the shape [tokens, value heads, value dim]. The number fits what the compilers for H200 and
v5p report for Qwen3.5-9B with 4,096 to 16,384 tokens, on one device and with tp=4.
"""
_IN_FLIGHT = 2
"""How many layer inputs are being copied to or from host memory at the same time."""
DEFAULT_RANK = 32
"""The default rank of the SDK.

Source: create_lora_training_client in tinker/lib/public_interfaces/service_client.py.
"""


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Bytes that training needs on each device, in addition to the weights.

    Memory has two peaks: while log-probabilities are computed, and while layers compute their
    gradients. Each peak has a part that is fixed and a part that grows with the number of tokens.
    """

    fixed_layer_bytes: int
    """The fixed bytes while layers compute their gradients."""
    fixed_logprob_bytes: int
    """The fixed bytes while log-probabilities are computed."""
    token_bytes: int
    """Bytes per token if the results of matrix products are kept for the backward pass."""
    token_bytes_with_remat: int
    """Bytes per token with rematerialization."""
    token_bytes_offloaded: int
    """Bytes per token with rematerialization and the inputs of layers in host memory."""
    host_token_bytes: int
    """Bytes of host memory per token, for offloaded inputs of layers."""
    layer_token_bytes: int
    """Bytes per token that exist only while layers compute their gradients.

    They are included in `token_bytes`, `token_bytes_with_remat` and `token_bytes_offloaded`.
    """

    def get_bytes_per_token(self, remat: RematPolicy) -> int:
        """Return the bytes per token with a remat policy."""
        match remat:
            case RematPolicy.OFFLOAD:
                return self.token_bytes_offloaded
            case RematPolicy.FULL:
                return self.token_bytes_with_remat
            case RematPolicy.SAVE_MATMULS | RematPolicy.NONE:
                return self.token_bytes

    def count_micro_batch_bytes(self, num_tokens: int, *, remat: RematPolicy) -> int:
        """Return the bytes on each device for a micro-batch with `num_tokens` tokens on each device."""
        token_bytes = self.get_bytes_per_token(remat)
        layer_peak = self.fixed_layer_bytes + token_bytes * num_tokens
        logprob_peak = self.fixed_logprob_bytes + (token_bytes - self.layer_token_bytes) * num_tokens
        return max(layer_peak, logprob_peak)

    def count_fitting_tokens(self, size: float, *, remat: RematPolicy) -> int:
        """Return how many tokens of a micro-batch fit into `size` bytes; 0 or less if none fit."""
        token_bytes = self.get_bytes_per_token(remat)
        in_layer_peak = (size - self.fixed_layer_bytes) / token_bytes
        in_logprob_peak = (size - self.fixed_logprob_bytes) / (token_bytes - self.layer_token_bytes)
        return int(min(in_layer_peak, in_logprob_peak))


def estimate_costs(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> TrainingCosts:
    """Estimate the bytes that training needs on each device in addition to the weights.

    `params` may contain shapes instead of arrays, and has the layout of training. `platform` is
    `cpu`, `gpu` or `tpu`.

    The estimate assumes that the inputs of layers and the outputs of mixers are replicated over
    `tp`, and that logits and the other arrays of a layer are sharded. While experts compute their
    gradient, no other array of the layer is in memory.
    """
    layout = params.layout
    tp = layout.num_shards("mlp")
    lengths = _choose_traced_lengths(config)

    def count_bytes_per_token(policy: RematPolicy) -> int:
        short, long = (count_residual_bytes(params, config, length, policy) for length in lengths)
        return (long - short) // (lengths[1] - lengths[0]) // layout.num_shards("batch")

    # Arrays that are kept for the backward pass, in bytes per token
    itemsize = params.embed.dtype.itemsize
    layer_input_bytes = config.hidden_size * 4
    input_bytes = len(config.blocks) * layer_input_bytes
    full_remat_bytes = count_bytes_per_token(RematPolicy.FULL)  # also arrays of the final norm
    kept_bytes = count_bytes_per_token(RematPolicy.SAVE_MATMULS) - full_remat_bytes
    mixer_output_bytes = min(kept_bytes, _count_mixer_output_bytes(config, itemsize))
    kept_bytes = mixer_output_bytes + (kept_bytes - mixer_output_bytes) // tp  # mixer outputs are replicated

    # Temporary arrays of one layer, in bytes per token
    fixed_expert_bytes, expert_token_bytes = _estimate_expert_costs(layout, config, itemsize)
    one_layer_bytes = max(_count_layer_bytes(params, config), expert_token_bytes)
    has_experts = count_moe_layers(config) > 0
    if not has_experts:
        # `one_layer_bytes` already has the arrays that the layer in progress keeps. With experts it
        # does not have them.
        kept_bytes -= min(kept_bytes // config.num_layers, one_layer_bytes)

    # A temporary copy of an adapter's gradient. If the model runs as multiple loops over layers, or
    # as a loop over cycles of layers, the compiler copies parts of the gradient before it adds to
    # them. With a single loop there is no copy, but for dense models the compilers report as much
    # memory as with one. So the copy is always counted.
    gradient_bytes = count_adapter_bytes(config, DEFAULT_RANK, layout)
    if platform == "tpu":  # before the loop over layers, XLA copies all LoRA factors to the type of the weights
        gradient_bytes += gradient_bytes * itemsize // 4
    copied_bytes = count_copied_expert_bytes(params, config, platform)

    # The arrays of experts are large, and compilers leave unused memory between them. It is about
    # as much as three arrays of logits.
    gap_bytes = (
        3 * CHUNK_POSITIONS * config.vocab_size * 4 // tp + _count_unembedding_bytes(params, platform)
        if has_experts
        else 0
    )
    layer_bytes = gradient_bytes + fixed_expert_bytes + gap_bytes + copied_bytes

    return TrainingCosts(
        fixed_layer_bytes=layer_bytes + _count_gathered_bytes(params, platform),
        fixed_logprob_bytes=_count_logit_bytes(params, config, platform) + copied_bytes,
        token_bytes=input_bytes + kept_bytes + one_layer_bytes,
        token_bytes_with_remat=input_bytes + one_layer_bytes,
        token_bytes_offloaded=_IN_FLIGHT * layer_input_bytes + one_layer_bytes,
        host_token_bytes=input_bytes,
        # While log-probabilities are computed, the arrays of a layer do not exist yet. Instead there
        # are the arrays of the final norm, and the gradient of the hidden states after it.
        layer_token_bytes=max(one_layer_bytes - (full_remat_bytes - input_bytes) - layer_input_bytes, 0),
    )


def _choose_traced_lengths(config: models.ModelConfig) -> tuple[int, int]:
    """Return the two row lengths to trace. Memory is assumed to grow linearly with the length."""
    return _TRACED_MOE_LENGTHS if count_moe_layers(config) else _TRACED_LENGTHS


def _count_logit_bytes(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> int:
    """Return the bytes of one chunk of logits with its gradient, and of copies of the unembedding."""
    itemsize, num_logits = params.unembed_VD.dtype.itemsize, CHUNK_POSITIONS * config.vocab_size
    logits_bytes = 3 * num_logits * 4
    if platform == "gpu" and itemsize < 4:  # logits in float32, and their gradient in the type of the weights
        logits_bytes = JOINED_CHUNKS * num_logits * (4 + itemsize)
    return logits_bytes // params.layout.num_shards("mlp") + _count_unembedding_bytes(params, platform)


def _count_unembedding_bytes(params: models.DecoderParams, platform: str) -> int:
    """Return the bytes of the copies of the unembedding."""
    unembed_VD, layout = params.unembed_VD, params.layout
    if unembed_VD.dtype == jnp.float32:
        return unembed_VD.size * 4  # a copy with the adapter's update added, see layers.lora.AdaptedMap
    # On GPU, a copy with a factor of the adapter appended, see layers.lora.ConcatenatedMap.
    copies = (platform == "gpu") + (layout.num_shards("embed") > 1)
    return copies * unembed_VD.size * unembed_VD.dtype.itemsize // layout.num_shards("mlp")


def count_adapter_bytes(model: models.ModelConfig, rank: int, layout: Layout) -> int:
    """Return the bytes of an adapter on each device, sharded as in `make_adapter_placement`."""

    def count_bytes(leaf: jax.Array, axes: tuple[Axis | None, ...]) -> int:
        shape = leaf.shape if layout.mesh is None else layout.sharding(axes, leaf.shape).shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(map_factors(count_bytes, model, models.describe_adapter(model, rank).weights)))


def _count_mixer_output_bytes(config: models.ModelConfig, itemsize: int) -> int:
    """Return the bytes per token of mixer outputs in all layers that also have a feed-forward network."""
    number = sum(block.mixer is not None and block.feed_forward is not None for block in config.blocks)
    return number * config.hidden_size * itemsize


def _count_layer_bytes(params: models.DecoderParams, config: models.ModelConfig) -> int:
    """Return the bytes per token of the arrays of one layer while it computes its gradient.

    Arrays whose last dim is the hidden size, for example the residual stream, are replicated over
    `tp`. They are stored in the type that the trace shows. All other arrays are inputs of matrix
    products. Compilers fuse the operations between two products, so they store these arrays in the
    type of the weights, even if the trace has them in float32.
    """
    layout, itemsize = params.layout, params.embed.dtype.itemsize

    def count_bytes(length: int) -> tuple[int, int]:
        replicated = sharded = 0
        for array in trace_residuals(params, config, length, RematPolicy.NONE):
            if array.shape[-1:] == (config.hidden_size,):
                replicated += array.size * array.dtype.itemsize
            else:
                sharded += array.size * min(array.dtype.itemsize, itemsize)
        return replicated, sharded

    # The trace has the arrays of all layers, so the result is an average over layers. If each layer
    # is either a mixer or a feed-forward network, a layer of experts may need twice the average. So
    # two such layers count as one.
    lengths = _choose_traced_lengths(config)
    short_bytes, long_bytes = map(count_bytes, lengths)
    num_layers = max(sum(len(block.parts) for block in config.blocks) // 2, 1)
    num_tokens = (lengths[1] - lengths[0]) * layout.num_shards("batch") * num_layers
    replicated, sharded = ((long - short) // num_tokens for short, long in zip(short_bytes, long_bytes, strict=True))

    # Arrays that the trace does not show
    if params.kernels.attention is TRITON:  # copies keys, values and their gradients for each query head
        heads = (b.mixer.num_heads * b.mixer.head_dim for b in config.blocks if isinstance(b.mixer, Attention))
        sharded += 4 * max(heads, default=0) * itemsize
    sharded += _count_delta_rule_bytes(params, config)
    return replicated + sharded // layout.num_shards("mlp") + _count_lora_product_bytes(config)


def _count_delta_rule_bytes(params: models.DecoderParams, config: models.ModelConfig) -> int:
    """Return the bytes per token of the arrays that exist while a delta net computes its gradient.

    The trace does not show these arrays. Returns 0 if the delta rule computes the chunks of a
    sequence one after another, because then the arrays of only one chunk exist at a time.
    """
    if not params.kernels.chunks_together:
        return 0
    nets = (block.mixer for block in config.blocks if isinstance(block.mixer, DeltaNet))
    return max((_DELTA_RULE_ARRAYS * 4 * net.num_value_heads * net.value_dim for net in nets), default=0)


def _count_lora_product_bytes(config: models.ModelConfig) -> int:
    """Return the bytes per token of the products with the LoRA factors A of one layer, and of their gradients.

    These arrays are replicated over `tp`. The trace does not show them, because the backward pass
    computes them again.
    """
    num_targets = max(sum(target.num_experts is None for target in block.targets().values()) for block in config.blocks)
    return 2 * num_targets * DEFAULT_RANK * 4


def _count_gathered_bytes(params: models.DecoderParams, platform: str) -> int:
    """Return the bytes of weights that a device gathers over `fsdp` for one layer.

    XLA for GPUs gathers all weights of a layer. It stores them twice, in the order in which they
    were received and in the order of the array (see `layers.gather`). XLA for TPUs gathers the
    weights of experts only. Parts of all other weights are passed from device to device.
    """
    layout = params.layout
    if layout.num_shards("embed") == 1:
        return 0
    shards = layout.num_shards("mlp") * layout.num_shards("expert")
    min_ndim = 0 if platform == "gpu" else 4  # experts have [n, E, I, O]
    layer_sizes = [
        sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(stack) if leaf.ndim >= min_ndim)
        for stack in params.layers
    ]
    return (2 if platform == "gpu" else 1) * max(layer_sizes) // shards * params.embed.dtype.itemsize


def count_copied_expert_bytes(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> int:
    """Return the bytes of expert weights that XLA for TPUs copies for the kernel, over all layers.

    The kernel reads matrices whose last dim in memory is the output dim. A TPU pads the last dim to
    a multiple of _TPU_DIM, and the compiler chooses the order of dims that needs less padding. With
    `tp`, the shard of the output dim may be so small that the compiler puts the input dim last.
    Then it copies the weights of all layers at once for the kernel.
    """
    if platform != "tpu" or params.kernels.experts is None:
        return 0
    layout, num_elements = params.layout, 0

    def pad_dim(size: int) -> int:
        return -(-size // _TPU_DIM) * _TPU_DIM

    for block in config.blocks:
        for target in block.targets().values():
            inputs, outputs = (
                size // (layout.num_shards("mlp") if axis == "mlp" else 1)
                for size, axis in zip((target.inputs, target.outputs), target.axes, strict=True)
            )
            if target.num_experts and pad_dim(outputs) * inputs > pad_dim(inputs) * outputs:
                num_elements += target.num_experts // layout.num_shards("expert") * inputs * pad_dim(outputs)
    return num_elements * params.embed.dtype.itemsize


def count_state_copies(layout: Layout, config: models.ModelConfig, platform: str) -> int:
    """Return how many copies of the recurrent states exist while decode steps run.

    Usually it is 1, because the program for a decode slice (several decode steps) changes a copy
    and not the states themselves. On meshes of GPUs it is 2 for models with delta nets: in the loop
    over decode steps, the compiler orders the dims of some states differently, so it copies the
    states of all layers before the loop.
    """
    has_nets = any(isinstance(block.mixer, DeltaNet) for block in config.blocks)
    return 2 if has_nets and platform == "gpu" and layout.num_shards("batch") > 1 else 1


def _estimate_expert_costs(layout: Layout, config: models.ModelConfig, itemsize: int) -> tuple[int, int]:
    """Return the fixed bytes and the bytes per token for the backward pass of a layer of experts.

    The trace does not show these arrays, because the gradient of experts is written by hand. With
    `ep`, all tokens of an `ep` group pass through each of its devices.
    """
    ep, tp = layout.num_shards("expert"), layout.num_shards("mlp")
    layers = [block.feed_forward for block in dict.fromkeys(config.blocks) if isinstance(block.feed_forward, Mixture)]

    def count_bytes(length: int) -> int:
        sizes = (layer.estimate_backward_bytes(length * ep, DEFAULT_RANK, ep, tp, itemsize) for layer in layers)
        return max(sizes, default=0)

    short, long = map(count_bytes, _TRACED_MOE_LENGTHS)
    token_bytes = (long - short) // (_TRACED_MOE_LENGTHS[1] - _TRACED_MOE_LENGTHS[0])
    return max(short - token_bytes * _TRACED_MOE_LENGTHS[0], 0), token_bytes


def count_residual_bytes(
    params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy
) -> int:
    """Return the bytes of the arrays that `trace_residuals` returns."""
    return sum(array.size * array.dtype.itemsize for array in trace_residuals(params, config, length, policy))


def trace_residuals(
    params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy
) -> list[jax.ShapeDtypeStruct]:
    """Trace the forward pass of one row of `length` tokens on each shard of the batch.

    Returns the arrays that it keeps for the backward pass, including weights. Experts are traced
    without their kernel. The kernel keeps the same arrays, but with more padding if there are few
    tokens.
    """
    params = replace(params, kernels=replace(params.kernels, experts=None))

    def run(weights: AdapterWeights, scale: jax.Array, params: models.DecoderParams, tokens_BT: jax.Array):
        def compute_hidden(weights: AdapterWeights) -> jax.Array:
            adapter, start_BT = Adapter(weights, scale), jnp.zeros_like(tokens_BT)
            return models.forward(params, config, tokens_BT, adapter, start_BT=start_BT, remat=policy)

        return jax.vjp(compute_hidden, weights)

    adapter = models.describe_adapter(config, DEFAULT_RANK)
    tokens = jax.ShapeDtypeStruct((params.layout.num_shards("batch"), length), jnp.int32)
    return jax.tree.leaves(jax.eval_shape(run, adapter.weights, adapter.scale, params, tokens))
