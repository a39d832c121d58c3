"""Kernels that read pages of the KV cache, in interpret mode, against the loop.

The loop also reads heads that a kernel does not support.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.mesh import make_layout
from skyrl_tx.layers.kernels.registry import (
    KERNELS,
    MOSAIC_PAGES,
    TRITON_PAGES,
    Heads,
    Kernels,
    PagedAttentionKernel,
)
from skyrl_tx.layers.kv_cache import KeyValues, Pages, decode_attention, paged_attention
from skyrl_tx.layers.sharding import UNSHARDED, Layout
from tests.support.child_process import run_in_own_process
from tests.support.fast_jit import fast_jit
from tests.support.paged_arrays import make_table, split_into_shards

PAGE = 64


@dataclass(frozen=True)
class Case:
    """Rows with `starts` cached positions and `tokens` new ones.

    `groups` query heads share a kv head.
    """

    kernel: PagedAttentionKernel
    starts: tuple[int, ...]
    pages: int
    dim: int
    tokens: int = 1
    groups: int = 2
    window: int | None = None

    @property
    def heads(self) -> Heads:
        return Heads(self.dim, self.dim, self.window, has_sinks=True)


def draw_inputs(case: Case, seed: int = 0, dtype: str = "float32") -> tuple:
    """Return queries of two kv heads, pages of two layers and new keys and values."""
    g, rows = np.random.default_rng(seed), len(case.starts)

    def normal(*shape: int):
        return jnp.asarray(g.standard_normal(shape), dtype)

    stack = KeyValues(*(normal(2, 1 + rows * case.pages, 2, PAGE, case.dim) for _ in "kv"))
    new = KeyValues(*(normal(rows, 2, case.tokens, case.dim) for _ in "kv"))
    return normal(rows, case.tokens, 2 * case.groups, case.dim), stack, new


@partial(fast_jit, static_argnames=("case", "kernel", "layout"))
def attention(
    x, starts, layer, case: Case, kernel: PagedAttentionKernel | None, layout: Layout = UNSHARDED, page_BM=None
):
    """Return attention of the new tokens over the pages of a layer, and over each other."""
    (q, stack, new), rows = x, len(case.starts)
    past = Pages(stack, layer, make_table(rows, case.pages).page_BM if page_BM is None else page_BM)
    seen = np.tri(case.tokens, dtype=bool) & ~np.tri(case.tokens, k=-(case.window or case.tokens), dtype=bool)
    sinks = jnp.linspace(-1, 2, 2 * case.groups)
    read = Kernels(pages=kernel, interpret=True).get_past_kernel(case.heads, layout)
    assert (read is None) == (kernel is None and layout.num_shards("batch") == 1)
    positions = starts[:, None] + jnp.arange(case.tokens)
    return paged_attention(q, positions, past, starts, new, seen, sinks, window=case.window, kernel=read)


def get_starts(case: Case) -> np.ndarray:
    return np.array(case.starts, np.int32)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(MOSAIC_PAGES, (0, 5, 64, 300, 384), 6, 128), id="mosaic", marks=pytest.mark.slow),
        pytest.param(Case(MOSAIC_PAGES, (0, 44, 384, 200), 6, 128, groups=9, window=30), id="mosaic-window"),
        pytest.param(Case(MOSAIC_PAGES, (256,), 5, 128, tokens=64, window=70), id="mosaic-chunk"),
        pytest.param(
            Case(MOSAIC_PAGES, (128, 0), 4, 128, tokens=256, groups=3), id="mosaic-splits", marks=pytest.mark.slow
        ),
        pytest.param(Case(TRITON_PAGES, (0, 5, 64, 300, 384), 6, 64), id="triton"),
        pytest.param(Case(TRITON_PAGES, (0, 44, 192), 3, 128, groups=17), id="triton-groups"),
        pytest.param(Case(TRITON_PAGES, (0, 44, 384, 200), 6, 64, groups=9, window=30), id="triton-window"),
        pytest.param(Case(TRITON_PAGES, (256,), 5, 64, tokens=64, window=70), id="triton-chunk"),
        pytest.param(Case(TRITON_PAGES, (128, 0), 4, 32, tokens=256, groups=3), id="triton-blocks"),
    ],
)
def test_a_kernel_reads_ragged_rows_as_the_loop_does(case: Case) -> None:
    with jax.default_matmul_precision("highest"):
        wanted, found = (
            attention(draw_inputs(case), get_starts(case), 1, case, chosen) for chosen in (None, case.kernel)
        )
        other = attention(draw_inputs(case), get_starts(case), 0, case, case.kernel)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(other) - wanted).max() > 0.1, "the layer is data"


@pytest.mark.parametrize(
    ("case", "num_tokens", "num_recent"),
    [
        pytest.param(Case(TRITON_PAGES, (0, 5, 64, 300, 384), 6, 64), 16, 1, id="first"),
        pytest.param(Case(TRITON_PAGES, (0, 44, 192), 3, 128, groups=17), 6, 6, id="last"),
        pytest.param(Case(TRITON_PAGES, (0, 44, 384, 200), 6, 64, groups=9, window=30), 24, 20, id="window"),
        pytest.param(Case(TRITON_PAGES, (0, 300), 6, 64, window=3), 16, 9, id="narrow"),
    ],
)
def test_a_kernel_for_steps_reads_pages_and_recent_tokens(case: Case, num_tokens: int, num_recent: int) -> None:
    q, stack, _ = draw_inputs(case)
    _, _, recent = draw_inputs(replace(case, tokens=num_tokens), 1)
    recent = jax.tree.map(lambda x: x.at[:, :, num_recent:].set(np.nan), recent)  # not written yet
    past, starts = Pages(stack, 1, make_table(len(case.starts), case.pages).page_BM), get_starts(case)
    sinks = jnp.linspace(-1, 2, 2 * case.groups)
    step = Kernels(pages=case.kernel, interpret=True).get_step_kernel(case.heads, UNSHARDED)
    assert step is not None

    with jax.default_matmul_precision("highest"):
        found = fast_jit(lambda q: decode_attention(q[:, 0], past, starts, recent, num_recent, sinks, kernel=step))(q)
        known = jax.tree.map(lambda x: x[:, :, :num_recent], recent)
        seen = np.arange(num_recent) >= num_recent - (case.window or num_recent)
        positions = starts[:, None] + num_recent - 1
        wanted = paged_attention(q, positions, past, starts, known, seen[None], sinks, window=case.window)

    np.testing.assert_allclose(found, wanted[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [MOSAIC_PAGES, TRITON_PAGES])
def test_no_row_changes_a_bit_of_another(kernel: PagedAttentionKernel) -> None:
    """A row has the same bits, in bfloat16 too, for any contents and lengths of the other rows."""
    case = Case(kernel, (300, 5, 64, 0), 6, 128)
    (q, stack, new), (other_q, other_stack, other_new) = (draw_inputs(case, seed, "bfloat16") for seed in (0, 1))
    own = make_table(4, case.pages).page_BM[0]
    other_stack = jax.tree.map(lambda theirs, mine: theirs.at[:, own].set(mine[:, own]), other_stack, stack)
    other_new = jax.tree.map(lambda theirs, mine: theirs.at[0].set(mine[0]), other_new, new)
    one = attention((q, stack, new), get_starts(case), 1, case, kernel)
    other_starts = np.array([300, 384, 0, 100], np.int32)
    two = attention((other_q.at[0].set(q[0]), other_stack, other_new), other_starts, 1, case, kernel)
    np.testing.assert_array_equal(one[0], two[0])
    assert np.all(np.any(np.asarray(one)[1:] != np.asarray(two)[1:], axis=(1, 2, 3)))


@pytest.mark.parametrize("kernel", [pytest.param(MOSAIC_PAGES, marks=pytest.mark.slow), TRITON_PAGES])
def test_products_of_bfloat16_are_as_near_to_float32_as_those_of_the_loop(kernel: PagedAttentionKernel) -> None:
    case = Case(kernel, (300, 5, 64, 384), 6, 128)
    x = draw_inputs(case, dtype="bfloat16")
    exact = attention(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), x), get_starts(case), 1, case, None)

    def distance(kernel: PagedAttentionKernel | None) -> float:
        found = np.float32(attention(x, get_starts(case), 1, case, kernel))
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    assert distance(kernel) < 1.2 * distance(None) and distance(None) < 4e-3


@pytest.mark.parametrize(
    ("heads", "mosaic", "triton"),
    [
        (Heads(128, 128), None, None),
        (Heads(64, 64, has_sinks=True), "heads of 64 dims", None),
        (Heads(96, 96), "heads of 96 dims", "heads of 96 dims"),
        (Heads(256, 256, window=128), None, None),
        (Heads(192, 128, is_latent=True), "latents", "latents"),
    ],
)
def test_what_a_kernel_lacks_is_read_by_the_loop(heads: Heads, mosaic: str | None, triton: str | None) -> None:
    for kernel, reason in ((MOSAIC_PAGES, mosaic), (TRITON_PAGES, triton)):
        assert kernel.find_refusal(heads) == reason
        assert (Kernels(pages=kernel).get_past_kernel(heads, UNSHARDED) is None) == (reason is not None)
    assert Kernels().get_past_kernel(heads, UNSHARDED) is None


def test_there_is_no_kernel_for_cpu() -> None:
    assert {platform for (platform, _), kernels in KERNELS.items() if kernels.pages} == {"gpu", "tpu"}


def _pages_on_a_mesh(_: Path) -> None:
    """Compare a kernel, on the kv heads of each device, with the loop on one device."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_default_matmul_precision", "highest")
    case, layout = Case(TRITON_PAGES, (0, 5, 64, 100), 2, 128), make_layout(MeshConfig(tp=2))
    wanted = attention(draw_inputs(case), get_starts(case), 1, case, None)
    found = attention(draw_inputs(case), get_starts(case), 1, case, case.kernel, layout)
    assert len(found.sharding.device_set) == 2
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_each_device_of_a_mesh_reads_its_heads(tmp_path: Path) -> None:
    run_in_own_process(_pages_on_a_mesh, tmp_path)


