"""The tables of attention kernels by platform and type, and what each of them cannot compute.

There is one for training and one for what the KV cache has in pages. What no kernel computes, and all on other
platforms, is computed by loops: those of `layers.flash_attention`, and that of `layers.attention.paged_attention`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from skyrl_tx.layers.attention import attend_past_in_blocks
from skyrl_tx.layers.flash_attention import SoftmaxStats
from skyrl_tx.layers.kv_cache import Pages
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.layers.sharding import Layout

Attend = Callable[..., jax.Array]
"""A function of (q, k, v, start, sinks) that returns the same as `causal_attention`, up to rounding.

Further arguments are `window`, and `interpret`, with which a kernel runs on any platform, slowly.
"""


AttendPast = Callable[..., SoftmaxStats]
"""A function of (q, pages, start, first) that returns the statistics of the past of rows, up to rounding.

Row b of the queries [B, K, G, T, H] attends to its positions < `start[b]`. Its queries are at consecutive positions
from `first[b]` on, by which a window is cut. What pages hold is finite: they are cleared when they are taken. Further
arguments are `window` and `interpret`, as of Attend.
"""


AttendStep = Callable[..., SoftmaxStats]
"""A function of (q, pages, start, recent, num_recent) that returns the statistics of a decode step, up to rounding.

The query of row b [B, K, G, H] attends to its positions < `start[b]` in pages and to the first `num_recent` of the
recent keys and values [B, K, U, H], of which the last one is its own. Further arguments are those of Past.
"""


MultiplyTiles = Callable[..., jax.Array]
"""A function of (x, matrices, index, num_used, added) that multiplies tiles of rows with one matrix each.

Tile w of x [W, P, I] is multiplied with matrix `index[w]` of [X, I, O], in the type of x, and accumulated in float32.
`added` may be None. Of tiles from `num_used` on the result is zero. Further arguments are `transposed`, with which all
matrices are [X, O, I], the type `result`, and `interpret`.
"""

NormalizeAndRotate = Callable[..., jax.Array]
"""A function of (x, weight, cosine, sine) that returns heads after their norm and rotation, up to rounding.

