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
    pool = SamplerPool(tiny.config, max_samplers=5, num_places=4)
    for number, rank in enumerate((4, 24, 8, 8, 8), start=1):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, rank, float(number)))
    assert pool.adapters(any_used=True).scale.shape == (6,)
    assert values(pool, "s1", 4) == {1.0} and values(pool, "s2", 24) == {2.0} and values(pool, "s5", 8) == {5.0}
    assert values(pool, None, 24) == {0.0}
    with pytest.raises(CapacityError, match="all 5 places"):
        pool.load(SamplerId("s6"), full(tiny.config, 8, 6.0))
    pool.drop(SamplerId("s2"))
    pool.drop(SamplerId("s2"))
    pool.load(SamplerId("s6"), full(tiny.config, 4, 6.0))  # where a higher rank was
    assert values(pool, "s6", 4) == {6.0} and values(pool, "s1", 4) == {1.0}


def test_loading_again_changes_nothing(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_places=6)
    pool.load(SamplerId("s"), full(tiny.config, 4, 1.0))
    pool.load(SamplerId("s"), full(tiny.config, 4, 2.0))
    assert values(pool, "s", 4) == {1.0}
    assert pool.adapters(any_used=False) is None


def test_what_rows_see_is_gathered_again_when_it_changes(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_places=6)
    for number in (1, 2):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, 4, float(number)))

    def seen(*samplers: str | None) -> list[float]:
        places = [pool.place_of(None if each is None else SamplerId(each)) for each in samplers]
        gathered = pool.gathered(places)
        assert pool.gathered(places).rows is gathered.rows
        for rows in gathered.rows["q_proj"]:
            np.testing.assert_array_equal(rows.pair.a[:, 0, 0], gathered.rows["unembed"][0].pair.a[:, 0, 0])
        return gathered.rows["q_proj"][0].pair.a[:, 0, 0].tolist()

    assert seen("s2", None, "s1") == [2.0, 0.0, 1.0]
    assert seen("s1", "s1", "s1") == [1.0, 1.0, 1.0]
    pool.drop(SamplerId("s1"))
    pool.load(SamplerId("s3"), full(tiny.config, 4, 3.0))  # into the same place
    assert seen("s3", "s3", "s3") == [3.0, 3.0, 3.0]
