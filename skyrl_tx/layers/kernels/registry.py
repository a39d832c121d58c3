"""The kernels by platform and type, and what each of them cannot compute.

There are kernels for attention in training, for attention over the pages of the KV cache, and for
experts. Everything that no kernel computes, on other platforms as well, is computed by plain JAX:
the loops of `layers.attention` and `layers.kv_cache.paged_attention`, and XLA's products.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from skyrl_tx.layers.attention import SoftmaxStats
from skyrl_tx.layers.kv_cache import Pages, attend_past_in_blocks
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.sharding import Layout

Attend = Callable[..., jax.Array]
"""A function of (q, k, v, start, sinks) that returns the same as `causal_attention`.

The result is equal up to rounding. Keyword arguments: `window`, and `interpret`, which runs a
kernel on any platform, but slowly.
"""


AttendPast = Callable[..., SoftmaxStats]
"""A function of (q, pages, start, first) that returns the statistics of the past of rows.

Row b of the queries [B, K, G, T, H] attends to its positions below `start[b]`. Its queries are at
consecutive positions from `first[b]` on, which matters for windows. Pages hold finite numbers only,
because they are cleared when they are allocated. Keyword arguments are `window` and `interpret`, as
for Attend. The result is equal up to rounding.
"""


AttendStep = Callable[..., SoftmaxStats]
"""A function of (q, pages, start, recent, num_recent) that returns the statistics of a decode step.

The query of row b [B, K, G, H] attends to its positions below `start[b]` in pages, and to the first
`num_recent` of the recent keys and values [B, K, U, H]. The last of these belongs to the query's
own position. Keyword arguments are `window` and `interpret`, as for Attend. The result is equal up
to rounding.
"""


MultiplyTiles = Callable[..., jax.Array]
"""A function of (x, matrices, index, num_used, added) that multiplies tiles with matrices.

Tile w of x [W, P, I] is multiplied with matrix `index[w]` of [X, I, O], in the type of x, and
accumulated in float32. `added` is None, or the LoRA products that are added (`AddedProducts`). The
result is zero for tiles from `num_used` on. Keyword arguments: `transposed`, for matrices [X, O,
I]; `out_dtype`, the type of the result; and `interpret`, as for Attend.
"""

NormalizeAndRotate = Callable[..., jax.Array]
"""A function of (x, weight, cosine, sine) that returns heads after norm and rotation.

Heads [..., N, H] and the result have the type of the base weights, and are equal to plain JAX up to
rounding. Keyword arguments: `epsilon` and `interpret`.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The properties of a layer's softmax attention that decide whether a kernel can compute it."""

    key_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False
    is_latent: bool = False
    """Whether the cache keeps one latent for all heads instead of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A kernel for attention in training."""

    name: str
    attend: Attend
    max_dim: int
    """The largest head dim that was compiled for these devices."""
    normalize_and_rotate: NormalizeAndRotate | None = None
    """A kernel for norm and rotation of heads whose dim is a power of two; None for plain JAX."""

    def find_refusal(self, heads: Heads) -> str | None:
        """Return what the kernel cannot compute of these heads; None if it can compute them."""
        if max(heads.key_dim, heads.value_dim) > self.max_dim:
            return f"heads of {max(heads.key_dim, heads.value_dim)} dims"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionKernel:
    """A kernel that reads the pages of the KV cache. Callers apply attention sinks."""

    name: str
    attend_past: AttendPast
    attend_step: AttendStep | None = None
    """The kernel for a decode step, which also reads the recent tokens; None if there is none."""
    dims: frozenset[int] | None
    """The supported head dims; None for all multiples of `multiple`."""
    multiple: int

    def find_refusal(self, heads: Heads) -> str | None:
        """Return what the kernel cannot compute of these heads; None if it can read their pages."""
        if heads.is_latent:
            return "latents"
        if heads.key_dim % self.multiple or (self.dims is not None and heads.key_dim not in self.dims):
            return f"heads of {heads.key_dim} dims"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """A kernel for the products of experts."""

    name: str
    multiply_tiles: MultiplyTiles
    min_tile_rows: int
    """The smallest number of rows per tile."""


