"""The memory of a micro-batch, counted from shapes.

The memory that the backward pass needs is measured, not guessed: the forward pass is traced without being run, at two
lengths, and the bytes of the arrays that it passes on are counted. The difference is the cost of a token; weights,
which both traces pass on whole, cancel out. Compilers confirm the result, see tests/unit/backends/jax/test_costs.py.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.layers.logprobs import CHUNK
from skyrl_tx.layers.lora import Adapter, AdapterWeights
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models.parts.mixture import Mixture

_EXPERT_LENGTHS = 2048, 4096
"""Tokens of a device between which the memory of experts is taken to be linear; tiles have their full size there."""
_IN_FLIGHT = 2
"""Inputs of layers that are on their way to the host's memory, or back, at the same time."""
RANK = 32
"""The SDK's default rank (tinker/lib/public_interfaces/service_client.py, create_lora_training_client)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes that training needs on each device, by trace."""

    fixed: int
    token: int  # with the results of matrix products kept for the backward pass
    token_with_remat: int
    token_offloaded: int  # with the inputs of layers in the host's memory
    host_token: int  # those inputs

    def of_token(self, remat: RematPolicy) -> int:
        """Return the bytes of each token by the remat policy."""
        match remat:
            case RematPolicy.OFFLOAD:
                return self.token_offloaded
            case RematPolicy.FULL:
                return self.token_with_remat
            case RematPolicy.SAVE_MATMULS | RematPolicy.NONE:
                return self.token

    def of_pass(self, num_tokens: int, *, remat: RematPolicy) -> int:
        """Return the bytes that a micro-batch with `num_tokens` on each device takes there."""
        return self.fixed + self.of_token(remat) * num_tokens


def costs_of(params: models.DecoderParams, config: models.ModelConfig, platform: str) -> Costs:
    """Return the bytes that training needs on each device in addition to the weights.

    Layers' inputs are whole on each device of `tp`; what one layer holds, and logits, are cut. While experts compute
    their gradient, compilers hold none of the layer's other arrays. `platform` is as JAX names it.
    """
    layout = params.layout
    tp = layout.num_shards("mlp")

    def of_token(policy: RematPolicy) -> int:
        short, long = (bytes_kept(params, config, length, policy) for length in (512, 1024))
        return (long - short) // (512 * layout.num_shards("batch"))

    # Held during one layer's backward pass. Tokens on their way through experts are whole on each device of `tp`.
    has_experts = any(isinstance(block.feed_forward, Mixture) for block in config.blocks)
    # A layer of one part may hold twice what such layers do on average, as a mixture does next to a mixer.
    num_layers = max(sum(len(block.parts) for block in config.blocks) // 2, 1)
    one_layer = of_token(RematPolicy.NONE) // num_layers // (1 if has_experts else tp) + _bytes_of_ranks(config)
    inputs = of_token(RematPolicy.FULL)
    of_stream = config.hidden_size * 4  # the input of one layer
    offloaded = len(config.blocks) * of_stream
    logits = CHUNK * config.vocab_size * 4 // tp
    merged = params.unembed_VD.size * 4 if params.embed.dtype == jnp.float32 else 0  # see layers.lora.AdaptedMap
    experts_fixed, of_experts = _costs_of_experts(layout, config, params.embed.dtype.itemsize)
    one_layer = max(one_layer, of_experts)
    kept = (of_token(RematPolicy.SAVE_MATMULS) - inputs) // tp
    if not has_experts:
        kept -= min(kept // config.num_layers, one_layer)  # the layer in work holds its own part already
    return Costs(
        fixed=3 * logits + merged + experts_fixed + (_gathered_bytes(params) if platform == "gpu" else 0),
        token=inputs + kept + one_layer,
        token_with_remat=inputs + one_layer,
        token_offloaded=inputs - offloaded + _IN_FLIGHT * of_stream + one_layer,
        host_token=offloaded,
    )


def _bytes_of_ranks(config: models.ModelConfig) -> int:
    """Return the bytes of a token's products with first factors of adapters, and of their gradients, in one layer.

    They are whole on each device of `tp`. No trace counts them, because the backward pass computes them again.
    """
    num_maps = max(sum(each.num_experts is None for each in block.targets().values()) for block in config.blocks)
    return 2 * num_maps * RANK * 4


def _gathered_bytes(params: models.DecoderParams) -> int:
    """Return the bytes of the weights that a device gathers over `fsdp`: the unembedding, and those of one layer.

    XLA for GPUs gathers them whole, and the next layer's while it computes with these. For TPUs it sends parts around.
    """
    layout = params.layout
    if layout.num_shards("embed") == 1:
        return 0
    shards = layout.num_shards("mlp") * layout.num_shards("expert")
    layers = [sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(stack)) for stack in params.layers]
    gathered = params.unembed_VD.size // layout.num_shards("mlp") + 2 * max(layers) // shards
    return gathered * params.embed.dtype.itemsize


def _costs_of_experts(layout: Layout, config: models.ModelConfig, itemsize: int) -> tuple[int, int]:
    """Return fixed bytes, and bytes for each token of a device, that the backward pass of one mixture takes.

    No trace counts these arrays, because the gradient is written by hand and they live within it only. All tokens of
    an `ep` group pass through each of its devices.
    """
    ep = layout.num_shards("expert")
    short, long = (
        max(
            (
                block.feed_forward.backward_bytes(length * ep, RANK, ep, layout.num_shards("mlp"), itemsize)
                for block in dict.fromkeys(config.blocks)
                if isinstance(block.feed_forward, Mixture)
            ),
            default=0,
        )
        for length in _EXPERT_LENGTHS
    )
    of_token = (long - short) // (_EXPERT_LENGTHS[1] - _EXPERT_LENGTHS[0])
    return max(short - of_token * _EXPERT_LENGTHS[0], 0), of_token


def bytes_kept(params: models.DecoderParams, config: models.ModelConfig, length: int, policy: RematPolicy) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, weights included, for one row per shard."""

    def run(weights: AdapterWeights, scale: jax.Array, params: models.DecoderParams, tokens_BT: jax.Array):
        def hidden_of(weights: AdapterWeights) -> jax.Array:
            own, start_BT = Adapter(weights, scale), jnp.zeros_like(tokens_BT)
            return models.forward(params, config, tokens_BT, own, start_BT=start_BT, remat=policy)

        return jax.vjp(hidden_of, weights)

    adapter = models.adapter_shapes(config, RANK)
    tokens = jax.ShapeDtypeStruct((params.layout.num_shards("batch"), length), jnp.int32)
    outputs = jax.eval_shape(run, adapter.weights, adapter.scale, params, tokens)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(outputs))
