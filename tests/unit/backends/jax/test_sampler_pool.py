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
    pair = jax.tree.map(np.asarray, pool.get_adapters(next(iter(pool._adapters))).weights["q_proj"])
    assert not np.any(pair.a[slot][..., rank:]) and not np.any(pair.b[slot][..., rank:, :])
    return {float(value) for value in np.unique(pair.a[slot][..., :rank])}


def test_rank_and_slots_grow_with_the_loaded_adapters(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=4)
    for number, rank in enumerate((4, 24, 8, 8, 8), start=1):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, rank, float(number)))
    assert pool.get_adapters(next(iter(pool._adapters))).scale.shape == (6,)
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
    found = jax.tree.map(np.asarray, pool.get_adapters(next(iter(pool._adapters))))
    assert np.isnan(found.scale).tolist() == [False, False, True, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.weights))
    assert values(pool, "a", 4) == {2.0} and values(pool, "c", 4) == {3.0}


def test_loading_twice_changes_nothing(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=6)
    pool.load(SamplerId("s"), full(tiny.config, 4, 1.0))
    pool.load(SamplerId("s"), full(tiny.config, 4, 2.0))
    assert values(pool, "s", 4) == {1.0}
    assert pool.get_adapters(0) is None


def test_adapters_are_gathered_again_when_slots_or_adapters_change(tiny):
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=6)
    for number in (1, 2):
        pool.load(SamplerId(f"s{number}"), full(tiny.config, 4, float(number)))

    def gather_values(*samplers: str | None) -> list[float]:
        slots = [pool.get_slot(None if name is None else SamplerId(name)) for name in samplers]
        gathered = pool.gather(slots, 8)
        assert pool.gather(slots, 8).rows is gathered.rows
        rows = jax.tree.map(np.asarray, gathered.rows)
        for group in rows["q_proj"]:
            np.testing.assert_array_equal(group.pair.a[:, 0, 0], rows["unembed"][0].pair.a[:, 0, 0])
        return rows["q_proj"][0].pair.a[:, 0, 0].tolist()

    assert gather_values("s2", None, "s1") == [2.0, 0.0, 1.0]
    assert gather_values("s1", "s1", "s1") == [1.0, 1.0, 1.0]
    pool.drop(SamplerId("s1"))
    pool.load(SamplerId("s3"), full(tiny.config, 4, 3.0))  # into the same slot
    assert gather_values("s3", "s3", "s3") == [3.0, 3.0, 3.0]


def test_separate_ranks_have_adapters_of_their_own(tiny):
    """An adapter keeps its padded rank, and its gathered rows, when another rank is loaded."""
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=2, separates_ranks=True)
    names = [SamplerId(f"s{number}") for number in range(5)]
    for number, rank in enumerate((8, 32, 8, 16)):
        pool.load(names[number], full(tiny.config, rank, float(number + 1)))
    slots = [pool.get_slot(name) for name in names[:4]]
    assert [pool.get_rank([0, slot]) for slot in slots] == [8, 32, 8, 16] and pool.get_rank([0]) == 0

    for slot, rank, value in zip(slots, (8, 32, 8, 16), (1.0, 2.0, 3.0, 4.0), strict=True):
        a = np.asarray(pool.get_adapters(rank).weights["q_proj"].a)
        assert a.shape[-1] == rank and np.unique(a[slot]).tolist() == [value]
        rows = pool.gather([slot, 0], rank).rows["q_proj"][0].pair.a
        assert rows.shape[-1] == rank and np.unique(rows[0]).tolist() == [value] and not np.any(rows[1])

    pool.drop(names[0])
    pool.load(names[4], full(tiny.config, 32, 5.0))  # into a slot that had another rank
    assert pool.get_slot(names[4]) == slots[0] and pool.get_rank([slots[0]]) == 32


def test_an_adapter_that_is_committed_to_a_device_does_not_commit_the_pool(tiny):
    """Otherwise sampling would compile its programs again after a model was restored."""
    pool = SamplerPool(tiny.config, max_samplers=5, num_slots=4, separates_ranks=True)
    adapter = jax.device_put(full(tiny.config, 4, 1.0), jax.devices()[0])
    assert all(leaf.committed for leaf in jax.tree.leaves(adapter))
    pool.load(SamplerId("s"), adapter)
    loaded = pool.get_adapters(pool.get_rank([pool.get_slot(SamplerId("s"))]))
    assert not any(leaf.committed for leaf in jax.tree.leaves(loaded))
