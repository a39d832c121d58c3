"""The choice of kernels at the start of the backend: by the platform of the devices and the type of base weights."""

from collections.abc import Iterator

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.layers.kernels.choice import LOOPS, TABLE, Kernels


class KernelError(ValueError):
    """The configured kernel is for other devices, or another type of weights. The message names both."""


def choose_kernels(config: JaxConfig, platform: str, dtype: jnp.dtype) -> Kernels:
    """Return the kernels for a platform, as JAX names it. Raises KernelError if the configured one is for another."""
    found, wanted = TABLE.get((platform, dtype.name)), config.attention_kernel
    if wanted == LOOPS:
        return Kernels()
    if wanted != "auto" and (found is None or found.name != wanted):
        others = " and ".join(f"{kind} with {each}" for (kind, each), kernel in TABLE.items() if kernel.name == wanted)
        raise KernelError(f"{wanted} is for {others}, not {platform} with {dtype}")
    return Kernels(found)


def explain_kernels(kernels: Kernels, model: models.ModelConfig) -> Iterator[str]:
    """Yield how the layers of a model attend in training: by which kernel, or why by loops."""
    reasons: dict[str, list[int]] = {}
    for layer, block in enumerate(model.blocks):
        if block.mixer is not None and (heads := block.mixer.heads) is not None:
            refusal = None if kernels.attention is None else kernels.attention.refusal(heads)
            how = (
                kernels.attention_name if refusal is None else f"{LOOPS}, as {kernels.attention_name} has no {refusal}"
            )
            reasons.setdefault(how, []).append(layer)
    for how, layers in reasons.items():
        yield f"attention of {len(layers)} layers in training: {how}"