def _import_when_called(module: str, function: str) -> Callable[..., Any]:
    """Return a kernel of a module that is imported at the first call.

    Kernels are in experimental modules of JAX, which a CPU does not need.
    """

    def call(*arrays: Any, **settings: Any) -> Any:
        return getattr(import_module(f"skyrl_tx.layers.kernels.{module}"), function)(*arrays, **settings)

    return call


SPLASH = AttentionKernel(name="splash", attend=_import_when_called("tpu_splash_attention", "attend"), max_dim=576)
TRITON = AttentionKernel(
    name="triton",
    attend=_import_when_called("gpu_flash_attention", "attend"),
    max_dim=256,
    normalize_and_rotate=_import_when_called("gpu_norm_rope", "normalize_and_rotate"),
)

MOSAIC_PAGES = PagedAttentionKernel(
    name="mosaic", attend_past=_import_when_called("tpu_paged_attention", "attend_past"), dims=None, multiple=128
)
TRITON_PAGES = PagedAttentionKernel(
    name="triton",
    attend_past=_import_when_called("gpu_paged_attention", "attend_past"),
    attend_step=_import_when_called("gpu_paged_attention", "attend_step"),
    dims=frozenset((16, 32, 64, 128, 256)),
    multiple=16,
)

TRITON_EXPERTS = ExpertsKernel(
    name="triton", multiply_tiles=_import_when_called("gpu_grouped_matmul", "multiply_tiles"), min_tile_rows=16
)
MOSAIC_EXPERTS = ExpertsKernel(
    name="mosaic", multiply_tiles=_import_when_called("tpu_grouped_matmul", "multiply_tiles"), min_tile_rows=16
)

MIN_ROTATED_DIM = 32
"""The smallest head dim of norm and rotation in a kernel. Smaller ones were not tried on a GPU."""

LOOPS = "loops"
"""The name of computation without a kernel."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a process uses. They are part of the keys of compiled programs."""

    attention: AttentionKernel | None = None
    """For attention in training; None for the loops."""
    pages: PagedAttentionKernel | None = None
    """For attention over pages in sampling; None for the loop."""
    experts: ExpertsKernel | None = None
    """For mixtures of experts; None for XLA's products."""
    chunks_together: bool = False
    """Whether the delta rule computes the parallel parts of many chunks together.

    It takes more memory, and fewer of the small kernels that are most of its time on an
    accelerator.
    """
    interpret: bool = False
    """Whether kernels run on any platform, but slowly; for tests."""

    @property
    def attention_name(self) -> str:
        """The name of the attention kernel."""
        return LOOPS if self.attention is None else self.attention.name

    @property
    def pages_name(self) -> str:
        """The name of the kernel that reads pages."""
        return LOOPS if self.pages is None else self.pages.name

    @property
    def experts_name(self) -> str:
        """The name of the kernel for experts."""
        return LOOPS if self.experts is None else self.experts.name

    def get_tile_kernel(self) -> partial[jax.Array] | None:
        """Return the function that multiplies the tiles of experts; None for XLA's products."""
        return None if self.experts is None else partial(self.experts.multiply_tiles, interpret=self.interpret)

    def get_attention_kernel(self, heads: Heads) -> partial[jax.Array] | None:
        """Return the function for the attention of a layer; None for the loops."""
        if self.attention is None or self.attention.find_refusal(heads) is not None:
            return None
        return partial(self.attention.attend, window=heads.window, interpret=self.interpret)

    def get_rotation_kernel(self, head_dim: int, rotated: int, layout: Layout) -> partial[jax.Array] | None:
        """Return the function for norm and rotation of heads; None for plain JAX.

        It only supports heads that are rotated as a whole. On a mesh, each device computes its own
        heads.
        """
        kernel = None if self.attention is None else self.attention.normalize_and_rotate
        is_power = head_dim & (head_dim - 1) == 0
        if kernel is None or rotated != head_dim or not is_power or head_dim < MIN_ROTATED_DIM:
            return None
        return partial(_rotate_on_each_device, kernel, layout, interpret=self.interpret)

    def get_past_kernel(self, heads: Heads, layout: Layout) -> AttendPast | None:
        """Return the function for the past of a layer, None for the loop.

        On a mesh, each device computes its own kv heads of the rows whose pages it has.
        """
        past: AttendPast | None = None
        if self.pages is not None and self.pages.find_refusal(heads) is None:
            past = partial(self.pages.attend_past, window=heads.window, interpret=self.interpret)
        elif layout.num_shards("batch") > 1:
            past = partial(attend_past_in_blocks, window=heads.window)
        if past is None or not layout.is_sharded:
            return past
        return partial(_attend_on_each_device, past, layout)

    def get_step_kernel(self, heads: Heads, layout: Layout) -> AttendStep | None:
        """Return the function for a decode step of a layer; None to use the past kernel.

        On a mesh, each device computes its own kv heads of the rows whose pages it has.
        """
        kernel = None if self.pages is None or self.pages.find_refusal(heads) is not None else self.pages.attend_step
        if kernel is None:
            return None
        step = partial(kernel, window=heads.window, interpret=self.interpret)
        return partial(_attend_on_each_device, step, layout) if layout.is_sharded else step


