"""Choose the kernels for the platform of the devices and the type of the base weights."""

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.kernels.registry import KERNELS, LOOPS, MOSAIC_PAGES, NO_KERNELS, Kernels
from skyrl_tx.models.config import Block
from skyrl_tx.models.parts.base import Mixer
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.models.parts.recurrent import RecurrentMixer


def choose_kernels(config: JaxConfig, platform: str, dtype: jnp.dtype) -> Kernels:
    """Return the kernels for a platform (`cpu`, `gpu` or `tpu`) and the type of base weights."""
    kernels = NO_KERNELS if config.kernels == LOOPS else KERNELS.get((platform, dtype.name), NO_KERNELS)
    return replace(kernels, chunks_together=platform != "cpu")


def pad_cached_dims(model: models.ModelConfig, platform: str) -> models.ModelConfig:
    """Return the model with the dims of cached keys and values padded for a platform.

    On TPU they are padded to a multiple of 128, which the paged attention kernel needs. This takes
    no more memory, because TPUs pad arrays to 128 anyway. Without it, the compiler would copy the
    whole cache for programs that read it.
    """
    if platform != "tpu":
        return model

    def pad_block(block: Block) -> Block:
        mixer = block.mixer
        return block if mixer is None else replace(block, mixer=mixer.with_cached_dims(MOSAIC_PAGES.multiple))

    groups = (
        replace(group, stacks=tuple(replace(stack, block=pad_block(stack.block)) for stack in group.stacks))
        for group in model.groups
    )
    return replace(model, groups=tuple(groups))


def explain_kernels(kernels: Kernels, model: models.ModelConfig) -> Iterator[str]:
    """Yield log lines: which kernel computes attention and experts, or why plain JAX does.

    For example "attention of 24 layers in sampling: loops, as mosaic has no heads of 64 dims".
    """
    attention, pages = kernels.attention, kernels.pages
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]

    in_training = [
        _describe_choice(kernels.attention_name, None if attention is None else attention.find_refusal(mixer.heads))
        for mixer in mixers
        if mixer.heads is not None
    ]
    in_sampling = [
        _describe_choice(kernels.pages_name, None if pages is None else pages.find_refusal(mixer.cache_heads))
        for mixer in mixers
        if mixer.cache_heads is not None
    ]

    for phase, choices in (("training", in_training), ("sampling", in_sampling)):
        for choice in dict.fromkeys(choices):
            yield f"attention of {choices.count(choice)} layers in {phase}: {choice}"
    if count_moe_layers(model):
        yield f"experts of {count_moe_layers(model)} layers: {kernels.experts_name}"


def can_share_prefixes(kernels: Kernels, model: models.ModelConfig) -> bool:
    """Return whether training on one device can compute the common beginning of examples once.

    Kernels cannot. A delta net can if it computes chunks one after another, as on a CPU. Mamba
    cannot, because its rule has no state for the end of a prefix.
    """

    def can_share(mixer: Mixer) -> bool:
        if isinstance(mixer, RecurrentMixer):
            return mixer.shares_prefixes and not kernels.chunks_together
        return mixer.heads is not None and kernels.get_attention_kernel(mixer.heads) is None

    return all(map(can_share, model.mixers))


def count_moe_layers(model: models.ModelConfig) -> int:
    """Return the number of layers with experts."""
    return sum(isinstance(block.feed_forward, Mixture) for block in model.blocks)


def _describe_choice(kernel: str, refusal: str | None) -> str:
    return kernel if refusal is None else f"{LOOPS}, as {kernel} has no {refusal}"
