"""Arrays of rows in pages, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.layers.cache_state import BlockTable, Cache


def make_table(num_rows: int, num_pages: int) -> BlockTable:
    """Return a table of rows whose pages lie apart, and whose states are those from 1 on."""
    pages = 1 + np.arange(num_rows * num_pages, dtype=np.int32).reshape(num_pages, num_rows).T
    return BlockTable(jnp.asarray(pages), jnp.asarray(1 + np.arange(num_rows, dtype=np.int32)))


def split_into_pages(rows: Any, page: int) -> Any:
    """Return arrays [n, B, K, C, H] as [n, pages, K, P, H], where `make_table` says; page 0 is zeros."""

    def put(leaf: np.ndarray) -> np.ndarray:
        n, B, K, C, H = leaf.shape
        by_page = np.asarray(leaf).reshape(n, B, K, C // page, page, H)
        pages = np.transpose(by_page, (0, 3, 1, 2, 4, 5)).reshape(n, -1, K, page, H)
        return np.concatenate([np.zeros_like(pages[:, :1]), pages], axis=1)

    return jax.tree.map(put, rows)


def split_into_shards(pages: Any, table: BlockTable, num_shards: int) -> tuple[Any, BlockTable]:
    """Split the pages of a table from `make_table` into shards, with page numbers within each shard."""
    num_rows, num_pages = table.page_BM.shape
    own, page = num_rows // num_shards, jax.tree.leaves(pages)[0].shape[3]
    rows = join_pages(pages, table)
    parts = [
        split_into_pages(jax.tree.map(lambda leaf, first=first: leaf[:, first : first + own], rows), page)
        for first in range(0, num_rows, own)
    ]
    local = make_table(own, num_pages)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
    return joined, BlockTable(jnp.tile(local.page_BM, (num_shards, 1)), jnp.tile(local.state_B, num_shards))


def join_pages(pages: Any, table: BlockTable) -> Any:
    """Return arrays in pages as [n, B, K, C, H]."""

    def read(leaf: Any) -> np.ndarray:
        found = np.swapaxes(np.asarray(leaf)[:, np.asarray(table.page_BM)], 2, 3)  # [n, B, K, M, P, H]
        return found.reshape(*found.shape[:3], -1, found.shape[5])

    return jax.tree.map(read, pages)


def get_positions(cache: Cache, table: BlockTable) -> list[Any]:
    """Return the positions of each stack, [n, B, K, C, H]."""
    return [join_pages(held.positions, table) for held in cache]
