"""The choice of kernels at the start of the backend: by the platform of the devices and the type of base weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.kernels.choice import (
    EXPERTS_TABLE,
    LOOPS,
    MOSAIC_PAGES,
    PAGES_TABLE,
    TABLE,
    AttentionKernel,
    ExpertsKernel,
    Kernels,
    PagesKernel,
)
from skyrl_tx.models.config import Block
from skyrl_tx.models.parts.feed_forward import Mixture

_Kernel = TypeVar("_Kernel", AttentionKernel, PagesKernel, ExpertsKernel)


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
        _chosen("attention_kernel", config.attention_kernel, TABLE, platform, dtype),
        _chosen("pages_kernel", config.pages_kernel, PAGES_TABLE, platform, dtype),
        _chosen("experts_kernel", config.experts_kernel, EXPERTS_TABLE, platform, dtype),
        chunks_together=platform != "cpu",
    )


def _chosen(
    field: str, wanted: str, table: Mapping[tuple[str, str], _Kernel], platform: str, dtype: jnp.dtype
) -> _Kernel | None:
    found = table.get((platform, dtype.name))
    if wanted == LOOPS:
        return None
    if wanted != "auto" and (found is None or found.name != wanted):
        others = " and ".join(f"{kind} with {each}" for (kind, each), kernel in table.items() if kernel.name == wanted)
        raise KernelError(field, f"{wanted} is for {others}, not {platform} with {dtype}")
    return found


def fit_cache(model: models.ModelConfig, platform: str) -> models.ModelConfig:
    """Return the model with keys and values in the cache as the devices of a platform hold them.

    On TPU their dims are a multiple of 128, as the kernel for pages needs them. Fewer would take as much memory there,
    and the compiler would copy the whole cache for the programs that read it.
    """
    if platform != "tpu":
        return model

    def fitted(block: Block) -> Block:
        mixer = block.mixer
        return block if mixer is None else replace(block, mixer=mixer.with_cached_dims(MOSAIC_PAGES.multiple))

    groups = (
        replace(group, stacks=tuple(replace(stack, block=fitted(stack.block)) for stack in group.stacks))
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
    cached = [each.cached_heads for each in mixers if each.cached_heads is not None]
    in_training = [
        _how(kernels.attention_name, None if attention is None else attention.refusal(each)) for each in of_layers
    ]
    in_sampling = [_how(kernels.pages_name, None if pages is None else pages.refusal(each)) for each in cached]
    for where, found in (("training", in_training), ("sampling", in_sampling)):
        for how in dict.fromkeys(found):
            yield f"attention of {found.count(how)} layers in {where}: {how}"
    if num_mixtures(model):
        yield f"experts of {num_mixtures(model)} layers: {kernels.experts_name}"


def num_mixtures(model: models.ModelConfig) -> int:
    """Return the number of layers with experts."""
    return sum(isinstance(block.feed_forward, Mixture) for block in model.blocks)


def _how(kernel: str, refusal: str | None) -> str:
    return kernel if refusal is None else f"{LOOPS}, as {kernel} has no {refusal}"
