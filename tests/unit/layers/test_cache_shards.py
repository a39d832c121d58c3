"""Shards of the cache read, write and copy only the pages of their rows."""

from pathlib import Path

import jax
import numpy as np

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.mesh import make_layout
from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import BlockTable, Cache, LayerCache
from skyrl_tx.layers.kv_cache import KeyValues
from skyrl_tx.layers.sharding import UNSHARDED
from tests.support.child_process import run_in_own_process
from tests.support.paged_arrays import get_positions, make_table, split_into_pages, split_into_shards

L, K, C, P, H = 2, 2, 8, 4, 4
"""Layers, kv heads, positions of a row, positions of a page, dims."""


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def keys_and_values(*shape: int, seed: int = 0) -> KeyValues:
    return KeyValues(k=some(*shape, seed=seed), v=some(*shape, seed=seed + 1))


def _cache_on_shards(_: Path) -> None:
    """Compare reads, copies and writes of two shards with one device that has the pages of both."""
    jax.config.update("jax_num_cpu_devices", 4)
    layout = make_layout(MeshConfig(ep=2, tp=2))
    rows, table = keys_and_values(L, 4, K, C, H), make_table(4, C // P)
    whole = (
        LayerCache(positions=split_into_pages(rows, P)),
        LayerCache(fixed={"state": np.insert(some(3, 4, 5), 0, 0, axis=1)}),
    )
    positions, local = split_into_shards(whole[0].positions, table, 2)
    states = whole[1].fixed["state"]
    sharded = LayerCache(positions=positions), LayerCache(fixed={"state": states[:, [0, 1, 2, 0, 3, 4]]})

    def rows_and_states(cache: Cache, table: BlockTable) -> list[np.ndarray]:
        """Return the positions and states of all rows, independent of the numbers of pages."""
        shard_S = np.repeat(np.arange(2), 2) * (table is local)
        own = table.replace(
            page_BM=table.page_BM + (shard_S * 5)[:, None] * (np.asarray(table.page_BM) > 0),
            state_B=table.state_B + shard_S * 3,
        )
        return [*jax.tree.leaves(get_positions(cache[:1], own)), np.asarray(cache[1].fixed["state"])[:, own.state_B]]

    def compare(one: Cache, many: Cache) -> None:
        for got, wanted in zip(rows_and_states(many, local), rows_and_states(one, table), strict=True):
            np.testing.assert_array_equal(got, wanted)

    compare(whole, sharded)

    both = (whole, table, UNSHARDED), (sharded, local, layout)
    new = (
        LayerCache(positions=keys_and_values(L, 4, K, 3, H, seed=5)),
        LayerCache(fixed={"state": some(3, 4, 5, seed=7)}),
    )
    write, start_S = jax.jit(cache_state.write_cache, static_argnames="layout"), np.array([0, 3, 5, 1], np.int32)
    for size in (np.int32(2), np.array([2, 0, 1, 3], np.int32)):
        one, many = (write(cache, new, own, start_S, size, layout=placement) for cache, own, placement in both)
        compare(one, many)
    read = jax.jit(cache_state.read_states, static_argnames="layout")
    one, many = (read(cache, own, layout=placement) for cache, own, placement in both)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    # The third row becomes a copy of the fourth.
    copy = jax.jit(cache_state.copy_pages, static_argnames="layout")
    pages, states = np.asarray(local.page_BM)[[3, 2]].T, np.array([[2, 1]])
    nothing = np.zeros_like
    lists = [np.stack([nothing(pages), pages]), np.array([0, 2]), np.stack([nothing(states), states]), np.array([0, 1])]
    copied = copy(sharded, *lists, layout=layout)

    for leaf in rows_and_states(copied, local):
        np.testing.assert_array_equal(leaf[:, 2], leaf[:, 3])
    for got, wanted in zip(rows_and_states(copied, local), rows_and_states(sharded, local), strict=True):
        np.testing.assert_array_equal(got[:, [0, 1, 3]], wanted[:, [0, 1, 3]])


def test_each_shard_reads_writes_and_copies_what_its_rows_have(tmp_path: Path):
    run_in_own_process(_cache_on_shards, tmp_path)
