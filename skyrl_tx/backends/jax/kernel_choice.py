"""The choice of kernels at the start of the backend: by the platform of the devices and the type of base weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.kernels.registry import (
    ATTENTION_KERNELS,
    EXPERTS_KERNELS,
    LOOPS,
    MOSAIC_PAGES,
    PAGED_ATTENTION_KERNELS,
    AttentionKernel,
    ExpertsKernel,
    Kernels,
    PagedAttentionKernel,
)
from skyrl_tx.models.config import Block
from skyrl_tx.models.parts.feed_forward import Mixture

_Kernel = TypeVar("_Kernel", AttentionKernel, PagedAttentionKernel, ExpertsKernel)


class KernelError(ValueError):
    """The configured kernel is for other devices, or another type of weights. The message names both."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.setting = field


def choose_kernels(config: JaxConfig, platform: str, dtype: jnp.dtype) -> Kernels:
    """Return the kernels for a platform, as JAX names it. Raises KernelError if a configured one is for another."""
    if config.kernels == LOOPS:
        return Kernels(None, None, None, chunks_together=platform != "cpu")
    return Kernels(
        _choose_kernel("attention_kernel", config.attention_kernel, ATTENTION_KERNELS, platform, dtype),
        _choose_kernel("pages_kernel", config.pages_kernel, PAGED_ATTENTION_KERNELS, platform, dtype),
        _choose_kernel("experts_kernel", config.experts_kernel, EXPERTS_KERNELS, platform, dtype),
        chunks_together=platform != "cpu",
    )


def _choose_kernel(
    field: str, wanted: str, table: Mapping[tuple[str, str], _Kernel], platform: str, dtype: jnp.dtype
) -> _Kernel | None:
    found = table.get((platform, dtype.name))
    if wanted == LOOPS:
        return None
    if wanted != "auto" and (found is None or found.name != wanted):
        others = " and ".join(f"{kind} with {each}" for (kind, each), kernel in table.items() if kernel.name == wanted)
        raise KernelError(field, f"{wanted} is for {others}, not {platform} with {dtype}")
    return found


def pad_cached_dims(model: models.ModelConfig, platform: str) -> models.ModelConfig:
    """Return the model with keys and values in the cache as the devices of a platform hold them.

    On TPU their dims are a multiple of 128, as the kernel for pages needs them. Fewer would take as much memory there,
    and the compiler would copy the whole cache for the programs that read it.
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
    """Yield how the layers of a model attend in training and in sampling, and how their experts are computed.

    By which kernel, or why by loops.
    """
    attention, pages = kernels.attention, kernels.pages
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    of_layers = [each.heads for each in mixers if each.heads is not None]
    cached = [each.cache_heads for each in mixers if each.cache_heads is not None]
    in_training = [
        _describe_choice(kernels.attention_name, None if attention is None else attention.find_refusal(each))
        for each in of_layers
    ]
    in_sampling = [
        _describe_choice(kernels.pages_name, None if pages is None else pages.find_refusal(each)) for each in cached
    ]
    for where, found in (("training", in_training), ("sampling", in_sampling)):
        for how in dict.fromkeys(found):
            yield f"attention of {found.count(how)} layers in {where}: {how}"
    if count_moe_layers(model):
        yield f"experts of {count_moe_layers(model)} layers: {kernels.experts_name}"


def count_moe_layers(model: models.ModelConfig) -> int:
    """Return the number of layers with experts."""
    return sum(isinstance(block.feed_forward, Mixture) for block in model.blocks)


def _describe_choice(kernel: str, refusal: str | None) -> str:
    return kernel if refusal is None else f"{LOOPS}, as {kernel} has no {refusal}"
