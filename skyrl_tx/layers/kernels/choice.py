"""The table of attention kernels in training by platform and type, and what each of them cannot compute.

What no kernel computes, and all on other platforms, is computed by the loops of `layers.flash_attention`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

Attend = Callable[..., jax.Array]
"""A function of (q, k, v, start, sinks) that returns the same as `causal_attention`, up to rounding.

Further arguments are `window`, and `interpret`, with which a kernel runs on any platform, slowly.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of softmax attention in a layer by which kernels differ. The number of heads is none of them."""

    key_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A kernel, as data."""

    name: str
    attend: Attend
    max_dim: int
    """The largest head that was compiled for such devices."""
    has_windows: bool
    has_sinks: bool
    has_two_dims: bool
    """Whether values may have another dim than keys."""

    def refusal(self, heads: Heads) -> str | None:
        """Return what the kernel lacks for these heads; None if it can compute them."""
        if max(heads.key_dim, heads.value_dim) > self.max_dim:
            return f"heads of {max(heads.key_dim, heads.value_dim)} dims"
        if heads.value_dim != heads.key_dim and not self.has_two_dims:
            return "values of another dim than keys"
        if heads.window is not None and not self.has_windows:
            return "windows"
        return "sinks" if heads.has_sinks and not self.has_sinks else None


# Kernels are imported when they are first called: they are in experimental modules of JAX, which no CPU needs.


def _splash(*arrays: Any, window: int | None, interpret: bool) -> jax.Array:
    from skyrl_tx.layers.kernels import splash

    return splash.attend(*arrays, window=window, interpret=interpret)


def _triton(*arrays: Any, window: int | None, interpret: bool) -> jax.Array:
    from skyrl_tx.layers.kernels import triton

    assert window is None
    return triton.attend(*arrays, interpret=interpret)


SPLASH = AttentionKernel(
    name="splash", attend=_splash, max_dim=576, has_windows=True, has_sinks=True, has_two_dims=True
)
TRITON = AttentionKernel(
    name="triton", attend=_triton, max_dim=256, has_windows=False, has_sinks=False, has_two_dims=False
)

TABLE: Mapping[tuple[str, str], AttentionKernel] = {
    ("tpu", "bfloat16"): SPLASH,
    ("tpu", "float32"): SPLASH,
    ("gpu", "bfloat16"): TRITON,
}
"""The kernel of each platform and type of the base weights; the loops elsewhere."""

LOOPS = "loops"
"""The name of attention without a kernel."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a process uses. Part of compiled programs' keys."""

    attention: AttentionKernel | None = None
    """In training; None for the loops."""
    interpret: bool = False
    """Whether kernels run on any platform, slowly; for tests."""

    @property
    def attention_name(self) -> str:
        """The name of the attention kernel."""
        return LOOPS if self.attention is None else self.attention.name

    def attend(self, heads: Heads) -> partial[jax.Array] | None:
        """Return the function for the attention of a layer, without its arrays; None for the loops."""
        if self.attention is None or self.attention.refusal(heads) is not None:
            return None
        return partial(self.attention.attend, window=heads.window, interpret=self.interpret)


NO_KERNELS = Kernels()
"""Plain JAX everywhere."""
