"""Frozen adapters keep their values while the pool around them grows."""

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.sampler_pool import SamplerPool
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId


def full(config, rank: int, value: float):
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), models.adapter_shapes(config, rank))


def values(pool: SamplerPool, sampler: str | None, rank: int) -> set[float]:
    place = pool.place_of(None if sampler is None else SamplerId(sampler))
    pair = pool.adapters(any_used=True).weights["q_proj"]
    assert not np.any(pair.a[place][..., rank:]) and not np.any(pair.b[place][..., rank:, :])
    return {float(value) for value in np.unique(np.asarray(pair.a[place])[..., :rank])}


def test_ranks_and_places_grow_with_what_is_loaded(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5)
    for number, rank in enumerate((4, 24, 8, 8, 8), start=1):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, rank, float(number)))
    assert pool.adapters(any_used=True).scale.shape == (8,)
    assert values(pool, "s1", 4) == {1.0} and values(pool, "s2", 24) == {2.0} and values(pool, "s5", 8) == {5.0}
    assert values(pool, None, 24) == {0.0}
    with pytest.raises(CapacityError, match="all 5 places"):
        pool.load(SamplerId("s6"), full(tiny.config, 8, 6.0))
    pool.drop(SamplerId("s2"))
    pool.drop(SamplerId("s2"))
    pool.load(SamplerId("s6"), full(tiny.config, 4, 6.0))  # where a higher rank was
    assert values(pool, "s6", 4) == {6.0} and values(pool, "s1", 4) == {1.0}


def test_loading_again_changes_nothing(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5)
    pool.load(SamplerId("s"), full(tiny.config, 4, 1.0))
    pool.load(SamplerId("s"), full(tiny.config, 4, 2.0))
    assert values(pool, "s", 4) == {1.0}
    assert pool.adapters(any_used=False) is None
