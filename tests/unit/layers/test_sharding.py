"""Weights gathered from parts, as on GPU.

`tests/unit/benchmarks` checks that XLA copies none of all layers.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.sharding import UNSHARDED, Layout, _gather_by_parts, gather_weight


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((8, 6), ("embed", "mlp")), ((6, 8), ("heads", "embed")), ((2, 8, 6), ("expert", "embed", "mlp"))],
)
@pytest.mark.parametrize("number", [4, 3])  # 3 parts cannot be equal: the weight stays as it is
def test_parts_in_order_are_the_weight(shape, axes, number, monkeypatch) -> None:
    monkeypatch.setattr(Layout, "num_shards", lambda _, axis: number if axis == "embed" else 1)
    weight = jnp.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(_gather_by_parts(weight, axes=axes, layout=UNSHARDED), weight)
    np.testing.assert_array_equal(gather_weight(weight, axes, UNSHARDED), weight)


def test_what_is_whole_already_is_not_gathered() -> None:
    weight = jnp.ones((8, 6))
    assert gather_weight(weight, ("embed", "mlp"), UNSHARDED) is weight