def _pages_on_shards(_: Path) -> None:
    """Compare kernels and the loop on shards with the loop on one device.

    Each shard has the pages of its rows.
    """
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    layout = make_layout(MeshConfig(fsdp=2, tp=2))
    step = Case(TRITON_PAGES, (0, 5, 64, 100), 2, 128)
    chunk = Case(MOSAIC_PAGES, (70, 5), 2, 128, tokens=64, window=40)
    for case, kernel in ((step, None), (step, TRITON_PAGES), (chunk, None), (chunk, MOSAIC_PAGES)):
        q, stack, new = draw_inputs(case)
        wanted = attention((q, stack, new), get_starts(case), 1, case, None)
        pages, table = split_into_shards(stack, make_table(len(case.starts), case.pages), 2)
        found = attention((q, pages, new), get_starts(case), 1, case, kernel, layout, table.page_BM)
        assert len(found.sharding.device_set) == 4
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_each_shard_reads_the_pages_of_its_rows(tmp_path: Path) -> None:
    run_in_own_process(_pages_on_shards, tmp_path)


def _steps_on_shards(_: Path) -> None:
    """Compare the kernel for steps on shards with the same kernel on one device.

    Each shard has the pages of its rows.
    """
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    case = Case(TRITON_PAGES, (0, 5, 64, 100), 2, 128)
    q, stack, _ = draw_inputs(case)
    _, _, recent = draw_inputs(replace(case, tokens=8), 1)
    table = make_table(len(case.starts), case.pages)

    def decode(stack: KeyValues, page_BM: jax.Array, layout: Layout) -> jax.Array:
        step, past = (
            Kernels(pages=case.kernel, interpret=True).get_step_kernel(case.heads, layout),
            Pages(stack, 1, page_BM),
        )
        run = fast_jit(lambda q: decode_attention(q[:, 0], past, get_starts(case), recent, 5, None, kernel=step))
        return run(q)

    wanted = decode(stack, table.page_BM, UNSHARDED)
    for sizes in ({"tp": 2, "dp": 2}, {"fsdp": 2, "tp": 2}):
        layout = make_layout(MeshConfig(**sizes))
        pages, own = split_into_shards(stack, table, 2)
        on_mesh = decode(pages, own.page_BM, layout)
        assert len(on_mesh.sharding.device_set) == 4
        np.testing.assert_allclose(on_mesh, wanted, rtol=1e-6, atol=1e-6)


def test_each_shard_decodes_its_rows(tmp_path: Path) -> None:
    run_in_own_process(_steps_on_shards, tmp_path)
