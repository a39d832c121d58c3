"""A mixture with a shared expert, which all tokens use."""

import jax
import numpy as np
import pytest

from skyrl_tx.layers.experts import Routing
from skyrl_tx.layers.lora import LoraPair, RowAdapter
from skyrl_tx.layers.sharding import UNSHARDED
from skyrl_tx.models.parts.base import Layer, LayerAdapters, LayerContext
from skyrl_tx.models.parts.feed_forward import SHARED_PREFIX, Mixture
from tests.support.fast_jit import fast_jit

D, F, SHARED, RANK = 32, 24, 40, 3
MIXTURE = Mixture(
    hidden_size=D,
    mlp_size=F,
    routing=Routing(num_experts=4, num_chosen=2, renormalizes=True),
    shared_size=SHARED,
)
WITHOUT = Mixture(hidden_size=D, mlp_size=F, routing=MIXTURE.routing)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 4


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    return {name: normal(seed, *parameter.shape) for seed, (name, parameter) in enumerate(MIXTURE.describe().items())}


def make_adapters(*slots: int) -> dict[str, RowAdapter]:
    """Return an adapter of the shared expert for each row."""

    def stack(seed: int, *shape: int) -> np.ndarray:
        return np.stack([normal(seed + slot, *shape) for slot in slots])

    pairs = {
        name: LoraPair(a=stack(50, target.inputs, RANK), b=stack(60, RANK, target.outputs))
        for name, target in MIXTURE.targets().items()
        if target.num_experts is None
    }
    scale = np.full(len(slots), 0.5, np.float32)
    return {name: RowAdapter(pair, scale) for name, pair in pairs.items()}


@fast_jit
def apply(x, params, adapters):
    return MIXTURE.apply(x, Layer(params, LayerAdapters(adapters), LayerContext(UNSHARDED, {})))[0]


@fast_jit
def apply_without(x, params):
    return WITHOUT.apply(x, Layer(params, LayerAdapters(), LayerContext(UNSHARDED, {})))[0]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_the_shared_expert_is_added_with_the_weight_of_its_gate(params):
    x, slots = normal(99, 3, D), (1, 4, 2)
    adapters, expected = make_adapters(*slots), []
    for row, slot in enumerate(slots):
        own = make_adapters(slot)

        def linear(x, name, own=own):
            pair = jax.tree.map(lambda leaf: leaf[0], own[SHARED_PREFIX + name].pair)
            return x @ params[SHARED_PREFIX + name] + (x @ pair.a) @ pair.b * 0.5

        inner = silu(linear(x[row], "gate_proj")) * linear(x[row], "up_proj")
        expected.append(linear(inner, "down_proj") / (1 + np.exp(-params["shared_gate"][0] @ x[row])))
    routed = apply_without(x, params)
    np.testing.assert_allclose(apply(x, params, adapters), routed + np.stack(expected), atol=1e-5)
    assert set(MIXTURE.targets()) - set(WITHOUT.targets()) == {
        SHARED_PREFIX + name for name in ("gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize("num_rows", [37, 150])
def test_the_bits_of_a_token_do_not_depend_on_its_row(params, num_rows):
    """The gate is stored as a matrix of one column.

    A plain product would give the last rows different bits.
    """
    x = np.broadcast_to(normal(99, D), (num_rows, D))
    found = np.asarray(apply(x, params, {}))
    np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))


def test_a_nan_in_the_adapter_of_one_row_does_not_spread(params):
    x, adapters = normal(98, 3, D), make_adapters(1, 2, 3)
    spoilt = jax.tree.map(np.array, adapters)
    for row in spoilt.values():
        row.pair.a[1] = row.pair.b[1] = np.nan
    found = np.asarray(apply(x, params, spoilt))
    np.testing.assert_array_equal(found[[0, 2]], np.asarray(apply(x, params, adapters))[[0, 2]])
    assert np.isnan(found[1]).all()