def _attend_on_each_device(
    compute_stats: Callable[..., SoftmaxStats], layout: Layout, q: jax.Array, pages: Pages, *others: Any
) -> SoftmaxStats:
    """Return the statistics of queries [B, K, G, ..., H] on a mesh.

    Each device computes its own kv heads of the rows whose pages it has. Other arguments are
    scalars, [B], or [B, K, U, H].
    """

    def attend_local(q: jax.Array, stack: Any, layer: Any, page_BM: jax.Array, *others: Any) -> SoftmaxStats:
        return compute_stats(q, Pages(stack, layer, page_BM), *others)

    def get_spec(leaf: jax.Array) -> PartitionSpec:
        axes: tuple[Axis | None, ...] = ("batch", "kv_heads", None, None)
        return layout.spec(axes[: leaf.ndim], leaf.shape)

    # If the kv heads cannot be sharded (a single latent), shard the query heads of each kv head.
    group_axis: Axis | None = "heads" if q.shape[1] % layout.num_shards("kv_heads") else None
    queries = layout.spec(("batch", "kv_heads", group_axis, *[None] * (q.ndim - 3)), q.shape)
    stack = jax.tree.map(lambda leaf: layout.spec((None, "batch", "kv_heads", None, None), leaf.shape), pages.stack)
    table = layout.spec(("batch", None), pages.page_BM.shape)
    others = jax.tree.map(jnp.asarray, others)
    run = jax.shard_map(
        attend_local,
        mesh=layout.mesh,
        in_specs=(queries, stack, PartitionSpec(), table, *jax.tree.map(get_spec, others)),
        out_specs=(PartitionSpec(*queries[:-1]), PartitionSpec(*queries[:-1]), queries),
        check_vma=False,
    )
    stats: SoftmaxStats = run(q, pages.stack, jnp.int32(pages.layer), pages.page_BM, *others)
    return stats


def _rotate_on_each_device(
    kernel: NormalizeAndRotate, layout: Layout, x: jax.Array, weight_H: jax.Array, *angles: jax.Array, **settings: Any
) -> jax.Array:
    """Return heads [B, ..., N, H] after norm and rotation.

    On a mesh, each device computes its heads.
    """
    run = partial(kernel, **settings)
    if not layout.is_sharded:
        return run(x, weight_H, *angles)
    leading: tuple[Axis | None, ...] = ("batch", "tokens")[: x.ndim - 2]
    angles = tuple(jnp.broadcast_to(angle, (*x.shape[:-2], angle.shape[-1])) for angle in angles)
    heads = layout.spec((*leading, "heads", None), x.shape)
    in_specs = (heads, PartitionSpec(), *(layout.spec((*leading, None), angle.shape) for angle in angles))
    rotated: jax.Array = jax.shard_map(run, mesh=layout.mesh, in_specs=in_specs, out_specs=heads, check_vma=False)(
        x, weight_H, *angles
    )
    return rotated


NO_KERNELS = Kernels()
"""Plain JAX everywhere."""

_TPU_KERNELS = Kernels(SPLASH, MOSAIC_PAGES, MOSAIC_EXPERTS)
KERNELS: Mapping[tuple[str, str], Kernels] = {
    ("tpu", "bfloat16"): _TPU_KERNELS,
    ("tpu", "float32"): _TPU_KERNELS,
    ("gpu", "bfloat16"): Kernels(TRITON, TRITON_PAGES, TRITON_EXPERTS),
}
"""The kernels by platform and type of the base weights; elsewhere plain JAX."""