Heads [..., N, H] and the result have the type of the base weights. Further arguments are `epsilon` and `interpret`.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of softmax attention in a layer by which kernels differ. The number of heads is none of them."""

    key_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False
    is_latent: bool = False
    """Whether the cache keeps one latent for all heads, in place of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A kernel, as data."""

    name: str
    attend: Attend
    max_dim: int
    """The largest head that was compiled for such devices."""
    normalize_and_rotate: NormalizeAndRotate | None = None
    """A kernel for norm and rotation of heads, whose dim is a power of two; None for plain JAX."""

    def find_refusal(self, heads: Heads) -> str | None:
        """Return what the kernel lacks for these heads; None if it can compute them."""
        if max(heads.key_dim, heads.value_dim) > self.max_dim:
            return f"heads of {max(heads.key_dim, heads.value_dim)} dims"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionKernel:
    """A kernel that reads the pages of the KV cache, as data. Sinks are no concern of it."""

    name: str
    attend_past: AttendPast
    attend_step: AttendStep | None = None
    """The kernel for a decode step, if there is one that reads recent tokens too."""
    dims: frozenset[int] | None
    """The dims of heads that it has; None: all multiples of `multiple`."""
    multiple: int

    def find_refusal(self, heads: Heads) -> str | None:
        """Return what the kernel lacks for these heads; None if it can read their pages."""
        if heads.is_latent:
            return "latents"
        if heads.key_dim % self.multiple or (self.dims is not None and heads.key_dim not in self.dims):
            return f"heads of {heads.key_dim} dims"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """A kernel for the products of experts, as data."""

    name: str
    multiply_tiles: MultiplyTiles
    min_tile_rows: int
    """The fewest rows of a tile."""


# Kernels are imported when they are first called: they are in experimental modules of JAX, which no CPU needs.


def _attend_splash(*arrays: Any, window: int | None, interpret: bool) -> jax.Array:
    from skyrl_tx.layers.kernels import tpu_splash_attention

    return tpu_splash_attention.attend(*arrays, window=window, interpret=interpret)


def _attend_triton(*arrays: Any, window: int | None, interpret: bool) -> jax.Array:
    from skyrl_tx.layers.kernels import gpu_flash_attention

    return gpu_flash_attention.attend(*arrays, window=window, interpret=interpret)


def _normalize_and_rotate(*arrays: Any, epsilon: float, interpret: bool) -> jax.Array:
    from skyrl_tx.layers.kernels import gpu_norm_rope

    return gpu_norm_rope.normalize_and_rotate(*arrays, epsilon=epsilon, interpret=interpret)


def _multiply_tiles_triton(*arrays: Any, **settings: Any) -> jax.Array:
    from skyrl_tx.layers.kernels import gpu_grouped_matmul

    return gpu_grouped_matmul.multiply_tiles(*arrays, **settings)


def _multiply_tiles_mosaic(*arrays: Any, **settings: Any) -> jax.Array:
    from skyrl_tx.layers.kernels import tpu_grouped_matmul

    return tpu_grouped_matmul.multiply_tiles(*arrays, **settings)


def _attend_past_mosaic(*arrays: Any, window: int | None, interpret: bool) -> SoftmaxStats:
    from skyrl_tx.layers.kernels import tpu_paged_attention

    return tpu_paged_attention.attend_past(*arrays, window=window, interpret=interpret)


def _attend_past_triton(*arrays: Any, window: int | None, interpret: bool) -> SoftmaxStats:
    from skyrl_tx.layers.kernels import gpu_paged_attention

    return gpu_paged_attention.attend_past(*arrays, window=window, interpret=interpret)


def _attend_step_triton(*arrays: Any, window: int | None, interpret: bool) -> SoftmaxStats:
    from skyrl_tx.layers.kernels import gpu_paged_attention

    return gpu_paged_attention.attend_step(*arrays, window=window, interpret=interpret)


SPLASH = AttentionKernel(name="splash", attend=_attend_splash, max_dim=576)
TRITON = AttentionKernel(name="triton", attend=_attend_triton, max_dim=256, normalize_and_rotate=_normalize_and_rotate)

ATTENTION_KERNELS: Mapping[tuple[str, str], AttentionKernel] = {
    ("tpu", "bfloat16"): SPLASH,
    ("tpu", "float32"): SPLASH,
    ("gpu", "bfloat16"): TRITON,
}
"""The kernel of each platform and type of the base weights; the loops elsewhere."""

MOSAIC_PAGES = PagedAttentionKernel(name="mosaic", attend_past=_attend_past_mosaic, dims=None, multiple=128)
TRITON_PAGES = PagedAttentionKernel(
    name="triton",
    attend_past=_attend_past_triton,
    attend_step=_attend_step_triton,
    dims=frozenset((16, 32, 64, 128, 256)),
    multiple=16,
)

PAGED_ATTENTION_KERNELS: Mapping[tuple[str, str], PagedAttentionKernel] = {
    ("tpu", "bfloat16"): MOSAIC_PAGES,
    ("tpu", "float32"): MOSAIC_PAGES,
    ("gpu", "bfloat16"): TRITON_PAGES,
}
"""The kernel that reads pages, of each platform and type of the base weights; the loop elsewhere."""

TRITON_EXPERTS = ExpertsKernel(name="triton", multiply_tiles=_multiply_tiles_triton, min_tile_rows=16)
MOSAIC_EXPERTS = ExpertsKernel(name="mosaic", multiply_tiles=_multiply_tiles_mosaic, min_tile_rows=16)

EXPERTS_KERNELS: Mapping[tuple[str, str], ExpertsKernel] = {
    ("tpu", "bfloat16"): MOSAIC_EXPERTS,
    ("tpu", "float32"): MOSAIC_EXPERTS,
    ("gpu", "bfloat16"): TRITON_EXPERTS,
}
"""The kernel for experts, of each platform and type of the base weights; products of XLA elsewhere."""

MIN_ROTATED_DIM = 32
"""The smallest heads whose norm and rotation were run by the kernel on a GPU."""

LOOPS = "loops"
"""The name of attention without a kernel."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a process uses. Part of compiled programs' keys."""

    attention: AttentionKernel | None = None
    """In training; None for the loops."""
    pages: PagedAttentionKernel | None = None
    """In sampling; None for the loop."""
    experts: ExpertsKernel | None = None
    """For mixtures of experts; None for products of XLA."""
    chunks_together: bool = False
    """Whether the delta rule computes many chunks together, as far as they do not follow one another.

    It takes more memory, and has fewer of the small kernels that are most of its time on an accelerator."""
    interpret: bool = False
    """Whether kernels run on any platform, slowly; for tests."""

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
        """Return the function that multiplies the tiles of experts; None for products of XLA."""
        return None if self.experts is None else partial(self.experts.multiply_tiles, interpret=self.interpret)

    def get_attention_kernel(self, heads: Heads) -> partial[jax.Array] | None:
        """Return the function for the attention of a layer, without its arrays; None for the loops."""
        if self.attention is None or self.attention.find_refusal(heads) is not None:
            return None
        return partial(self.attention.attend, window=heads.window, interpret=self.interpret)

    def get_rotation_kernel(self, head_dim: int, rotated: int, layout: Layout) -> partial[jax.Array] | None:
        """Return the function for norm and rotation of heads, without arrays and epsilon; None for plain JAX.

        It is for heads that are rotated whole. On a mesh each device computes its heads.
        """
        kernel = None if self.attention is None else self.attention.normalize_and_rotate
        is_power = head_dim & (head_dim - 1) == 0
        if kernel is None or rotated != head_dim or not is_power or head_dim < MIN_ROTATED_DIM:
            return None
        return partial(_rotate_on_each_device, kernel, layout, interpret=self.interpret)

    def get_past_kernel(self, heads: Heads, layout: Layout) -> AttendPast | None:
        """Return the function for the past of a layer, None for the loop.

        On a mesh each device computes its kv heads, of rows whose pages it has.
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
        """Return the function for a decode step of a layer; None if `past` has to do. On a mesh it is as `past` is."""
        kernel = None if self.pages is None or self.pages.find_refusal(heads) is not None else self.pages.attend_step
        if kernel is None:
            return None
        step = partial(kernel, window=heads.window, interpret=self.interpret)
        return partial(_attend_on_each_device, step, layout) if layout.is_sharded else step


def _attend_on_each_device(
    statistics: Callable[..., SoftmaxStats], layout: Layout, q: jax.Array, pages: Pages, *others: Any
) -> SoftmaxStats:
    """Return the statistics of queries [B, K, G, ..., H]. Each device computes its kv heads of rows whose pages it has.

    Other arguments are of all rows, [B], or [B, K, U, H].
    """

    def attend_local(q: jax.Array, stack: Any, layer: Any, page_BM: jax.Array, *others: Any) -> SoftmaxStats:
        return statistics(q, Pages(stack, layer, page_BM), *others)

    def get_spec(leaf: jax.Array) -> PartitionSpec:
        axes: tuple[Axis | None, ...] = ("batch", "kv_heads", None, None)
        return layout.spec(axes[: leaf.ndim], leaf.shape)

    of_kv_head: Axis | None = "heads" if q.shape[1] % layout.num_shards("kv_heads") else None  # as those of one latent
    queries = layout.spec(("batch", "kv_heads", of_kv_head, *[None] * (q.ndim - 3)), q.shape)
    stack = jax.tree.map(lambda leaf: layout.spec((None, "batch", "kv_heads", None, None), leaf.shape), pages.stack)
    table = layout.spec(("batch", None), pages.page_BM.shape)
    others = jax.tree.map(jnp.asarray, others)
    alone = jax.shard_map(
        attend_local,
        mesh=layout.mesh,
        in_specs=(queries, stack, PartitionSpec(), table, *jax.tree.map(get_spec, others)),
        out_specs=(PartitionSpec(*queries[:-1]), PartitionSpec(*queries[:-1]), queries),
        check_vma=False,
    )
    found: SoftmaxStats = alone(q, pages.stack, jnp.int32(pages.layer), pages.page_BM, *others)
    return found


def _rotate_on_each_device(
    kernel: NormalizeAndRotate, layout: Layout, x: jax.Array, weight_H: jax.Array, *angles: jax.Array, **settings: Any
) -> jax.Array:
    """Return heads [B, ..., N, H] after norm and rotation, each device computing its own."""
    run = partial(kernel, **settings)
    if not layout.is_sharded:
        return run(x, weight_H, *angles)
    leading: tuple[Axis | None, ...] = ("batch", "tokens")[: x.ndim - 2]
    angles = tuple(jnp.broadcast_to(each, (*x.shape[:-2], each.shape[-1])) for each in angles)
    heads = layout.spec((*leading, "heads", None), x.shape)
    in_specs = (heads, PartitionSpec(), *(layout.spec((*leading, None), each.shape) for each in angles))
    found: jax.Array = jax.shard_map(run, mesh=layout.mesh, in_specs=in_specs, out_specs=heads, check_vma=False)(
        x, weight_H, *angles
    )
    return found


NO_KERNELS = Kernels()
"""Plain JAX everywhere."""
