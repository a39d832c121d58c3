"""Arrays of rows in pages, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx.layers.cache_state import Cache, Table


def table_of(num_rows: int, num_pages: int) -> Table:
    """Return a table of rows whose pages lie apart, and whose states are those from 1 on."""
    pages = 1 + np.arange(num_rows * num_pages, dtype=np.int32).reshape(num_pages, num_rows).T
    return Table(jnp.asarray(pages), jnp.asarray(1 + np.arange(num_rows, dtype=np.int32)))


def in_pages(rows: Any, page: int) -> Any:
    """Return arrays [n, B, K, C, H] as [n, pages, K, P, H], where `table_of` says; page 0 is zeros."""

    def put(leaf: np.ndarray) -> np.ndarray:
        n, B, K, C, H = leaf.shape
        by_page = np.asarray(leaf).reshape(n, B, K, C // page, page, H)
        pages = np.transpose(by_page, (0, 3, 1, 2, 4, 5)).reshape(n, -1, K, page, H)
        return np.concatenate([np.zeros_like(pages[:, :1]), pages], axis=1)

    return jax.tree.map(put, rows)


def on_shards(pages: Any, table: Table, num_shards: int) -> tuple[Any, Table]:
    """Return the pages of rows that `table_of` made as those of shards, and a table with numbers within the shards."""
    num_rows, num_pages = table.page_BM.shape
    own, page = num_rows // num_shards, jax.tree.leaves(pages)[0].shape[3]
    rows = rows_of(pages, table)
    parts = [
        in_pages(jax.tree.map(lambda leaf, first=first: leaf[:, first : first + own], rows), page)
        for first in range(0, num_rows, own)
    ]
    local = table_of(own, num_pages)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
    return joined, Table(jnp.tile(local.page_BM, (num_shards, 1)), jnp.tile(local.state_B, num_shards))


def rows_of(pages: Any, table: Table) -> Any:
    """Return arrays in pages as [n, B, K, C, H]."""

    def read(leaf: Any) -> np.ndarray:
        found = np.swapaxes(np.asarray(leaf)[:, np.asarray(table.page_BM)], 2, 3)  # [n, B, K, M, P, H]
        return found.reshape(*found.shape[:3], -1, found.shape[5])

    return jax.tree.map(read, pages)


def positions_of(cache: Cache, table: Table) -> list[Any]:
    """Return the positions of each stack, [n, B, K, C, H]."""
    return [rows_of(held.positions, table) for held in cache]
