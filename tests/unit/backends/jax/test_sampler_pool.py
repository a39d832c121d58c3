"""Adapters in the sampler pool keep their values while the pool grows."""

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.sample.sampler_pool import SamplerPool
from skyrl_tx.contract.errors import CapacityError
from skyrl_tx.contract.ids import SamplerId


def full(config, rank: int, value: float):
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), models.describe_adapter(config, rank))


def values(pool: SamplerPool, sampler: str | None, rank: int) -> set[float]:
    slot = pool.get_slot(None if sampler is None else SamplerId(sampler))
    pair = jax.tree.map(np.asarray, pool.get_adapters(any_used=True).weights["q_proj"])
    assert not np.any(pair.a[slot][..., rank:]) and not np.any(pair.b[slot][..., rank:, :])
    return {float(value) for value in np.unique(pair.a[slot][..., :rank])}


def test_rank_and_slots_grow_with_the_loaded_adapters(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=4)
    for number, rank in enumerate((4, 24, 8, 8, 8), start=1):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, rank, float(number)))
    assert pool.get_adapters(any_used=True).scale.shape == (6,)
    assert values(pool, "s1", 4) == {1.0} and values(pool, "s2", 24) == {2.0} and values(pool, "s5", 8) == {5.0}
    assert values(pool, None, 24) == {0.0}
    with pytest.raises(CapacityError, match="all 5 adapter slots"):
        pool.load(SamplerId("s6"), full(tiny.config, 8, 6.0))
    pool.drop(SamplerId("s2"))
    pool.drop(SamplerId("s2"))
    pool.load(SamplerId("s6"), full(tiny.config, 4, 6.0))  # a slot that held a higher rank
    assert values(pool, "s6", 4) == {6.0} and values(pool, "s1", 4) == {1.0}


@pytest.mark.parametrize("number", [np.nan, np.inf, np.float32(3.4e38)])
def test_an_adapter_that_is_not_finite_has_a_scale_of_nan_alone(tiny, number):
    """Its weights stay finite, so that products with zero are zero.

    3.4e38 is not finite in bfloat16.
    """
    pool, broken = SamplerPool(tiny.config, max_samplers=5, num_slots=4), full(tiny.config, 4, 1.0)
    broken.weights["o_proj"].b[0, 0, 0] = number
    pool.load(SamplerId("a"), full(tiny.config, 4, 2.0))
    pool.load(SamplerId("b"), broken)
    pool.load(SamplerId("c"), full(tiny.config, 4, 3.0))
    found = jax.tree.map(np.asarray, pool.get_adapters(any_used=True))
    assert np.isnan(found.scale).tolist() == [False, False, True, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.weights))
    assert values(pool, "a", 4) == {2.0} and values(pool, "c", 4) == {3.0}


def test_loading_twice_changes_nothing(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=6)
    pool.load(SamplerId("s"), full(tiny.config, 4, 1.0))
    pool.load(SamplerId("s"), full(tiny.config, 4, 2.0))
    assert values(pool, "s", 4) == {1.0}
    assert pool.get_adapters(any_used=False) is None


def test_adapters_are_gathered_again_when_slots_or_adapters_change(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=6)
    for number in (1, 2):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, 4, float(number)))

    def gather_values(*samplers: str | None) -> list[float]:
        slots = [pool.get_slot(None if name is None else SamplerId(name)) for name in samplers]
        gathered = pool.gather(slots)
        assert pool.gather(slots).rows is gathered.rows
        rows = jax.tree.map(np.asarray, gathered.rows)
        for group in rows["q_proj"]:
            np.testing.assert_array_equal(group.pair.a[:, 0, 0], rows["unembed"][0].pair.a[:, 0, 0])
        return rows["q_proj"][0].pair.a[:, 0, 0].tolist()

    assert gather_values("s2", None, "s1") == [2.0, 0.0, 1.0]
    assert gather_values("s1", "s1", "s1") == [1.0, 1.0, 1.0]
    pool.drop(SamplerId("s1"))
    pool.load(SamplerId("s3"), full(tiny.config, 4, 3.0))  # into the same slot
    assert gather_values("s3", "s3", "s3") == [3.0, 3.0, 3.0]
